"""Probes of a model that is trained: what train.py measures at the end of a run, as a command."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from data.progress import progress
from recipe.infer.evaluation.results import Measured
from recipe.infer.trained import Loaded
from recipe.run.config import ConfigError
from recipe.training.recall import build_recall, lengths_for, unknown_recalls


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
        yield Measured(name, metrics | beyond, name, details)


def limits(loaded: Loaded) -> str | None:
    """A sentence on the lengths that the model's positions do not allow."""
    if len(lengths_for(loaded.model, loaded.config.seq_len)) > 1:
        return None
    return f"Learned positions end at {loaded.config.seq_len:,} tokens, so no longer inputs are measured."
