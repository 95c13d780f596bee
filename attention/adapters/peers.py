"""Attention by other libraries: torch's varlen_attn, and flash-attn 4. Neither is a default.

Both take bf16 and fp16 on a GPU, keep memory linear in the sequence and have no dropout. Documents are passed as
successive sequences of variable length, so keys of other documents are not visited.
"""

from __future__ import annotations

import importlib
import inspect
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import gpu
from ..errors import Option, UnsupportedAttention, no_dropout
from ..interface import Attention, AttentionOutput, AttentionShape, Call
from ..options import AttentionConfig
from .trial import attend_once

OURS = Option("attention", "flash")


class Sequences(NamedTuple):
    """Documents as sequences that lie one after the other.

    bounds   (n + 1,) int32: where each begins in the batch's B * T tokens and, last, B * T
    longest  the tokens of the longest
    """

    bounds: Tensor
    longest: int


class Peer(Attention):
    """The base of this module's implementations.

    Refusals suggest direct subclasses of Attention only, never one of these: they may not be installed.
    """

    exact = True
    capabilities: tuple[int, ...]  # major compute capabilities that the kernels support

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        if config.dropout > 0:
            raise no_dropout(self.name, config.dropout)
        # The most recent documents: the tensor, its version (it may change in place), and the sequences.
        self.latest: tuple[Tensor, int, Sequences] | None = None
        # It reads values. Not as a decorator: that loads torch's compiler, which doubles the time to import attention.
        self.sequences: Callable[[Tensor, int], Sequences] = torch.compiler.disable(self.find_sequences)

    def check(self, shape: AttentionShape) -> None:
        """Also let the kernels attend once, forward and backward, on two tokens."""
        super().check(shape)
        chosen = Option("attention", self.name)
        check_kernels(chosen, shape.head_dim, shape.dtype, shape.device, self.capabilities, OURS)
        attend_once(self, shape, chosen, OURS)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> AttentionOutput:
        (B, H, T, D), S, chosen = q.shape, k.shape[2], Option("attention", self.name)
        if not torch.compiler.is_compiling():  # the compiler cannot follow it; a model calls it when it is built
            check_kernels(chosen, D, q.dtype, q.device, self.capabilities, OURS)
        sequences = None
        if call.layout.document_starts is not None:
            if T != S:
                raise UnsupportedAttention(
                    f"{{}} takes document bounds for as many queries as keys, not for {T} and {S}; choose {{}}.",
                    chosen,
                    OURS,
                )
            sequences = self.sequences(call.layout.document_starts, T)
        # For rows that see nothing the libraries have different rules; here the result is zero.
        empty = max(0, T - S) if call.spec.score.causal else 0
        out, lse = self.kernels(q[:, :, empty:], k, v, call, sequences)
        if empty:
            sinks = call.tensors.get("sinks", lse.new_full((H,), -torch.inf))
            out = F.pad(out, (0, 0, empty, 0))
            lse = torch.cat([sinks.detach().to(lse)[:, None].expand(B, H, empty), lse], dim=2)
        return AttentionOutput(out, lse)

    @abstractmethod
    def kernels(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, sequences: Sequences | None
    ) -> tuple[Tensor, Tensor]:
        """out (B, H, T, D) and lse (B, H, T); each query sees a key."""

    def find_sequences(self, starts: Tensor, T: int) -> Sequences:
        """The documents of a batch, from document_starts (B, T or more). Waits for the device, once for all layers."""
        if self.latest is None or self.latest[0] is not starts or self.latest[1] != starts._version:
            B, device = len(starts), starts.device
            begins = starts[:, :T] == torch.arange(T, device=device)
            end = torch.tensor([B * T], device=device)
            bounds = torch.cat([begins.flatten().nonzero().flatten(), end]).to(torch.int32)
            self.latest = (starts, starts._version, Sequences(bounds, int(bounds.diff().max())))
        return self.latest[2]


