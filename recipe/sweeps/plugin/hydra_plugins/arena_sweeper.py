"""The package where Hydra looks for sweepers; this one is recipe/sweeps/arena.py."""

from recipe.sweeps.arena import ArenaSweeper

__all__ = ["ArenaSweeper"]
