"""Attention by torch's varlen_attn. It takes bf16 and fp16 on a GPU, keeps memory linear in the sequence and has no
dropout. Documents are passed as successive sequences of variable length, so keys of other documents are not visited.
"""

import importlib
import inspect
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import Option, UnsupportedAttention, no_dropout
from ..interface import Attention, AttentionOutput, AttentionShape, Call
from ..options import AttentionConfig
from ..tensors import version
from .trial import attend_once

CHOSEN, OURS = Option("attention", "varlen"), Option("attention", "flash")


class Sequences(NamedTuple):
    """Documents as sequences that lie one after the other.

    bounds   (n + 1,) int32: where each begins in the batch's B * T tokens and, last, B * T
    longest  the tokens of the longest
    """

    bounds: Tensor
    longest: int


class VarlenAttention(Attention):
    """Attention by torch's varlen_attn: FlashAttention-2, or its replacement by torch.nn.attention's switch."""

    name = "varlen"
    supports = frozenset({"full", "window", "documents"})
    exact = True

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        if config.dropout > 0:
            raise no_dropout(self.name, config.dropout)
        module = importlib.import_module("torch.nn.attention.varlen")
        if "enable_gqa" not in inspect.signature(module.varlen_attn).parameters:
            raise UnsupportedAttention(
                f"{{}} needs torch.nn.attention.varlen of torch 2.12 or newer, and this is torch {torch.__version__}; "
                "choose {}.",
                CHOSEN,
                OURS,
            )
        self.varlen_attn, self.aux = module.varlen_attn, module.AuxRequest(lse=True)
        find = lru_cache(maxsize=1)(sequences)  # the layers of a step share it
        # It reads values. Not as a decorator: that loads torch's compiler, which doubles the time to import attention.
        self.sequences = torch.compiler.disable(lambda starts, T: find(starts, T, version(starts)))

    def check(self, shape: AttentionShape) -> None:
        """Also let the kernels attend once, forward and backward, on two tokens."""
        super().check(shape)
        check_kernels(shape.dtype, shape.device)
        attend_once(self, shape, CHOSEN, OURS)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> AttentionOutput:
        (B, H, T, _), S, score = q.shape, k.shape[2], call.spec.score
        if not torch.compiler.is_compiling():  # the compiler cannot follow it; a model calls it when it is built
            check_kernels(q.dtype, q.device)
        # For rows that see nothing torch has another rule; here the result is zero.
        empty = max(0, T - S) if score.causal else 0
        if call.layout.document_starts is not None:
            if T != S:
                raise UnsupportedAttention(
                    f"{{}} takes document bounds for as many queries as keys, not for {T} and {S}; choose {{}}.",
                    CHOSEN,
                    OURS,
                )
            bounds_q, longest_q = bounds_k, longest_k = self.sequences(call.layout.document_starts, T)
        else:
            longest_q, longest_k = T - empty, S
            counts = torch.arange(B + 1, dtype=torch.int32, device=q.device)
            bounds_q, bounds_k = counts * longest_q, counts * longest_k
        out, lse = self.varlen_attn(
            # A view of a model's tensors, whose tokens lie one after the other.
            *(x.transpose(1, 2).flatten(0, 1) for x in (q[:, :, empty:], k, v)),
            bounds_q,
            bounds_k,
            longest_q,
            longest_k,
            return_aux=self.aux,
            scale=call.spec.scale,
            window_size=(-1 if score.window is None else score.window - 1, 0 if score.causal else -1),
            enable_gqa=k.shape[1] != H,
        )
        out = out.unflatten(0, (B, -1)).transpose(1, 2)
        lse = lse.unflatten(1, (B, -1)).transpose(0, 1)
        if empty:
            out, lse = F.pad(out, (0, 0, empty, 0)), F.pad(lse, (empty, 0), value=-torch.inf)
        return AttentionOutput(out, lse)


def sequences(starts: Tensor, T: int, version: object) -> Sequences:
    """The documents of a batch, from some version of document_starts (B, T or more). Waits for the device."""
    begins = starts[:, :T] == torch.arange(T, device=starts.device)
    bounds = F.pad(begins.flatten().nonzero()[:, 0].int(), (0, 1), value=begins.numel())
    return Sequences(bounds, int(bounds.diff().max()))


def check_kernels(dtype: torch.dtype, device: torch.device) -> None:
    """Raise UnsupportedAttention unless FlashAttention has kernels for this dtype on this device."""
    if device.type != "cuda" or torch.version.hip:
        raise UnsupportedAttention(
            f"{{}} needs an NVIDIA GPU and the device is {device}; choose {{}}.", CHOSEN, Option("attention", "tiled")
        )
    if dtype not in (torch.bfloat16, torch.float16):
        raise UnsupportedAttention(f"{{}} takes bf16 or fp16, not {dtype}; choose one of these, or {{}}.", CHOSEN, OURS)
