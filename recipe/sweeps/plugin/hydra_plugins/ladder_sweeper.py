"""The package where Hydra looks for sweepers; this one is recipe/sweeps/ladder.py."""

from recipe.sweeps.ladder import LadderSweeper

__all__ = ["LadderSweeper"]
