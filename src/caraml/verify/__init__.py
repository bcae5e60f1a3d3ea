"""The proof of the ruler: work of known truth through the whole pipeline, and every published number beside that truth."""
