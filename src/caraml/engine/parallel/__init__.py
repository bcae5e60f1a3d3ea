"""How one model is divided among processes: one mesh, one file per strategy, applied to the model from outside."""
