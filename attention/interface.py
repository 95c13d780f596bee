"""The attention contract: one call, and one way to be refused.

Every implementation answers the same call

    out = attend(q, k, v, score=Score(window=1024), layout=Layout(), dropout_key=key).out
    out = attend.decode(q, cache, score=Score(window=1024)).out      where keys and values of earlier tokens were kept

and computes  out = dropout(softmax(scale * q k^T + mask)) v  (Vaswani et al. 2017, eq. 1), with the mask and the
changes of scores that attention/score.py defines. Implementations differ in which intermediate results exist in memory,
and in speed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from .config import AttentionConfig
from .decode.cache import Cache
from .dropout import RATES, DropoutKey, is_valid_rate
from .errors import AttentionError
from .score import Layout, Score, alibi_slopes

# What an implementation may not support: see Score.features, Layout.features and Attention.decode.
FEATURES = frozenset({"full", "window", "soft_cap", "alibi", "sinks", "documents", "offsets", "cache"})
CAUSAL, ONE_DOCUMENT = Score(), Layout()


class UnsupportedAttention(AttentionError):
    """A combination the chosen implementation does not support; the message says what to change."""


@dataclass(frozen=True)
class AttentionShape:
    """A model's requirements for its attention, known before any tensor exists.

    scores     of its layers
    documents  whether its batches have document bounds
    training   whether it is to be trained, and not only evaluated
    """

    head_dim: int
    n_heads: int
    n_kv_heads: int
    dtype: torch.dtype
    device: torch.device
    scores: tuple[Score, ...] = (Score(),)
    documents: bool = False
    training: bool = False


class AttentionOutput(NamedTuple):
    """The result of a call.

    out  (B, H, T, D)   in q's dtype
    lse  (B, H, T)      fp32, without gradient: the log of the softmax's sum; None unless asked for
    """

    out: Tensor
    lse: Tensor | None = None


class Terms(NamedTuple):
    """The arguments of a call besides q, k and v, with defaults filled in; see `Attention.__call__`.

    dropout_key  None where nothing is to be dropped
    slopes       (H,) fp32 where score.alibi, else None
    sinks        (H,) where score.sinks, else None
    """

    score: Score
    layout: Layout
    scale: float
    dropout_key: DropoutKey | None
    slopes: Tensor | None
    sinks: Tensor | None


class Attention(ABC):
    """An implementation of attention, built once from its configuration and called by every layer.

    Stateless: everything random is a function of the `dropout_key` that the caller passes.
    """

    name: ClassVar[str]
    options: ClassVar[frozenset[str]] = frozenset()  # fields of AttentionConfig it reads, besides name and dropout
    supports: ClassVar[frozenset[str]] = frozenset()  # the FEATURES that it has besides causal attention

    def __init__(self, config: AttentionConfig) -> None:
        """Raises UnsupportedAttention for options that this class does not support."""
        for option in fields(AttentionConfig):
            chosen = getattr(config, option.name)
            if option.name not in {"name", "dropout", *self.options} and chosen != option.default:
                raise UnsupportedAttention(
                    f"attention.{option.name}={printable(chosen)} has no effect with attention={self.name}; "
                    f"leave it at {printable(option.default)} or choose {' or '.join(readers(option.name))}."
                )
        if not is_valid_rate(config.dropout):
            raise UnsupportedAttention(f"attention.dropout={config.dropout} must be {RATES}.")
        self.config = config
        self.dropout = config.dropout

    def check(self, shape: AttentionShape) -> None:
        """Refuse, when the model is built, scores, shapes, dtypes and devices that this class does not support.

        Raises UnsupportedAttention with the override that helps.
        """
        for score in shape.scores:
            self.check_features(score.features())
        if shape.documents:
            self.check_features({"documents": "data.documents=mask"})

    def path(self, shape: AttentionShape, T: int) -> str | None:
        """The kernels for a model's layers on sequences of T tokens, by name; None where there is only one kind."""
        return None

    def check_features(self, features: Mapping[str, str]) -> None:
        """Raise UnsupportedAttention unless this class has all `features`: name -> the override that asks for it."""
        for feature, asked_by in features.items():
            if feature not in self.supports:
                others = [f"attention={cls.name}" for cls in Attention.__subclasses__() if feature in cls.supports]
                raise UnsupportedAttention(
                    f"attention={self.name} does not support {asked_by}; leave it out or choose {' or '.join(others)}."
                )

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        score: Score = CAUSAL,
        layout: Layout = ONE_DOCUMENT,
        scale: float | None = None,
        dropout_key: DropoutKey | None = None,
        slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        return_lse: bool = False,
    ) -> AttentionOutput:
        """Attend.

        q            (B, H, T, D)      fp32, bf16 or fp16; any strides
        k, v         (B, H_kv, S, D)   H a multiple of H_kv: query heads h share key/value head h // (H // H_kv)
        score        who sees whom and how scores are changed. Causal: query i sees key j iff j <= i + S - T
        layout       other positions, and documents
        scale        of the scores; D ** -0.5 by default
        dropout_key  determines the mask; None (evaluation) drops nothing
        slopes       (H,) fp32, of ALiBi, where score.alibi; None: those of Press et al. No gradient
        sinks        (H,) fp32, logits that join the softmax's sum, where score.sinks
        return_lse   also return the log of the softmax's sum, which counts the sink: log(exp(sink) + sum of exp(s)).
                     For a query that sees nothing that is the sink, or -inf without one

        Queries that see nothing give zeros, even with a sink. Dropout addresses rows and columns of the call, whatever
        the documents. Raises ValueError for tensors that do not fit together, UnsupportedAttention for what this
        implementation does not support.
        """
        check_tensors(q, k, v, score, layout, slopes, sinks)
        self.check_features(score.features() | layout.features())
        terms = fill_in(q, score, layout, scale, dropout_key if self.dropout > 0 else None, slopes, sinks)
        # q, k and v set the precision; autocast must not change what an implementation computes in fp32.
        with torch.autocast(q.device.type, enabled=False):
            out, lse = self.attend(q, k, v, terms)
            if not return_lse:
                return AttentionOutput(out)
            return AttentionOutput(out, (self.lse(q, k, terms) if lse is None else lse).detach())

    @torch.no_grad()
    def decode(
        self,
        q: Tensor,
        cache: Cache,
        *,
        score: Score = CAUSAL,
        scale: float | None = None,
        slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        return_lse: bool = False,
    ) -> AttentionOutput:
        """Attend from the last T tokens of each sequence to those that a cache holds, without dropout or gradient.

        q      (B, H, T, D)   row t of sequence b is its token cache.lengths[b] - T + t; usually T is 1
        cache  keys and values, those of the queries' own tokens included: `cache.write` first

        The rest as in `__call__`. Queries before a sequence's first token, all of them where its length is 0, see
        nothing and give zeros. Only shapes decide what runs, and nothing waits for a GPU: a captured CUDA graph may be
        replayed after lengths and pages have changed. Raises ValueError for tensors that do not fit together,
        UnsupportedAttention for what this implementation does not support.
        """
        cache.check()
        B, k, v = cache.lengths.shape[0], cache.k, cache.v
        if cache.pages is not None:  # as one page for each sequence: what remains to be checked does not depend on it
            k, v = (x[:1].expand(B, -1, -1, -1) for x in (k, v))
        check_tensors(q, k, v, score, ONE_DOCUMENT, slopes, sinks)
        self.check_features(score.features() | {"cache": "a cache"})
        terms = fill_in(q, score, Layout(lengths=cache.lengths), scale, None, slopes, sinks)
        with torch.autocast(q.device.type, enabled=False):
            out, lse = self.attend_cache(q, cache, terms)
            if not return_lse:
                return AttentionOutput(out)
            return AttentionOutput(out, self.lse(q, cache.read(0, cache.longest())[0], terms) if lse is None else lse)

    def attend_cache(self, q: Tensor, cache: Cache, terms: Terms) -> AttentionOutput:
        """The implementation's part of `decode`; terms.layout has the cache's lengths. lse as in `attend`."""
        raise NotImplementedError  # for implementations whose `supports` has no "cache"

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> AttentionOutput:
        """The implementation's part of `__call__`. lse is None if computing it takes extra work."""

    def lse(self, q: Tensor, k: Tensor, terms: Terms) -> Tensor:
        """The log-sum-exp that `__call__` describes, for an implementation whose `attend` returns none."""
        raise UnsupportedAttention(
            f"attention={self.name} does not return the log-sum-exp; use attention=naive, tiled or flash."
        )


