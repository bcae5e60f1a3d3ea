"""Where a point runs: the script of a point, and the launchers that start it."""
