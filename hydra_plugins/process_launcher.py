"""The package where Hydra looks for launchers; this one is training/launcher.py."""

from training.launcher import ProcessLauncher

__all__ = ["ProcessLauncher"]
