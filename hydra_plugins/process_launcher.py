"""The package where Hydra looks for launchers; this one is training/sweeps/launcher.py."""

from training.sweeps.launcher import ProcessLauncher

__all__ = ["ProcessLauncher"]
