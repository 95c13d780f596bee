"""A corpus is one or two streams of rows, and each row belongs to a split.

Rows are read one by one, so no corpus has to fit into memory:

    {"split": "train" | "val", "text": str, "opens": bool}      opens: this row begins a document
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from data.files import Row
from data.tokenizers import Tokenizer, encoder


class Stream(NamedTuple):
    """Rows, and the share of `data.max_tokens` that they can fill at most."""

    rows: Iterable[Row]
    share: float


class Tokenised(NamedTuple):
    """A row's tokens and, for a conversation, 1 for each token of an answer and 0 for others; both 1-D unsigned."""

    tokens: np.ndarray
    answers: np.ndarray | None = None


class Corpus(ABC):
    """A source of documents."""

    size: int | None = None  # bytes of text, if known in advance

    @abstractmethod
    def source(self) -> dict[str, Any]:
        """JSON that identifies the text: equal JSON means equal text."""

    @abstractmethod
    def streams(self) -> list[Stream]:
        """The rows, in an order that never changes."""

    @abstractmethod
    def whole(self) -> Iterator[Row]:
        """The rows of the whole text, with no part held out for validation."""

    def encoder(self, tokenizer: Tokenizer) -> Callable[[Row], Tokenised]:
        """row -> its tokens; threads can call it in parallel."""
        encode = encoder(tokenizer)
        return lambda row: Tokenised(encode(row["text"]))

    def one_document(self) -> bool:
        """Whether the training text is a single document, as far as this is known without reading it."""
        return False

    def notices(self) -> list[str]:
        """Sentences about anything unexpected in how this text is used."""
        return []


def train_part(size: int, val_fraction: float) -> int:
    """The part of `size` characters, bytes or rows that is for training: the first ones."""
    return int(size * (1 - val_fraction))
