"""The compiled GPU kernels, and a committed record of them that identifies the kernels of a measurement."""

from bench.kernels.record import GROUPS, kernel_digests

__all__ = ["GROUPS", "kernel_digests"]
