"""The probes of `probes=[...]`, by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import numpy as np

from data.tasks import TASKS
from recipe.errors import UserError
from recipe.training.recall.position_loss import PositionLoss
from recipe.training.recall.probe import Probe
from recipe.training.recall.recall import TaskProbe

NAMES = (*TASKS, PositionLoss.name)


class ProbeError(UserError, ValueError):
    """A probe that a model or its data do not fit; the message says what to change."""


def unknown_probes(names: Collection[str]) -> Iterator[str]:
    """A sentence for each name that no probe has."""
    yield from (f"probes={name} is not known; choose among {', '.join(NAMES)}." for name in names if name not in NAMES)


def build_probe(name: str, seq_len: int, vocab_size: int, data: str, text: Callable[[], np.ndarray]) -> Probe:
    """A probe of a model.

    name        one of NAMES
    seq_len     the trained length
    vocab_size  of the model's data
    data        their name
    text        gives the tokens of a text, 1-D, for a probe that measures one

    Raises ProbeError for one that does not fit.
    """
    if name == PositionLoss.name:
        if len(tokens := text()) <= seq_len:
            raise ProbeError(
                f"probes={name} needs a text of more than {seq_len:,} tokens, and this one has {len(tokens):,}; give a "
                "longer one."
            )
        return PositionLoss(tokens, seq_len)
    task = TASKS[name]
    if task.vocab_size > vocab_size:
        raise ProbeError(
            f"probes={name} needs a vocabulary of {task.vocab_size} tokens, and that of data={data} has {vocab_size}; "
            "leave it out."
        )
    if seq_len < task.min_seq_len:
        raise ProbeError(f"probes={name} needs seq_len={task.min_seq_len} or more, and seq_len={seq_len} is less.")
    return TaskProbe(task, seq_len)
