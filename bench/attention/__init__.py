"""Attention alone: its speed, memory and error beside its peers, its kernels, and the tuning of their tiles."""
