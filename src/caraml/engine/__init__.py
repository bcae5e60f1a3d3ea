"""How a task is trained and timed: device clock, precision, ranks, the step, and the measuring loop. Knows no workload by name."""