class VarlenAttention(Peer):
    """Attention by torch's varlen_attn: FlashAttention-2, or its replacement by torch.nn.attention's switch."""

    name = "varlen"
    supports = frozenset({"full", "window", "documents"})
    capabilities = (8, 9, 10, 11, 12)

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        try:
            module: Any = importlib.import_module("torch.nn.attention.varlen")
        except ImportError:
            module = None
        if module is None or "enable_gqa" not in inspect.signature(module.varlen_attn).parameters:
            raise UnsupportedAttention(
                f"{{}} needs torch.nn.attention.varlen of torch 2.12 or newer, and this is torch {torch.__version__}; "
                "choose {}.",
                Option("attention", "varlen"),
                OURS,
            )
        self.varlen_attn, self.aux = module.varlen_attn, module.AuxRequest(lse=True)

    def kernels(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, sequences: Sequences | None
    ) -> tuple[Tensor, Tensor]:
        (B, H, T, _), S, score = q.shape, k.shape[2], call.spec.score
        if sequences is None:
            bounds_q, bounds_k = (torch.arange(B + 1, dtype=torch.int32, device=q.device) * n for n in (T, S))
        else:
            bounds_q, (T, S) = sequences.bounds, (sequences.longest, sequences.longest)
            bounds_k = bounds_q
        out, lse = self.varlen_attn(
            *(tokens(x) for x in (q, k, v)),
            bounds_q,
            bounds_k,
            T,
            S,
            return_aux=self.aux,
            scale=call.spec.scale,
            window_size=(-1 if score.window is None else score.window - 1, 0 if score.causal else -1),
            enable_gqa=k.shape[1] != H,
        )
        return heads(out, B), lse.unflatten(1, (B, -1)).transpose(0, 1)


class FA4Attention(Peer):
    """Attention by the package flash-attn-4, in CuTe, for Hopper and newer."""

    name = "fa4"
    supports = frozenset({"full", "window", "soft_cap", "sinks", "documents"})
    capabilities = (9, 10, 11)

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        module = flash_attn_4(Option("attention", "fa4"), OURS)
        # The compiler cannot follow the functions: each call is a graph break.
        self.dense: Callable[..., Any] = torch.compiler.disable(module.flash_attn_func)
        self.varlen: Callable[..., Any] = torch.compiler.disable(module.flash_attn_varlen_func)

    def kernels(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, sequences: Sequences | None
    ) -> tuple[Tensor, Tensor]:
        B, score = len(q), call.spec.score
        options = {
            "softmax_scale": call.spec.scale,
            "causal": score.causal,
            "window_size": (None if score.window is None else score.window - 1, 0 if score.causal else None),
            "learnable_sink": call.tensors.get("sinks"),
            "softcap": score.soft_cap or 0.0,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "return_lse": True,
        }
        if sequences is None:
            out, lse = self.dense(*(x.transpose(1, 2) for x in (q, k, v)), **options)
            return out.transpose(1, 2), lse
        out, lse = self.varlen(
            *(tokens(x) for x in (q, k, v)),
            cu_seqlens_q=sequences.bounds,
            cu_seqlens_k=sequences.bounds,
            max_seqlen_q=sequences.longest,
            max_seqlen_k=sequences.longest,
            **options,
        )
        return heads(out, B), lse.unflatten(1, (B, -1)).transpose(0, 1)


def tokens(x: Tensor) -> Tensor:
    """(B, H, T, D) to (B * T, H, D): a view if x has the memory layout of a model's tensors."""
    return x.transpose(1, 2).flatten(0, 1)


def heads(x: Tensor, B: int) -> Tensor:
    """(B * T, H, D) to (B, H, T, D)."""
    return x.unflatten(0, (B, -1)).transpose(1, 2)


def flash_attn_4(chosen: Option, instead: Option) -> Any:
    """The module of flash-attn 4. Raises UnsupportedAttention where it is not installed."""
    try:
        return importlib.import_module("flash_attn.cute")
    except ImportError as error:
        raise UnsupportedAttention(
            "{} needs the package flash-attn-4, which cannot be imported ({}); install it with `pip install --pre "
            "flash-attn-4`, or choose {}.",
            chosen,
            str(error).partition("\n")[0].rstrip(". "),
            instead,
        ) from None


def check_kernels(
    chosen: Option,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    capabilities: tuple[int, ...],
    instead: Option,
) -> None:
    """Raise UnsupportedAttention unless FlashAttention's kernels support this head size and dtype on this device."""
    if device.type != "cuda" or torch.version.hip:
        raise UnsupportedAttention(
            f"{{}} needs an NVIDIA GPU and the device is {device}; choose {{}}.", chosen, Option("attention", "tiled")
        )
    if dtype not in (torch.bfloat16, torch.float16):
        raise UnsupportedAttention(
            f"{{}} takes bf16 or fp16, not {dtype}; choose one of these, or {{}}.", chosen, instead
        )
    if head_dim > 256 or head_dim % 8:
        raise UnsupportedAttention(
            f"{{}} takes head sizes up to 256 that are multiples of 8, not {head_dim}; choose {{}}.", chosen, instead
        )
    major, minor = gpu.capability(device)
    if major not in capabilities:
        versions = ", ".join(f"{x}.x" for x in capabilities)
        raise UnsupportedAttention(
            f"{{}} needs a GPU of compute capability {versions} and {device} has {major}.{minor}; choose {{}}.",
            chosen,
            instead,
        )
