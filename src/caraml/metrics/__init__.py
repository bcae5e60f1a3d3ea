"""Every metric: name, unit, direction, definition, source and formula, each in one place."""
