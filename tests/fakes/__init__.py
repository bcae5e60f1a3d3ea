"""Stand-ins for hardware, each with a known truth."""
