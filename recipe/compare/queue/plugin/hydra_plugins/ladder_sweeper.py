"""The package where Hydra looks for sweepers; this one is recipe/compare/queue/ladder.py."""

from recipe.compare.queue.ladder import LadderSweeper

__all__ = ["LadderSweeper"]
