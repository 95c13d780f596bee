"""The compiled GPU kernels, and a record of them that says which kernels a measurement ran."""

from bench.kernels.record import GROUPS, kernel_digests

__all__ = ["GROUPS", "kernel_digests"]
