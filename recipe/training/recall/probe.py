"""The interface of probes, and a context in which a model takes longer inputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from model.config import Positions
from model.gpt import GPT
from model.positions import position_tables

BEYOND = (1, 2, 4, 8)  # times the trained length


# Takes what is measured and how many steps it has; yields a function of how many more steps are done.
Watch = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


@contextmanager
def unwatched(what: str, steps: int) -> Iterator[Callable[[int], None]]:
    """Show no progress."""
    yield lambda done: None


class Probe(ABC):
    """
    name     as in probes=[<name>]
    longest  no longer inputs are measured than this, in tokens; None: BEYOND alone limits them
    watch    shows the progress
    """

    name: str
    longest: int | None = None
    watch: Watch = staticmethod(unwatched)

    @abstractmethod
    def measure(self, model: GPT) -> dict[str, float]:
        """Metrics of a model in evaluation mode, by their names in metrics.jsonl."""

    @abstractmethod
    def details(self, model: GPT) -> tuple[dict[str, float], dict[str, Any]]:
        """After training: metrics at longer inputs, and what summary.json has under probes.<name>."""


def lengths_for(model: GPT, trained: int, longest: int | None = None) -> list[int]:
    """The trained length and, unless positions are learned, multiples of it up to `longest`."""
    if model.config.positions is Positions.learned:
        return [trained]
    return [trained, *(times * trained for times in BEYOND[1:] if longest is None or times * trained <= longest)]


@contextmanager
def stretched(model: GPT, seq_len: int) -> Iterator[GPT]:
    """Within the block, the model takes inputs of `seq_len` tokens, such as with the angles of their rotary positions.

    Learned positions have no weights beyond the trained length.
    """
    before, tables = model.seq_len, model.tables
    if seq_len > before:
        model.seq_len, model.tables = seq_len, position_tables(model.config, seq_len).to(model.wte.weight.device)
    try:
        yield model
    finally:
        model.seq_len, model.tables = before, tables
