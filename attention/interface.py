"""The attention contract: one call, and one way to refuse it.

Every implementation answers the same call

    out = attend(q, k, v, score=Score(window=1024), layout=Layout(), dropout_key=key).out
    out = attend.decode(q, cache, score=Score(window=1024)).out      the cache has the keys and values of earlier tokens

and computes  out = dropout(softmax(scale * q k^T + mask)) v  (Vaswani et al. 2017, eq. 1), with the mask and the
changes of scores that attention/score.py defines. Implementations differ in which intermediate results exist in memory,
and in speed.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .decode.cache import Cache
from .dropout import RATES, DropoutKey, drop_threshold, is_valid_rate
from .errors import AttentionError, Option, UnsupportedAttention, listed
from .formula.call import prepared
from .formula.hoist import scaled_queries
from .layout import Layout
from .options import AttentionConfig
from .score import Score
from .scores import OPTIONS
from .spec import Spec
from .tensors import check_inputs, score_tensors

# Features that an implementation may lack: see Score.features, Layout.features and Attention.decode.
FEATURES = frozenset({"full", *(option.name for option in OPTIONS), "formula", "documents", "offsets", "cache"})
CAUSAL, ONE_DOCUMENT = Score(), Layout()


@dataclass(frozen=True)
class AttentionShape:
    """A model's requirements for its attention, known before any tensor exists.

    scores     of its layers
    documents  whether its batches have document bounds
    training   whether it will be trained, not only evaluated
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


class Call(NamedTuple):
    """The arguments of a call besides q, k and v, with defaults filled in; see `Attention.__call__`.

    spec         the arguments that are not tensors: score, scale and so on
    layout       positions and documents
    dropout_key  (7,) int64, from `DropoutKey.pack`; None drops nothing
    tensors      of the score, by name: see Score.tensors
    formula      the inputs of the formula's scores (formula/hoist.py); set by `Attention.prepare`
    factors      of s, one for each query, where the implementation `scales_queries` itself
    """

    spec: Spec
    layout: Layout
    dropout_key: Tensor | None
    tensors: dict[str, Tensor]
    formula: tuple[Tensor, ...] = ()
    factors: Tensor | None = None


