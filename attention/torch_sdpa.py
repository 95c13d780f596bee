"""The kernels of attention=flash under torch's own calls: an implementation for torch.nn.attention's switch.

>>> import gpt_attention.torch_sdpa
>>> gpt_attention.torch_sdpa.register()
>>> torch.nn.attention.activate_flash_attention_impl("gpt_attention_flash")

From then on every call that torch gives to its FlashAttention on a GPU runs these kernels: scaled_dot_product_attention
with the backend FLASH_ATTENTION, the modules that call it, and varlen_attn, in training too. What they lack is refused.

torch calls the functions of KERNELS in the place of its own, whose arguments they take: torch's native_functions.yaml.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import Library
from torch.nn.attention import register_flash_attention_impl

from .errors import UnsupportedAttention
from .flash.op import bounds, prepared, run_backward, run_forward, split_qkv_grad
from .gpu import HAS_TRITON
from .score import Score, packed
from .spec import Inputs, Spec

if HAS_TRITON:
    from .flash.tiles import rows_like

NAME = "gpt_attention_flash"


class Active:
    """The kernels in torch's dispatcher, until `remove`."""

    def __init__(self, library: Library) -> None:
        self.library: Library | None = library

    def remove(self) -> None:
        """Give torch's own kernels back."""
        self.library = None


@functools.cache
def register() -> None:
    """Make gpt_attention_flash known to torch.nn.attention.activate_flash_attention_impl, which makes it active."""
    register_flash_attention_impl(NAME, register_fn=activate)


def activate(key: str = "CUDA") -> Active:
    """Put KERNELS in the place of torch's for the devices of a dispatch key."""
    if not HAS_TRITON:
        raise refused("needs Triton, which is not installed")
    library = Library("aten", "IMPL")
    for name, kernel in KERNELS.items():
        library.impl(name, kernel, key)
    return Active(library)


def refused(why: str) -> UnsupportedAttention:
    """The refusal of a call."""
    return UnsupportedAttention(
        f"{NAME}, which is active as torch's FlashAttention, {why}. Choose another backend with "
        "torch.nn.attention.sdpa_kernel, or torch's own kernels with torch.nn.attention.restore_flash_attention_impl."
    )


def spec_of(scale: float | None, head_dim: int, score: Score, documents: bool) -> Spec:
    """A call without dropout."""
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    if scale <= 0:
        raise refused(f"takes positive scales, not {scale}")
    return Spec(score, scale=scale, documents=documents)


def score_of(is_causal: bool, left: int | None, right: int | None) -> Score:
    """The score of a causal flag, and of the keys that a query sees before and after its own: None or -1 for all."""
    left, right = (None if x is None or x < 0 else int(x) for x in (left, right))
    causal = is_causal or right == 0
    if not causal and (left is not None or right is not None):
        raise refused(f"takes windows that end at the query, not window_size=({left}, {right})")
    return Score(causal=causal, window=None if left is None else left + 1)


def check_dropout(rate: float) -> None:
    """Refuse dropout, whose mask here is a function of a key and not of torch's random numbers."""
    if rate:
        raise refused(f"drops weights by a key, which torch does not pass; set dropout_p to 0, not {rate:g}")


def one_row(x: Tensor) -> Tensor:
    """(total, H, D) to (1, H, total, D)."""
    return x.transpose(0, 1).unsqueeze(0)


def packed_inputs(starts_q: Tensor, starts_k: Tensor | None, total: int) -> Inputs:
    """The documents of one row of `total` tokens, from cu_seqlens. Waits for the device."""
    if starts_k is None or (starts_q is not starts_k and not torch.equal(starts_q, starts_k)):
        raise refused("takes sequences with as many queries as keys: cu_seq_q and cu_seq_k must be equal")
    layout = packed(starts_q, total)
    return Inputs(starts=bounds(layout.document_starts), ends=bounds(layout.document_ends))


def attend(q: Tensor, k: Tensor, v: Tensor, inputs: Inputs, spec: Spec) -> tuple[Tensor, Tensor]:
    """q (B, H, T, D) and k, v (B, H_kv, S, D) to out, which lies in memory as q does, and lse (B, H, T)."""
    out, lse, _ = run_forward(prepared(q), prepared(k), prepared(v), inputs.present(), spec.text(), 0, 0)
    return out if out.shape == q.shape else torch.empty_like(q).copy_(out[..., : q.shape[-1]]), lse


