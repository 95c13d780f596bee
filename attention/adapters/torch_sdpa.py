"""The kernels of attention=flash under torch's calls: an implementation for torch.nn.attention's switch.

>>> import gpt_attention.torch_sdpa
>>> gpt_attention.torch_sdpa.register()
>>> torch.nn.attention.activate_flash_attention_impl("gpt_attention_flash")

From then on every call that torch gives to its FlashAttention on a GPU runs these kernels: scaled_dot_product_attention
with the backend FLASH_ATTENTION, the modules that call it, and varlen_attn, in training too. Calls that they do not
support are refused.

torch calls the functions of KERNELS in place of its kernels, whose arguments torch's native_functions.yaml describes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import Library
from torch.nn.attention import register_flash_attention_impl

from ..errors import UnsupportedAttention
from ..flash.launch import replayed
from ..flash.op import bounds, compute_backward, compute_forward, prepared, split_qkv_grad
from ..gpu import HAS_TRITON
from ..layout import packed
from ..score import Score
from ..spec import Inputs, Spec

if HAS_TRITON:
    from ..flash.tiles import rows_like

NAME = "gpt_attention_flash"
# The arguments of _flash_attention_forward that are read, or that change nothing; others have to be None.
FORWARD = {"out", "query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal"}
FORWARD |= {"return_debug_mask", "scale", "window_size_left", "window_size_right"}


class Active:
    """The kernels in torch's dispatcher, until `remove`."""

    def __init__(self, library: Library) -> None:
        self.library: Library | None = library

    def remove(self) -> None:
        """Restore torch's kernels."""
        self.library = None


@functools.cache
def register() -> None:
    """Make gpt_attention_flash known to torch.nn.attention.activate_flash_attention_impl, which makes it active."""
    register_flash_attention_impl(NAME, register_fn=activate)


def activate(key: str = "CUDA") -> Active:
    """Replace torch's kernels by KERNELS for the devices of a dispatch key."""
    if not HAS_TRITON:
        raise refused("needs Triton, which is not installed")
    library = Library("aten", "IMPL")
    for name, kernel in KERNELS.items():
        library.impl(name, functools.partial(run, name, kernel), key)
    return Active(library)


def run(operator: str, kernel: Callable[[SimpleNamespace], Any], *values: Any, **named: Any) -> Any:
    """A kernel's results for torch's arguments of an aten operator, which it takes by name.

    Refuses dropout, whose mask here is a function of a key and not of torch's random numbers.
    """
    parameters = defaults(operator)
    x = SimpleNamespace(**(parameters | dict(zip(parameters, values, strict=False)) | named))
    if rate := getattr(x, "dropout_p", 0.0):
        raise refused(f"drops weights by a key, which torch does not pass; set dropout_p to 0, not {rate:g}")
    return kernel(x)


def refused(why: str) -> UnsupportedAttention:
    """The refusal of a call."""
    return UnsupportedAttention(
        f"{NAME}, which is active as torch's FlashAttention, {why}. Choose another backend with "
        "torch.nn.attention.sdpa_kernel, or torch's own kernels with torch.nn.attention.restore_flash_attention_impl."
    )


def spec_of(scale: float | None, head_dim: int, score: Score, documents: bool = False) -> Spec:
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


def attend(q: Tensor, k: Tensor, v: Tensor, inputs: Inputs, spec: Spec) -> tuple[Tensor, Tensor]:
    """q (B, H, T, D) and k, v (B, H_kv, S, D) to out, with q's memory layout, and lse (B, H, T)."""
    aligned, k, v = prepared(q, k, v)
    out, lse, _ = replayed(compute_forward, (aligned, k, v, *inputs.present()), (spec, 0, 0))
    return out if out.shape == q.shape else torch.empty_like(q).copy_(out[..., : q.shape[-1]]), lse


def attend_backward(do: Tensor, saved: Sequence[Tensor], inputs: Inputs, spec: Spec) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v; saved are these, out and lse as `attend` has them."""
    q, k, v, out, lse = saved
    q, k, v, out, do = prepared(q, k, v, out, do)
    lse2 = rows_like(q)
    # The backward pass takes the base 2, and infinity where a row sees nothing.
    lse2[..., : lse.shape[-1]] = torch.where(lse == -torch.inf, torch.inf, lse / math.log(2))
    gradients = replayed(compute_backward, (do, q, k, v, out, lse2, *inputs.present()), (spec, 0, 0))
    dq, dk, dv = (x[..., : saved[0].shape[-1]] for x in split_qkv_grad(gradients, q, k))
    return dq, dk, dv


def no_randomness(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors that torch's kernels return for dropout: generator state, offset and debug mask, all empty."""
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return state, torch.zeros((), dtype=torch.uint64, device=q.device), q.new_empty(0)


