"""Training steps on several GPUs."""
