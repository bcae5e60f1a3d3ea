"""One file per vendor interface. Each has ``create(argument, devices)``, and imports its vendor library in ``open``."""
