"""What turns a model and data into a trained run: optimizer, loop, checkpoints, meters, tracking, parity probe."""
