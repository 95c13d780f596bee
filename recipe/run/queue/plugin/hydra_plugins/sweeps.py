"""The package where Hydra looks for launchers and sweepers; these are those of recipe/run/queue/."""

from recipe.run.queue.arena import ArenaSweeper
from recipe.run.queue.launcher import ProcessLauncher

__all__ = ["ArenaSweeper", "ProcessLauncher"]