def fill_in(
    q: Tensor,
    score: Score,
    layout: Layout,
    scale: float | None,
    dropout_key: DropoutKey | None,
    slopes: Tensor | None,
    sinks: Tensor | None,
) -> Terms:
    """The terms of a call, with their defaults where it left them out."""
    if score.alibi and slopes is None:
        slopes = alibi_slopes(q.shape[1], q.device)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    return Terms(score, layout, scale, dropout_key, slopes, sinks)


def printable(option: object) -> object:
    """An option as written on the command line."""
    return option.value if isinstance(option, Enum) else option


def readers(option: str) -> list[str]:
    """The implementations that read an option, as written on the command line."""
    return [f"attention={cls.name}" for cls in Attention.__subclasses__() if option in cls.options]


def check_tensors(
    q: Tensor, k: Tensor, v: Tensor, score: Score, layout: Layout, slopes: Tensor | None, sinks: Tensor | None
) -> None:
    """Raise ValueError unless the tensors of a call have the shapes that `Attention.__call__` describes."""
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape:
        raise ValueError(
            f"attention takes q (B, H, T, D) and k, v (B, H_kv, S, D); got {tuple(q.shape)}, {tuple(k.shape)}, "
            f"{tuple(v.shape)}."
        )
    if q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)} must agree in batch and head size.")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads are not a multiple of {k.shape[1]} key/value heads.")
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        raise ValueError(f"q, k, v must share dtype and device; got {q.dtype}, {k.dtype}, {v.dtype}.")
    for name, x, asked in (("slopes", slopes, score.alibi), ("sinks", sinks, score.sinks)):
        if x is not None and (not asked or x.shape != q.shape[1:2]):
            wanted = f"one for each of {q.shape[1]} query heads" if asked else f"{score} has none"
            raise ValueError(f"{name} of shape {tuple(x.shape)} do not fit: {wanted}.")
    if score.sinks and sinks is None:
        raise ValueError(f"{score} needs sinks, (H,): one logit for each of {q.shape[1]} query heads.")
    starts, ends = layout.document_starts, layout.document_ends
    if starts is not None or ends is not None:
        last = max(layout.query_start(q.shape[2], k.shape[2]) + q.shape[2], layout.k_start + k.shape[2])
        for x in (starts, ends):
            if x is None or x.ndim != 2 or x.shape[0] != q.shape[0] or x.shape[1] < last or x.is_floating_point():
                raise ValueError(
                    f"document_starts and document_ends must be integers of shape ({q.shape[0]}, {last} or more); got "
                    f"{None if x is None else (tuple(x.shape), x.dtype)}."
                )


def accum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype for sums of `dtype`: fp32 for bf16, fp16 and fp32, and fp64 for fp64, which gradcheck uses."""
    return torch.promote_types(dtype, torch.float32)
