"""What train.py hands in to read the weights that `init_from` names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from attention import Score
from model.gpt import GPT
from model.options import GPTConfig


class Weights(Protocol):
    """The weights that a run may start from, by the source that `init_from` names. Raises WeightsError."""

    def options(self, source: str) -> dict[str, Any]:
        """Overrides for the model, score and tokenizer that the weights need."""

    def mistakes(
        self, source: str, model: GPTConfig, scores: Sequence[Score], seq_len: int, tokenizer: str
    ) -> Iterator[str]:
        """A sentence for each reason why a model cannot start from them, as far as that needs no network.

        tokenizer  as data.tokenizer names it
        """

    def load(self, model: GPT, source: str) -> None:
        """Overwrite the model's parameters."""