class Attention(ABC):
    """An implementation of attention, built once from its configuration and called by every layer.

    Stateless: everything random is a function of the `dropout_key` that the caller passes.
    """

    name: ClassVar[str]
    options: ClassVar[frozenset[str]] = frozenset()  # fields of AttentionConfig it reads, besides name and dropout
    supports: frozenset[str] = frozenset()  # the FEATURES that it has besides causal attention; an option may take some
    returns_lse: bool = True  # whether a call may have return_lse=True
    scales_queries: ClassVar[bool] = False  # whether a formula's factors of s come as Call.factors, and not within q
    operators: ClassVar[frozenset[str]] = frozenset()  # torch's names of those whose results recomputation may keep
    known: Any = None  # calls that were checked, where an implementation remembers them: see `Known` in flash/launch.py
    exact: ClassVar[bool] = False  # whether it computes the contract's function, so that another may replace it

    def __init__(self, config: AttentionConfig) -> None:
        """Raises UnsupportedAttention for options that this class does not support."""
        for option in fields(AttentionConfig):
            chosen = getattr(config, option.name)
            if option.name not in {"name", "dropout", *self.options} and chosen != option.default:
                readers = (cls.name for cls in Attention.__subclasses__() if option.name in cls.options)
                template, names = listed(sorted(readers))
                raise UnsupportedAttention(
                    f"{{}} has no effect with {{}}; leave it at {{}} or choose {template}.",
                    Option(f"attention.{option.name}", plain(chosen)),
                    Option("attention", self.name),
                    plain(option.default),
                    *names,
                )
        if not is_valid_rate(config.dropout):
            raise UnsupportedAttention("{} must be {}.", Option("attention.dropout", config.dropout), RATES)
        self.config = config
        self.dropout = config.dropout
        chosen = config.allow_tf32, config.path.value, config.precision.value, config.block_q, config.block_k
        self.options_of_spec = (*chosen, config.ablate.value)  # once: short calls wait for the host

    def check(self, shape: AttentionShape) -> None:
        """Refuse, when the model is built, scores, shapes, dtypes and devices that this class does not support.

        Raises UnsupportedAttention with the choice that helps.
        """
        for score in shape.scores:
            self.check_features(score.features())
        if shape.documents:
            self.check_features({"documents": Option("layout.documents")})

    def path(self, shape: AttentionShape, T: int) -> str | None:
        """The kernels for a model's layers on sequences of T tokens, by name; None where there is only one kind."""
        return None

    def check_features(self, features: Mapping[str, Option]) -> None:
        """Raise UnsupportedAttention unless this class has all `features`: name -> the option that needs it."""
        for feature, asked_by in features.items():
            if feature not in self.supports:
                template, names = listed(
                    sorted(cls.name for cls in Attention.__subclasses__() if feature in cls.supports)
                )
                raise UnsupportedAttention(
                    f"{{}} does not support {{}}; leave it out or choose {template}.",
                    Option("attention", self.name),
                    asked_by,
                    *names,
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
        dropout_key: DropoutKey | Tensor | None = None,
        return_lse: bool = False,
        **tensors: Any,
    ) -> AttentionOutput:
        """Attend.

        q            (B, H, T, D)      fp32, bf16 or fp16; any strides
        k, v         (B, H_kv, S, D)   H a multiple of H_kv: query heads h share key/value head h // (H // H_kv)
        score        which keys a query sees and how scores are changed. Causal: query i sees key j iff j <= i + S - T
        layout       other positions, and documents
        scale        of the scores; D ** -0.5 by default
        dropout_key  determines the mask, packed or not (`DropoutKey.pack`); None (evaluation) drops nothing
        return_lse   also return the log of the softmax's sum, which counts the sink: log(exp(sink) + sum of exp(s)).
                     For a query that sees nothing that is the sink, or -inf without one
        tensors      the score's tensors, by name (attention/scores/), or all in one mapping, tensors={...}

        Queries that see nothing give zeros, even with a sink. Dropout addresses rows and columns of the call, whatever
        the documents. Raises ValueError for tensors that do not fit together, UnsupportedAttention for arguments that
        this implementation does not support.
        """
        check_inputs(q, k, v, layout)
        self.check_features(score.features() | layout.features())
        call = self.call(q, score, layout, scale, dropout_key, tensors)
        # q, k and v set the precision; autocast must not change what an implementation computes in fp32.
        with without_autocast(q.device.type):
            q, call = self.prepare(q, call, k.shape[2])
            result = self.attend(q, k, v, call)
            if isinstance(result, Tensor):  # which would unpack, with a batch of two
                raise AttentionError("{} returns a tensor from `attend`; return AttentionOutput(out).", self.name)
            out, lse = result
            if not return_lse:
                return AttentionOutput(out)
            return AttentionOutput(out, (self.lse(q, k, call) if lse is None else lse).detach())

    @torch.no_grad()
    def decode(
        self,
        q: Tensor,
        cache: Cache,
        *,
        score: Score = CAUSAL,
        scale: float | None = None,
        return_lse: bool = False,
        **tensors: Any,
    ) -> AttentionOutput:
        """Attend from the last T tokens of each sequence to the tokens in a cache, without dropout or gradient.

        q      (B, H, T, D)   row t of sequence b is its token cache.lengths[b] - T + t; usually T is 1
        cache  keys and values, also of the queries' tokens: call `cache.write` first

        Other arguments as in `__call__`. Queries before a sequence's first token, all of them where its length is 0,
        see nothing and give zeros. The work depends on shapes alone, and nothing waits for a GPU: a captured CUDA graph
        may be replayed after lengths and pages have changed. Raises ValueError for tensors that do not fit together,
        UnsupportedAttention for arguments that this implementation does not support.
        """
        cache.check()
        B, k, v = cache.lengths.shape[0], cache.k, cache.v
        if cache.pages is not None:  # as one page for each sequence: the remaining checks do not depend on the pages
            k, v = (x[:1].expand(B, -1, -1, -1) for x in (k, v))
        check_inputs(q, k, v, ONE_DOCUMENT)
        self.check_features(score.features() | {"cache": Option("cache")})
        call = self.call(q, score, Layout(lengths=cache.lengths), scale, None, tensors)
        with without_autocast(q.device.type):
            q, call = self.prepare(q, call, cache.longest())
            out, lse = self.attend_cache(q, cache, call)
            if not return_lse:
                return AttentionOutput(out)
            return AttentionOutput(out, self.lse(q, cache.read(0, cache.longest())[0], call) if lse is None else lse)

    def call(
        self,
        q: Tensor,
        score: Score,
        layout: Layout,
        scale: float | None,
        dropout_key: DropoutKey | Tensor | None,
        tensors: dict[str, Any],
    ) -> Call:
        """The arguments of a call as one value, with their defaults where they are None."""
        drops = dropout_key is not None and self.dropout > 0
        spec = Spec(
            score,
            1 / math.sqrt(q.shape[-1]) if scale is None else scale,
            layout.document_starts is not None,
            layout.offsets(),
            drop_threshold(self.dropout) if drops else 0,
            *self.options_of_spec,
        )
        if isinstance(dropout_key, DropoutKey):
            dropout_key = dropout_key.pack(q.device) if drops else None
        return Call(spec, layout, dropout_key if drops else None, score_tensors(score, tensors, q))

    def prepare(self, q: Tensor, call: Call, S: int) -> tuple[Tensor, Call]:
        """A call with its formula, for q (B, H, T, D) and S keys.

        A factor of s that is the same along a row multiplies q. Other parts of the formula that do not depend on the
        single score are computed here too. Raises FormulaError for tensors that do not fit.
        """
        spec = call.spec
        if spec.score.expression is None or (spec.score.formula is None and "formula" not in self.supports):
            return q, call
        factors, scale, inputs = prepared(spec.score, call.layout, q, S, call.tensors)
        learned = [k for k, x in enumerate(inputs) if x.requires_grad] if torch.is_grad_enabled() else []
        spec = spec._replace(scale=spec.scale * scale, computed=len(inputs), learned=tuple(learned))
        if factors is not None and not self.scales_queries:
            q, factors = scaled_queries(q, factors), None
        if factors is not None:
            is_learned = factors.requires_grad and torch.is_grad_enabled()
            spec = spec._replace(factors="learned" if is_learned else "fixed")
        return q, call._replace(spec=spec, formula=inputs, factors=factors)

    def attend_cache(self, q: Tensor, cache: Cache, call: Call) -> AttentionOutput:
        """The implementation's part of `decode`; call.layout has the cache's lengths. lse as in `attend`."""
        raise NotImplementedError  # for implementations whose `supports` has no "cache"

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> AttentionOutput:
        """The implementation's part of `__call__`. lse is None if computing it takes extra work."""

    def lse(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        """The log-sum-exp of `__call__`, for an implementation whose `attend` does not return it."""
        template, names = listed(["naive", "tiled", "flash"])
        raise UnsupportedAttention(
            f"{{}} does not return the log-sum-exp; use {template}.", Option("attention", self.name), *names
        )


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """Within it autocast is off. Where it is off already, a call need not take the time to switch it."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def plain(option: object) -> object:
    """The value of an option; of an enum its name."""
    return option.value if isinstance(option, Enum) else option
