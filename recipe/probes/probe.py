"""The interface of probes, and a context in which a model takes longer inputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from model.config import Positions
from model.gpt import GPT
from model.positions import position_tables

BEYOND = (1, 2, 4, 8)  # times the trained length


class Probe(ABC):
    """name  as in probes=[<name>]"""

    name: str

    @abstractmethod
    def measure(self, model: GPT) -> dict[str, float]:
        """Metrics of a model in evaluation mode, by their names in metrics.jsonl."""

    @abstractmethod
    def details(self, model: GPT) -> tuple[dict[str, float], dict[str, Any]]:
        """After training: metrics at longer inputs, and what summary.json has under probes.<name>."""


def lengths_for(model: GPT, trained: int) -> list[int]:
    """The trained length and, unless positions are learned, multiples of it."""
    return [trained] if model.config.positions is Positions.learned else [times * trained for times in BEYOND]


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
