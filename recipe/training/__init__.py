"""Training a model on data: optimizer, loop, checkpoints, the state of a run and its record."""
