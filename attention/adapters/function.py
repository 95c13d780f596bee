"""A plain function of the user's as an Attention, called as `gpt-attention check` calls it (check/subject.py)."""

import math

from torch import Tensor

from ..check.cases import Case, Inputs
from ..check.subject import find, library_of
from ..errors import Option, UnsupportedAttention, no_dropout
from ..from_file import load
from ..interface import Attention, AttentionOutput, AttentionShape, Call
from ..options import AttentionConfig

STYLES = ("plain", "sdpa", "flash")  # whose calls need no bounds of documents


def of_file(config: AttentionConfig) -> Attention:
    """The attention that `config.name`, <file>.py:<name>, names: an Attention, its class, or a plain function.

    Raises UnsupportedAttention.
    """
    found = load(config.name)
    kind = found if isinstance(found, type) else type(found)
    if issubclass(kind, Attention):
        kind.name = getattr(kind, "name", config.name)
        return kind(config)
    if (library := library_of(kind)) is not None:
        raise UnsupportedAttention(
            "{} extends the Attention of {}; import it from {} instead.",
            Option("attention", config.name),
            library.__name__,
            Attention.__module__.partition(".")[0],
        )
    return FunctionAttention(config)


class FunctionAttention(Attention):
    """f(q, k, v, ...), whose parameters say what it supports besides causal attention."""

    name = "function"
    returns_lse = False

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        self.name, self.subject = config.name, find(config.name)  # type: ignore[misc]
        if self.subject.style not in STYLES:
            raise UnsupportedAttention(
                "{} is called as {}, which cannot train; write a class (docs/add-an-attention.md).",
                Option("attention", config.name),
                self.subject.style,
            )
        if config.dropout > 0:
            raise no_dropout(config.name, config.dropout)
        self.supports = self.subject.features & {"full", "window", "soft_cap", "alibi", "sinks"}
        self.exact = self.subject.exact  # type: ignore[misc]

    def check(self, shape: AttentionShape) -> None:
        """Also refuse fewer key/value heads than query heads where the function's parameters do not offer them."""
        super().check(shape)
        if shape.n_kv_heads < shape.n_heads and "grouped" not in self.subject.features:
            raise UnsupportedAttention(
                "{} takes as many key/value heads as query heads, not {} and {}; set model.n_kv_heads=null.",
                Option("attention", self.name),
                shape.n_kv_heads,
                shape.n_heads,
            )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> AttentionOutput:
        (B, H, T, D), score = q.shape, call.spec.score
        case = Case(
            B,
            H,
            k.shape[1],
            T,
            k.shape[2],
            D,
            score.causal,
            window=score.window,
            soft_cap=score.soft_cap,
            alibi=score.alibi,
            sinks=score.sinks,
            scale=None if call.spec.scale == 1 / math.sqrt(D) else call.spec.scale,
        )
        if missing := case.features() - self.subject.features:
            raise UnsupportedAttention("{} has no parameter for {}.", Option("attention", self.name), min(missing))
        inputs = Inputs(q, k, v, q, call.tensors.get("slopes"), call.tensors.get("sinks"))
        return AttentionOutput(self.subject.prepared(case, inputs)(q, k, v)[0].to(q.dtype))
