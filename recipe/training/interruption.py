"""Signals that end a run after a step."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch.distributed as dist

from recipe.distributed.ranks import highest

# How often the hosts of a run's ranks ask each other whether one has received a signal.
SECONDS_BETWEEN_QUESTIONS = 1.0


class Interruption:
    """Defers SIGINT, SIGTERM and SIGUSR2 until the step is finished; a second one acts at once.

    Slurm sends SIGUSR2 some time before a job ends if it was asked to (sbatch --signal=USR2@120).

    number  of the signal received, else None
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.number: int | None = None
        self.clock = clock
        self._handlers: dict[int, Any] = {}
        self._asked, self._steps, self._interval = clock(), 0, 1

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
        """Pass SIGUSR2 to the handler that this one replaced, such as submitit's, which queues the job again."""
        if self.number == signal.SIGUSR2 and callable(self._handlers[signal.SIGUSR2]):
            os.kill(os.getpid(), signal.SIGUSR2)

    def agreed(self, waits: bool) -> bool:
        """Whether to stop after this step. Every rank calls this after each step.

        waits  whether the hosts are about to wait for their devices

        Ranks have to stop after the same step, so their hosts ask each other, after every step or, where steps are
        shorter, about once a second. They also do before they wait for their devices: a host that waits for a device
        cannot say which rank is missing.
        """
        if not dist.is_initialized():
            return self.number is not None
        self._steps += 1
        if self._steps < self._interval and not waits:
            return False
        seconds = (self.clock() - self._asked) / self._steps
        number, slowest = highest((float(self.number or 0), seconds))
        self._asked, self._steps = self.clock(), 0
        # At most twice as many steps as before: a few that are short by chance do not silence the ranks for long.
        self._interval = max(1, min(2 * self._interval, int(SECONDS_BETWEEN_QUESTIONS / max(slowest, 1e-6))))
        # The others do not know of a signal that came during the exchange: it counts in the next one.
        if number:
            self.number = int(number)
        return number > 0
