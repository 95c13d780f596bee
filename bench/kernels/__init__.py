"""The compiled GPU kernels, and a committed record of what they use."""
