"""init_from: what train.py hands in to read weights, and the overrides that follow from a folder of them."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from attention import Score
from model.gpt import GPT
from model.options import GPTConfig
from recipe.run.compose import by_key, opened, quoted
from recipe.wording import as_typed


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


def with_start(overrides: list[str], weights: Weights) -> list[str]:
    """The overrides, preceded by ones for the model, score and tokenizer of `init_from`, as far as the user chose none.

    model=..., score=... and data.tokenizer=... are such choices. Raises WeightsError.
    """
    chosen = by_key(overrides)
    source = chosen["init_from"].value() if "init_from" in chosen else None
    if not isinstance(source, str) or "model" in chosen:
        return overrides
    options = weights.options(source)
    if "score" in chosen:
        options = {name: value for name, value in options.items() if not name.startswith("score.")}
    of_weights = [opened(f"{name}={written(value)}") for name, value in options.items() if name not in chosen]
    return ["model=tiny-gpt2", *of_weights, *overrides]  # the model from which the folder's options differ


def written(value: Any) -> Any:
    """A value in Hydra's grammar of overrides."""
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, list):
        return f"[{','.join(str(written(item)) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{name}:{written(item)}' for name, item in value.items())}}}"
    return as_typed(value)
