"""What a probe is, and a model that takes longer inputs for a while."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from model.blocks import rotation_table
from model.config import Positions
from model.gpt import GPT

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
    """The trained length, and those beyond it that the model's positions allow: learned ones allow none."""
    return [trained] if model.config.positions is Positions.learned else [times * trained for times in BEYOND]


@contextmanager
def stretched(model: GPT, seq_len: int) -> Iterator[GPT]:
    """Within the block, the model takes inputs of `seq_len` tokens, with the angles of their rotary positions.

    Learned positions have no weights beyond the trained length.
    """
    before = model.seq_len
    rotary = model.config.positions is Positions.rotary and seq_len > before
    if rotary:
        kept = model.cos, model.sin
        table = rotation_table(seq_len, model.config.n_embd // model.config.n_heads)
        model.cos, model.sin = (angles.to(kept[0]) for angles in table)
    model.seq_len = max(before, seq_len)
    try:
        yield model
    finally:
        model.seq_len = before
        if rotary:
            model.cos, model.sin = kept
