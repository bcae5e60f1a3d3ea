"""CARAML: Compact, Automated, Reproducible Assessment of Machine Learning."""

__version__ = "0.1.0"
