"""The package where Hydra looks for launchers; this one is recipe/compare/queue/launcher.py."""

from recipe.compare.queue.launcher import ProcessLauncher

__all__ = ["ProcessLauncher"]
