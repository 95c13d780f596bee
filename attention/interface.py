"""The attention contract: one configuration, one call, one way to be refused.

Every implementation answers the same call

    out = attend(q, k, v, causal=True, scale=None, dropout_key=key)

and computes  out = dropout(softmax(scale * q k^T + mask)) v  (Vaswani et al. 2017, eq. 1).
What differs is which intermediate results exist in memory, and how fast it goes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from enum import Enum
from typing import ClassVar, Literal, overload

import torch
from torch import Tensor

from attention.dropout import RATES, DropoutKey, is_valid_rate
from errors import UserError


class Ablation(Enum):
    """A line of the online softmax to leave out, to see what it was for."""

    none = "none"
    no_max_subtraction = "no_max_subtraction"
    no_rescaling = "no_rescaling"


class DropoutRng(Enum):
    """Where dropout's random bits come from."""

    replay = "replay"  # keep_mask: the same mask for every implementation, tile size, device and rank
    torch = "torch"  # the backend's own generator: a mask nobody else can reproduce


class SDPABackend(Enum):
    """The backend of torch's scaled_dot_product_attention; `auto` leaves the choice to torch."""

    auto = "auto"
    flash = "flash"
    efficient = "efficient"
    cudnn = "cudnn"
    math = "math"


@dataclass
class AttentionConfig:
    """What a user chooses under `attention.*`.

    name       an implementation in the registry (attention/__init__.py)
    dropout    probability of dropping an attention weight, realised in steps of 1/256 (see attention/dropout)
    rng        whose random bits dropout uses; only sdpa takes `torch`
    block_q    rows of a score tile: queries (tiled)
    block_k    columns of a score tile: keys (tiled)
    ablate     leave out one line of the online softmax (tiled)
    backend    which of torch's kernels to use (sdpa)
    allow_tf32 let fp32 matrix products round their inputs to TF32 (flash)

    Every implementation reads `name` and `dropout`; an option it does not read is refused unless left at its default.
    """

    name: str = "naive"
    dropout: float = 0.0
    rng: DropoutRng = DropoutRng.replay
    block_q: int = 64
    block_k: int = 64
    ablate: Ablation = Ablation.none
    backend: SDPABackend = SDPABackend.auto
    allow_tf32: bool = False


class UnsupportedAttention(UserError, ValueError):
    """A combination the chosen implementation cannot serve; the message says what to change."""


@dataclass(frozen=True)
class AttentionShape:
    """What a model asks of its attention, known before any tensor exists."""

    head_dim: int
    n_heads: int
    n_kv_heads: int
    dtype: torch.dtype
    device: torch.device


class Attention(ABC):
    """An implementation of attention, built once from its configuration and called by every layer.

    Stateless: everything random is a function of the `dropout_key` that the caller passes.
    """

    name: ClassVar[str]
    options: ClassVar[frozenset[str]] = frozenset()  # what it reads of AttentionConfig beside name and dropout

    def __init__(self, config: AttentionConfig) -> None:
        """Raises UnsupportedAttention where the configuration asks for what this class does not do."""
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
        """Refuse, when the model is built, a shape, dtype or device this implementation cannot serve.

        Raises UnsupportedAttention with the override that helps.
        """

    @overload
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = True,
        scale: float | None = None,
        dropout_key: DropoutKey | None = None,
        return_lse: Literal[False] = False,
    ) -> Tensor: ...

    @overload
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = True,
        scale: float | None = None,
        dropout_key: DropoutKey | None = None,
        return_lse: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = True,
        scale: float | None = None,
        dropout_key: DropoutKey | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend.

        q            (B, H, T, D)      fp32, bf16 or fp16; any strides
        k, v         (B, H_kv, S, D)   H a multiple of H_kv: query heads h share key/value head h // (H // H_kv)
        causal       query i sees key j iff j <= i + S - T (aligned to the bottom right)
        scale        of the scores; D ** -0.5 by default
        dropout_key  what the mask is a function of; None (evaluation) drops nothing
        return_lse   also return the log-sum-exp of the scaled, masked scores, (B, H, T) in fp32, no gradient;
                     -inf for rows that see nothing

        Returns (B, H, T, D) in q's dtype. Rows that see nothing are zero.
        Raises ValueError where the shapes do not fit together.
        """
        check_shapes(q, k, v)
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        key = dropout_key if self.dropout > 0 else None
        # The precision is that of q, k and v: what an implementation computes in fp32 stays so under autocast.
        with torch.autocast(q.device.type, enabled=False):
            out, lse = self.attend(q, k, v, causal, scale, key)
            if not return_lse:
                return out
            return out, (self.lse(q, k, causal, scale) if lse is None else lse).detach()

    @abstractmethod
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, dropout_key: DropoutKey | None
    ) -> tuple[Tensor, Tensor | None]:
        """The implementation's part of `__call__`: checked shapes in, (out, lse) out.

        `dropout_key` is None where nothing is to be dropped, else `self.dropout` > 0. lse is None where it does not
        fall out on the way.
        """

    def lse(self, q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
        """The log-sum-exp that `__call__` describes, for an implementation whose `attend` does not come by it."""
        raise UnsupportedAttention(
            f"attention={self.name} does not return the log-sum-exp; use attention=naive, tiled or flash."
        )


def printable(option: object) -> object:
    """An option as one writes it on the command line."""
    return option.value if isinstance(option, Enum) else option


def readers(option: str) -> list[str]:
    """The implementations that read an option, as one writes them on the command line."""
    return [f"attention={cls.name}" for cls in Attention.__subclasses__() if option in cls.options]


def check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless q is (B, H, T, D) and k, v are (B, H_kv, S, D) of the same dtype and device."""
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


def causal_mask(
    T: int,
    S: int,
    *,
    rows: tuple[int, int] | None = None,
    columns: tuple[int, int] | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """(T, S) bool, True where query i sees key j: j <= i + S - T.

    `rows` and `columns`, each (start, stop), cut out a tile.
    """
    i = torch.arange(*(rows or (0, T)), device=device)[:, None]
    j = torch.arange(*(columns or (0, S)), device=device)[None, :]
    return j <= i + (S - T)


def accum_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums of `dtype` are made in: fp32 for bf16, fp16 and fp32, and fp64 for fp64, which gradcheck uses."""
    return torch.promote_types(dtype, torch.float32)
