"""Published results as data: the tables and stated figures of the sources that CARAML builds on, and what disagrees in them."""

from caraml.reference.rows import FIELDS, SOURCES, Reference, load, paths, select

__all__ = ["FIELDS", "SOURCES", "Reference", "load", "paths", "select"]
