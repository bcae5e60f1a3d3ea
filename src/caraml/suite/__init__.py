"""What is asked: suite files, their sweeps, and the points that they expand to."""