def attend_backward(do: Tensor, saved: Sequence[Tensor], inputs: Inputs, spec: Spec) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v; saved are these, out and lse as `attend` has them."""
    q, k, v, out, lse = saved
    q, k, v, out, do = (prepared(x) for x in (q, k, v, out, do))
    lse2 = rows_like(q)
    # The backward pass takes the base 2, and infinity where a row sees nothing.
    lse2[..., : lse.shape[-1]] = torch.where(lse == -torch.inf, torch.inf, lse / math.log(2))
    gradients = run_backward(do, [q, k, v, out, lse2, *inputs.present()], spec.text(), 0, 0)
    dq, dk, dv = (x[..., : saved[0].shape[-1]] for x in split_qkv_grad(gradients, q, k))
    return dq, dk, dv


def no_randomness(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors that torch's kernels return for dropout: generator state, offset and debug mask, all empty."""
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return state, torch.zeros((), dtype=torch.uint64, device=q.device), q.new_empty(0)


def sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """aten::_scaled_dot_product_flash_attention: query (B, H, T, D), key and value (B, H_kv, S, D)."""
    check_dropout(dropout_p)
    spec = spec_of(scale, query.shape[-1], Score(causal=is_causal), documents=False)
    out, lse = attend(query, key, value, Inputs(), spec)
    return out, lse, None, None, query.shape[2], key.shape[2], *no_randomness(query)


def sdpa_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """aten::_scaled_dot_product_flash_attention_backward."""
    spec = spec_of(scale, query.shape[-1], Score(causal=is_causal), documents=False)
    return attend_backward(grad_out, (query, key, value, out, logsumexp), Inputs(), spec)


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **others: Any,
) -> tuple[Tensor, ...]:
    """aten::_flash_attention_forward: query (B, T, H, D), or with cum_seq_q (total, H, D).

    others  seqused_k, alibi_slopes, block_table, num_splits: refused, except that num_splits may be 1
    """
    check_dropout(dropout_p)
    for name, given in others.items():
        if given is not None and not (name == "num_splits" and given == 1):
            raise refused(f"does not support {name}")
    score = score_of(is_causal, window_size_left, window_size_right)
    spec = spec_of(scale, query.shape[-1], score, documents=cum_seq_q is not None)
    if cum_seq_q is None:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out, lse = attend(q, k, v, Inputs(), spec)
        out = out.transpose(1, 2)
    else:
        inputs = packed_inputs(cum_seq_q, cum_seq_k, query.shape[0])
        q, k, v = (one_row(x) for x in (query, key, value))
        out, lse = attend(q, k, v, inputs, spec)
        out, lse = out[0].transpose(0, 1), lse[0]
    return out, lse, *no_randomness(query)


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    """aten::_flash_attention_backward."""
    score = score_of(is_causal, window_size_left, window_size_right)
    spec = spec_of(scale, query.shape[-1], score, documents=cum_seq_q is not None)
    tensors = (grad_out, query, key, value, out)
    if cum_seq_q is None:
        do, *saved = (x.transpose(1, 2) for x in tensors)
        gradients = attend_backward(do, (*saved, logsumexp), Inputs(), spec)
        return tuple(x.transpose(1, 2) for x in gradients)
    inputs = packed_inputs(cum_seq_q, cum_seq_k, query.shape[0])
    do, *saved = (one_row(x) for x in tensors)
    gradients = attend_backward(do, (*saved, logsumexp[None]), inputs, spec)
    return tuple(x[0].transpose(0, 1) for x in gradients)


def flash_forward_into(out: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """aten::_flash_attention_forward_no_dropout_inplace: fills out, and returns the log-sum-exp."""
    computed, lse, *_ = flash_forward(*arguments, **options)
    out.copy_(computed)
    return lse


KERNELS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": sdpa_backward,
    "_flash_attention_forward": flash_forward,
    "_flash_attention_backward": flash_backward,
}
if hasattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace"):  # since torch 2.12
    KERNELS["_flash_attention_forward_no_dropout_inplace"] = flash_forward_into
