"""The data options."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any


class Documents(Enum):
    """How attention treats documents that share a sequence."""

    ignore = "ignore"  # tokens also see earlier documents
    mask = "mask"  # tokens see only the document that they belong to
    restart = "restart"  # the same, and positions count from the document's start


@dataclass
class HubRows:
    """The option `data.hub_rows`.

    revision  a commit, tag or branch
    subset    its name
    split     "train+test" joins two
    """

    revision: str | None = None
    subset: str | None = None
    split: str = "train"


@dataclass
class DataConfig:
    """The options under `data.*`.

    name            a corpus of data/corpora.py
    path            a file or folder of .txt, .jsonl, .parquet, .bin (data=text), or several, [a,b]; a .jsonl of
                    conversations (data=chat)
    weights         of several paths: how many sequences of each follow one another, such as [3,1]; null: one of each
    tokenizer       bytes, gpt2, bpe, or a tokenizer.json
    bpe_vocab_size  tokens that tokenizer=bpe learns at most, end-of-text included
    max_tokens      tokens to prepare, for training and validation together; null: all
    val_fraction    share of the text that is held out for validation
    cache           folder of the prepared tokens
    hub             a data set on the Hugging Face hub, or the folder of its download
    hub_rows        the rows of that data set to read
    documents       how attention treats documents that share a sequence (docs/variants.md)
    text_field      the field of .jsonl, .parquet and hub rows that holds the text
    """

    name: str = "stdlib"
    path: Any = None
    tokenizer: str = "bytes"
    bpe_vocab_size: int = 4096
    max_tokens: int | None = None
    val_fraction: float = 0.1
    cache: str = ".cache/tokens"
    hub: str | None = None
    hub_rows: HubRows = field(default_factory=HubRows)
    text_field: str = "text"
    documents: Documents = Documents.ignore
    weights: list[int] | None = None

    def __post_init__(self) -> None:
        if self.path is not None and not isinstance(self.path, list):
            self.path = str(self.path)

    def texts(self) -> list[DataConfig]:
        """A configuration for each of several paths; else this one."""
        return [replace(self, path=path, weights=None) for path in self.mixture] or [self]

    @property
    def mixture(self) -> dict[str, int]:
        """The weight of each of several paths; empty where there is one."""
        paths = [str(path) for path in self.path] if isinstance(self.path, list) else []
        return dict(zip(paths, self.weights or [1] * len(paths), strict=True))
