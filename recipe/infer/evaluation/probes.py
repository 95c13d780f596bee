"""Probes of a model that is trained: what train.py measures at the end of a run, as a command."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from data.progress import progress
from recipe.infer.evaluation.results import Measured
from recipe.infer.trained import Loaded
from recipe.run.config import ConfigError
from recipe.training.recall import PositionLoss, build_recall, lengths_for, unknown_recalls


def probe_names(given: str) -> list[str]:
    """The names in `[mqar,position_loss]`, with or without brackets. Raises ConfigError."""
    names = [name.strip() for name in given.strip().removeprefix("[").removesuffix("]").split(",") if name.strip()]
    if not names:
        raise ConfigError(f"probes={given} names no probe; name one, such as probes=[position_loss].")
    for sentence in unknown_recalls(names):
        raise ConfigError(sentence)
    return list(dict.fromkeys(names))


def check_length(loaded: Loaded, seq_len: int | None) -> None:
    """Raise ConfigError for a longest input that is shorter than the trained ones."""
    if seq_len is not None and seq_len < loaded.config.seq_len:
        raise ConfigError(
            f"seq_len={seq_len} is shorter than the {loaded.config.seq_len} tokens that the model was trained with, "
            "where probes begin; use more, or leave it out."
        )


def run_probes(
    names: Sequence[str], loaded: Loaded, text: Callable[[], np.ndarray], longest: int | None
) -> Iterator[Measured]:
    """Measure each probe, with its progress on standard error.

    text     gives the tokens of a text, 1-D, for position_loss
    longest  input to measure, in tokens; None: 8 times the trained length
    """
    config, model = loaded.config, loaded.model
    for name in names:
        probe = build_recall(name, config.seq_len, model.vocab_size, config.data.name, text)
        probe.longest, probe.watch = longest, progress
        with torch.no_grad(), loaded.autocast():
            metrics = probe.measure(model)
            beyond, details = probe.details(model)
        table = as_table(name, details) if details else "\n".join(f"{x}  {value:.4g}" for x, value in metrics.items())
        yield Measured(name, metrics | beyond, name, details, table)


def limits(loaded: Loaded) -> str | None:
    """A sentence on the lengths that the model's positions do not allow."""
    if len(lengths_for(loaded.model, loaded.config.seq_len)) > 1:
        return None
    return f"Learned positions end at {loaded.config.seq_len:,} tokens, so no longer inputs are measured."


def as_table(probe: str, details: Mapping[str, Any]) -> str:
    """A probe's details as lines of text: the accuracy by length and distance, or the loss by position."""
    rows = (loss_rows if probe == PositionLoss.name else accuracy_rows)(details)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def accuracy_rows(details: Mapping[str, Any]) -> list[list[str]]:
    """A row for each length, and a column for each range of distances that any length has; in percent."""
    lengths, cells = details["lengths"], details["accuracy"]
    asked = [n for n, of_range in enumerate(zip(*cells, strict=True)) if any(cell is not None for cell in of_range)]
    ranges = spans([*details["distances"], 2 * lengths[-1]])
    rows = [
        [f"{length:,}", *("" if row[n] is None else f"{100 * row[n]:.0f} %" for n in asked)]
        for length, row in zip(lengths, cells, strict=True)
    ]
    return [["tokens", *(f"{ranges[n]} back" for n in asked)], *rows]


def loss_rows(details: Mapping[str, Any]) -> list[list[str]]:
    """A row for each range of positions, which count from 1; the last range is open."""
    firsts = [position + 1 for position in details["positions"]]
    ranges = [*spans(firsts), f"from {firsts[-1]:,}"]
    return [
        ["position", "loss"],
        *([where, f"{loss:.4f}"] for where, loss in zip(ranges, details["loss"], strict=True)),
    ]


def spans(edges: Sequence[int]) -> list[str]:
    """The whole numbers from each edge to before the next, in words."""
    return [f"{low:,}" if high == low + 1 else f"{low:,}-{high - 1:,}" for low, high in pairwise(edges)]
