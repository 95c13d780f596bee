"""The package where Hydra looks for launchers; this one is recipe/sweeps/launcher.py."""

from recipe.sweeps.launcher import ProcessLauncher

__all__ = ["ProcessLauncher"]
