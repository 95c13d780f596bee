"""The ladder: one dial grows a model, a law is fitted to its losses, and the next size is predicted, then run."""
