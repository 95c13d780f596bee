"""The package where Hydra looks for sweepers; this one is recipe/compare/queue/arena.py."""

from recipe.compare.queue.arena import ArenaSweeper

__all__ = ["ArenaSweeper"]
