"""Signals that end a run after a step."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist


class Interruption:
    """Defers SIGINT, SIGTERM and SIGUSR2 until the step is finished; a second one acts at once.

    Slurm sends SIGUSR2 some time before a job ends if it was asked to (sbatch --signal=USR2@120).

    number     of the signal received, else None
    timeout_s  how long to wait for the other ranks, which have to stop after the same step
    """

    def __init__(self, timeout_s: float) -> None:
        self.number: int | None = None
        self.timeout_s = timeout_s
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
            self._handlers[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        self.__exit__()

    def pass_on(self) -> None:
        """Give SIGUSR2 to whoever waited for it before, such as submitit, which then queues the job again."""
        if self.number == signal.SIGUSR2 and callable(self._handlers[signal.SIGUSR2]):
            os.kill(os.getpid(), signal.SIGUSR2)

    def agreed(self) -> bool:
        """Whether to stop after this step. Ranks have to stop after the same one, so their hosts ask each other; none
        waits for its device."""
        if not dist.is_initialized():
            return self.number is not None
        number = torch.tensor(self.number or 0)
        asked = dist.all_reduce(number, dist.ReduceOp.MAX, async_op=True)
        asked.wait(timedelta(seconds=self.timeout_s))
        # The others do not know of a signal that came during the exchange: it is kept for the next one.
        if agreed := int(number):
            self.number = agreed
        return agreed != 0