@functools.cache
def defaults(operator: str) -> dict[str, Any]:
    """The arguments of an aten operator in the order of its schema, with their defaults; None where one has none."""
    return {x.name: x.default_value for x in getattr(torch.ops.aten, operator).default._schema.arguments}


def sdpa_forward(x: SimpleNamespace) -> tuple[Any, ...]:
    """query (B, H, T, D), key and value (B, H_kv, S, D)."""
    spec = spec_of(x.scale, x.query.shape[-1], Score(causal=x.is_causal))
    out, lse = attend(x.query, x.key, x.value, Inputs(), spec)
    return out, lse, None, None, x.query.shape[2], x.key.shape[2], *no_randomness(x.query)


def sdpa_backward(x: SimpleNamespace) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value."""
    spec = spec_of(x.scale, x.query.shape[-1], Score(causal=x.is_causal))
    return attend_backward(x.grad_out, (x.query, x.key, x.value, x.out, x.logsumexp), Inputs(), spec)


class PackedRows(NamedTuple):
    """How the kernels read a call of tensors (B, T, H, D), or with cum_seq_q (total, H, D), which become one row."""

    spec: Spec
    inputs: Inputs
    is_packed: bool

    @classmethod
    def of(cls, x: SimpleNamespace) -> PackedRows:
        """From the arguments of a call. Waits for the device where it is packed."""
        (q, k), inputs = (x.cum_seq_q, x.cum_seq_k), Inputs()
        score, is_packed = score_of(x.is_causal, x.window_size_left, x.window_size_right), q is not None
        spec = spec_of(x.scale, x.query.shape[-1], score, documents=is_packed)
        if is_packed:
            if k is None or (q is not k and not torch.equal(q, k)):
                raise refused("takes sequences with as many queries as keys: cu_seq_q and cu_seq_k must be equal")
            layout = packed(q, len(x.query))
            inputs = Inputs(starts=bounds(layout.document_starts), ends=bounds(layout.document_ends))
        return cls(spec, inputs, is_packed)

    def put(self, x: Tensor) -> Tensor:
        """A tensor of the call as (B, H, T, D)."""
        return x.transpose(0, 1).unsqueeze(0) if self.is_packed else x.transpose(1, 2)

    def take(self, x: Tensor) -> Tensor:
        """The other way round."""
        return x[0].transpose(0, 1) if self.is_packed else x.transpose(1, 2)


def flash_forward(x: SimpleNamespace) -> tuple[Tensor, ...]:
    """out as query, lse (B, H, T) or (H, total), and tensors for dropout."""
    for name, value in vars(x).items():
        if name not in FORWARD and value is not None and not (name == "num_splits" and value == 1):
            raise refused(f"does not support {name}")
    rows = PackedRows.of(x)
    out, lse = attend(rows.put(x.query), rows.put(x.key), rows.put(x.value), rows.inputs, rows.spec)
    return rows.take(out), lse[0] if rows.is_packed else lse, *no_randomness(x.query)


def flash_backward(x: SimpleNamespace) -> tuple[Tensor, ...]:
    """The gradients of query, key and value."""
    rows = PackedRows.of(x)
    do, *saved = (rows.put(tensor) for tensor in (x.grad_out, x.query, x.key, x.value, x.out))
    lse = x.logsumexp[None] if rows.is_packed else x.logsumexp
    return tuple(rows.take(gradient) for gradient in attend_backward(do, (*saved, lse), rows.inputs, rows.spec))


def flash_forward_into(x: SimpleNamespace) -> Tensor:
    """Fill out, and return the log-sum-exp."""
    computed, lse, *_ = flash_forward(x)
    x.out.copy_(computed)
    return lse


# By the names of aten's operators.
KERNELS: dict[str, Callable[[SimpleNamespace], Any]] = {
    "_scaled_dot_product_flash_attention": sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": sdpa_backward,
    "_flash_attention_forward": flash_forward,
    "_flash_attention_backward": flash_backward,
}
if hasattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace"):  # since torch 2.12
    KERNELS["_flash_attention_forward_no_dropout_inplace"] = flash_forward_into
