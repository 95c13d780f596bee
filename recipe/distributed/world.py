"""The place of a process among the ranks of a run."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class World:
    """The place of this process among the ranks of a run, as set by torchrun or by Slurm's srun.

    context  successive ranks that share the rows of a sequence; the others have other sequences
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    context: int = 1

    @property
    def data_rank(self) -> int:
        """The place of this process among the ranks with different sequences."""
        return self.rank // self.context

    @property
    def data_size(self) -> int:
        """The number of ranks, or groups of ranks, with different sequences."""
        return self.size // self.context

    @classmethod
    def from_environment(cls, context: int = 1) -> World:
        """The world that torchrun's environment variables describe, else srun's; without either, one process."""
        torchrun, srun = ("RANK", "WORLD_SIZE", "LOCAL_RANK"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
        for names in (torchrun, srun):
            if names[1] in os.environ:
                rank, size, local_rank = (int(os.environ.get(name, 0)) for name in names)
                return cls(rank, size, local_rank, context)
        return cls(context=context)
