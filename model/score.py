"""The scores of the layers: one for all, or a pattern over the layers."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from attention.score import NAMES, Score, ScoreError
from model.options import GPTConfig, misfit

# The values that may differ from layer to layer.
LAYER_NAMES = tuple(name for name in NAMES if name != "causal")


@dataclass
class ScoreConfig:
    """The options under `score.*`.

    name      name of the preset, for tables and legends
    window    keys a query sees, itself included; None: all
    soft_cap  c in c tanh(s / c), which keeps scores between -c and c; None: no cap
    alibi     subtract slope_h (i - j) from the score of query i and key j
    sinks     a learned logit for each head joins the softmax's sum
    formula   the changed score, such as "s * log(n)"; None: s (docs/formulas.md)
    learned   shapes of the formula's learned tensors by name, such as {bias: [h, 128]} for h heads, or
              {bias: {shape: [h, 128], init: 0.5}}
    tensors   the formula's other tensors by name: model.forget_gate, alibi_slopes, or numbers in lists
    layers    values that replace those above, by layer, repeated: [{window: 1024}, {}] is a window in every other
              layer. None: all alike
    """

    name: str = "causal"
    window: int | None = None
    soft_cap: float | None = None
    alibi: bool = False
    sinks: bool = False
    formula: str | None = None
    learned: dict[str, Any] | None = field(default_factory=dict)
    tensors: dict[str, Any] | None = field(default_factory=dict)
    layers: list[dict[str, Any]] | None = None


def layer_scores(config: ScoreConfig, n_layers: int) -> tuple[Score, ...]:
    """The score of each layer. Raises ScoreError."""
    for mistake in score_mistakes(config, n_layers):
        raise mistake
    base = {name: getattr(config, name) for name in LAYER_NAMES}
    pattern = config.layers or [{}]
    return tuple(Score(**(base | pattern[layer % len(pattern)])) for layer in range(n_layers))


def attention_scores(config: ScoreConfig, model: GPTConfig) -> tuple[Score, ...]:
    """The score of each layer that has attention. Raises ScoreError."""
    scores = layer_scores(config, model.n_layers)
    return tuple(scores[layer] for layer in model.attention_layers)


def score_mistakes(config: ScoreConfig, n_layers: int) -> Iterator[ScoreError]:
    """An error, with the remedy, for each value that no layer can have."""
    pattern = [{}] if config.layers is None else config.layers
    if sentence := misfit("score.layers", pattern, n_layers):
        yield ScoreError(sentence)
    base = {name: getattr(config, name) for name in LAYER_NAMES}
    reported: set[str] = set()
    read: set[str] = set()
    for entry in pattern:
        if unknown := [name for name in entry if name not in LAYER_NAMES]:
            yield ScoreError(
                f"score.layers has {unknown[0]}={entry[unknown[0]]}; an entry takes {', '.join(LAYER_NAMES)}, with "
                "values as in score.*."
            )
            continue
        for name, value in (base | entry).items():
            try:
                Score(**{name: value})
            except ScoreError as error:
                if str(error) not in reported:  # a value that layers share is reported once
                    yield error
                reported.add(str(error))
        try:
            if not reported:
                read |= Score(**(base | entry)).tensors().keys()
        except ScoreError as error:  # values that no layer can have together
            yield error
            reported.add(str(error))
    learned, fixed = config.learned or {}, config.tensors or {}
    for name in [] if reported else learned | fixed:
        if name in learned and name in fixed:
            yield ScoreError(f"score.learned and score.tensors both give {name}; leave one out.")
        elif name not in read:
            missing = sorted(read - {*learned, *fixed})
            instead = f"; nothing gives {', '.join(missing)}" if missing else ""
            where = "learned" if name in learned else "tensors"
            yield ScoreError(f"score.{where} has {name}, which no formula reads{instead}.")


def describe_score(config: ScoreConfig) -> str:
    """The preset and its differences from plain causal attention: "window (window=64)"."""
    default = ScoreConfig()
    chosen = (
        f"{name}={json.dumps(value)}"
        for name, value in asdict(config).items()
        if name != "name" and value != getattr(default, name)
    )
    values = ", ".join(chosen).replace('"', "")  # as one writes them on the command line
    return f"{config.name} ({values})" if values else config.name
