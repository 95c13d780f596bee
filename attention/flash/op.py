"""The kernels as torch custom operators, and the attention that calls them.

Custom operators are opaque to torch.compile and carry their own shapes and gradients, so a compiled model has no graph
break; the dropout key is a tensor among their arguments, so new steps and replayed CUDA graphs draw new masks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import gpu
from ..config import ProductPrecision
from ..decode.cache import Cache
from ..dropout import drop_threshold
from ..gpu import ALIGNMENT, HAS_TRITON, NAMESPACE
from ..interface import FEATURES, Attention, AttentionOutput, AttentionShape, Terms, UnsupportedAttention
from .configs import FP8_HAS_NO_GRADIENTS, Extras, Options, has_horizons

if HAS_TRITON:
    import triton

    from .decode import flash_decode, run_decode
    from .horizon import find_horizons
    from .paths import PATHS, Problem, choose_path, describe, describe_path
    from .tiles import addressable, rows_like

MAX_HEAD_DIM = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check(head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise UnsupportedAttention unless the kernels support this head size and dtype on this device."""
    if head_dim > MAX_HEAD_DIM:
        raise UnsupportedAttention(
            f"attention=flash takes head sizes up to {MAX_HEAD_DIM}, not {head_dim}; "
            "choose attention=tiled, or more heads."
        )
    if dtype not in DTYPES:
        raise UnsupportedAttention(
            f"attention=flash takes fp32, bf16 or fp16, not {dtype}; choose one of these, or attention=tiled."
        )
    if not HAS_TRITON:
        raise UnsupportedAttention("attention=flash needs Triton, which is not installed; choose attention=tiled.")
    if triton.knobs.runtime.interpret:
        return
    if device.type != "cuda" or torch.version.hip:
        raise UnsupportedAttention(
            f"attention=flash needs a CUDA GPU and the device is {device}; choose attention=tiled, or set "
            "TRITON_INTERPRET=1 to run the kernels, slowly, in Triton's interpreter."
        )
    if gpu.capability(device) < (8, 0):
        raise UnsupportedAttention(
            f"attention=flash needs a GPU of compute capability 8.0 (Ampere) or newer and {device} has "
            f"{'.'.join(map(str, gpu.capability(device)))}; choose attention=sdpa."
        )


def check_backward(head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise UnsupportedAttention where the tiles of fp32 do not fit the shared memory of a multiprocessor."""
    if dtype == torch.float32 and head_dim > 128 and gpu.capability(device)[0] not in (9, 10):
        raise UnsupportedAttention(
            f"attention=flash has gradients in fp32 at head sizes up to 128 on {device}, not {head_dim}; choose bf16 "
            "or fp16, or attention=tiled. Larger ones need a GPU of compute capability 9.x or 10.x."
        )


def run_horizons(q: Tensor, k: Tensor, slopes: Tensor, scale: float, soft_cap: float | None) -> Tensor:
    """The horizons of a call, as `Extras` has them."""
    check(q.shape[-1], q.dtype, q.device)
    if q.numel() == 0 or k.numel() == 0:
        return q.new_zeros(q.shape[:2], dtype=torch.int32)
    with torch.cuda.device_of(q):
        return find_horizons(addressable(q), addressable(k), slopes, scale, soft_cap)


flash_horizons = torch.library.custom_op(f"{NAMESPACE}::flash_horizons", run_horizons, mutates_args=())


@flash_horizons.register_fake
def _(q, *_):
    return q.new_empty(q.shape[:2], dtype=torch.int32)


def run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key: Tensor | None,
    slopes: Tensor | None,
    sinks: Tensor | None,
    starts: Tensor | None,
    ends: Tensor | None,
    horizons: Tensor | None,
    causal: bool,
    scale: float,
    threshold: int,
    tf32: bool,
    window: int | None,
    soft_cap: float | None,
    q_start: int | None,
    k_start: int | None,
    path: str,
    precision: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and lse2 as `forward` gives them; see Extras for the tensors and Options for the rest."""
    check(q.shape[-1], q.dtype, q.device)
    out = torch.empty_like(q)
    extras = Extras(key, slopes, sinks, starts, ends, horizons)
    options = Options(causal, scale, threshold, tf32, window, soft_cap, q_start, k_start, path, precision)
    with torch.cuda.device_of(q):
        q, k, v = addressable(q), addressable(k), addressable(v)
        chosen = choose_path(path, describe(q, k, extras, options), backward=False)
        lse, lse2 = PATHS[chosen].forward(q, k, v, out, extras, options)
    return out, lse, lse2


flash_forward = torch.library.custom_op(f"{NAMESPACE}::flash_forward", run_forward, mutates_args=())


@flash_forward.register_fake
def _(q, k, v, *_):
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32), rows_like(q)


def run_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse2: Tensor,
    key: Tensor | None,
    slopes: Tensor | None,
    sinks: Tensor | None,
    starts: Tensor | None,
    ends: Tensor | None,
    horizons: Tensor | None,
    causal: bool,
    scale: float,
    threshold: int,
    tf32: bool,
    window: int | None,
    soft_cap: float | None,
    q_start: int | None,
    k_start: int | None,
    path: str,
    precision: str,
) -> list[Tensor]:
    """The gradients of q, k and v, as `empty_gradients` lays them out, and where there are sinks theirs."""
    gradients = empty_gradients(q, k, v)
    dq_dk_dv = split_qkv_grad(gradients, q, k)
    extras = Extras(key, slopes, sinks, starts, ends, horizons)
    options = Options(causal, scale, threshold, tf32, window, soft_cap, q_start, k_start, path, precision)
    with torch.cuda.device_of(q):
        q, k, v = addressable(q), addressable(k), addressable(v)
        chosen = choose_path(path, describe(q, k, extras, options), backward=True)
        dsinks = PATHS[chosen].backward(do, q, k, v, out, lse2, dq_dk_dv, extras, options)
    return gradients if dsinks is None else [*gradients, dsinks]


flash_backward = torch.library.custom_op(f"{NAMESPACE}::flash_backward", run_backward, mutates_args=())


@flash_backward.register_fake
def _(do, q, k, v, out, lse2, key, slopes, sinks, *_):
    return [*empty_gradients(q, k, v), *([] if sinks is None else [torch.empty_like(sinks)])]


def empty_gradients(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Room for dq, dk and dv: one tensor where q, k, v lie in memory as views of one projection (B, T, H + 2 H_kv, D).

    That tensor is the projection's gradient, so a compiled model copies nothing to assemble it.
    """
    B, H, T, D = q.shape
    row = (H + 2 * k.shape[1]) * D
    if k.shape[2] == T and q.stride() == k.stride() == v.stride() == (T * row, D, row, 1):
        return [q.new_empty(B, T, H + 2 * k.shape[1], D)]
    return [torch.empty_like(x) for x in (q, k, v)]


def split_qkv_grad(gradients: list[Tensor], q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dq (B, H, T, D), dk and dv (B, H_kv, S, D): what `empty_gradients` made or views of it."""
    if len(gradients) == 1:
        gradients = [x.transpose(1, 2) for x in gradients[0].split([q.shape[1], k.shape[1], k.shape[1]], dim=2)]
    dq, dk, dv = gradients
    return dq, dk, dv


def _setup_context(ctx, inputs, output):
    q, k, v, *extras = inputs[: 3 + len(Extras._fields)]
    ctx.options = inputs[3 + len(Extras._fields) :]
    out, lse, lse2 = output
    ctx.save_for_backward(q, k, v, out, lse2, *extras)
    ctx.mark_non_differentiable(lse, lse2)
    ctx.set_materialize_grads(False)


def _backward(ctx, do, *_, run: Callable[..., list[Tensor]] = flash_backward):
    gradients: dict[str, Tensor] = {}
    if do is not None:
        q, k, v, out, lse2, *extras = ctx.saved_tensors
        found = run(do, q, k, v, out, lse2, *extras, *ctx.options)
        if Extras(*extras).sinks is not None:
            gradients["sinks"] = found.pop()
        gradients |= zip("qkv", split_qkv_grad(found, q, k), strict=True)
    return tuple(gradients.get(name) for name in ("q", "k", "v", *Extras._fields, *Options._fields))


flash_forward.register_autograd(_backward, setup_context=_setup_context)


class Eager(torch.autograd.Function):
    """The operators without torch's dispatcher, which takes longer for so many arguments than short kernels run."""

    @staticmethod
    def forward(ctx, *inputs):
        output = run_forward(*inputs)
        _setup_context(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx, do, *_):
        return _backward(ctx, do, run=run_backward)


class FlashAttention(Attention):
    """FlashAttention-2 in Triton, with dropout that replays (attention/flash/)."""

    name = "flash"
    options = frozenset({"allow_tf32", "path", "precision"})
    supports = FEATURES

    def check(self, shape: AttentionShape) -> None:
        super().check(shape)
        if shape.training:
            self.check_gradients()
        check(shape.head_dim, shape.dtype, shape.device)
        if shape.training:
            check_backward(shape.head_dim, shape.dtype, shape.device)
        self.path(shape, 0)

    def check_gradients(self) -> None:
        """Raise UnsupportedAttention where the precision has no backward."""
        if self.config.precision is ProductPrecision.fp8:
            raise UnsupportedAttention(FP8_HAS_NO_GRADIENTS)

    def path(self, shape: AttentionShape, T: int) -> str:
        paths = [describe_path(self.config.path.value, problem) for problem in self.problems(shape, T)]
        return " and ".join(sorted(set(paths)))

    def problems(self, shape: AttentionShape, T: int) -> list[Problem]:
        """The kernels' problem in each of the model's layers."""
        documents = {"documents"} if shape.documents else set()
        capability, precision = gpu.capability(shape.device), self.config.precision.value
        dropout = self.dropout > 0 and precision == "inputs"  # fp8 only evaluates
        return [
            Problem(
                shape.head_dim,
                shape.dtype,
                frozenset(documents | set(score.features())),
                dropout,
                T,
                capability,
                precision,
            )
            for score in shape.scores
        ]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> AttentionOutput:
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
            self.check_gradients()
            if not torch.compiler.is_compiling():  # the compiler cannot follow it; a model calls it when it is built
                check_backward(q.shape[-1], q.dtype, q.device)
        D, scale, score, layout = q.shape[-1], terms.scale, terms.score, terms.layout
        key, threshold = None, 0
        if terms.dropout_key is not None:
            key, threshold = terms.dropout_key.pack(q.device), drop_threshold(self.dropout)
        # The kernels take the maximum before they scale, which only a positive scale allows.
        if scale < 0:
            q, scale = -q, -scale
        elif scale == 0:
            q, scale = q * 0, 1.0
        offsets = layout.q_start is not None or layout.k_start != 0
        options = Options(
            causal=score.causal,
            scale=scale,
            threshold=threshold,
            tf32=self.config.allow_tf32,
            window=score.window,
            soft_cap=score.soft_cap,
            q_start=layout.query_start(q.shape[2], k.shape[2]) if offsets else None,
            k_start=layout.k_start if offsets else None,
            path=self.config.path.value,
            precision=self.config.precision.value,
        )
        extras = Extras(
            key=key,
            slopes=fp32(terms.slopes),
            sinks=fp32(terms.sinks),
            starts=bounds(layout.document_starts),
            ends=bounds(layout.document_ends),
        )
        q, k, v = prepared(q), prepared(k), prepared(v)
        compiling = torch.compiler.is_compiling()
        if has_horizons(q.shape[2], k.shape[2], options, extras):
            find = flash_horizons if compiling else run_horizons
            horizons = find(q.detach(), k.detach(), extras.slopes, scale, options.soft_cap)
            extras = extras._replace(horizons=horizons)
        run = flash_forward if compiling else Eager.apply
        out, lse, _ = run(q, k, v, *extras, *options)
        return AttentionOutput(out[..., :D], lse)

    def attend_cache(self, q: Tensor, cache: Cache, terms: Terms) -> AttentionOutput:
        if self.config.precision is ProductPrecision.fp8:
            raise UnsupportedAttention(
                "attention.precision=fp8 does not decode from a cache; choose attention.precision=inputs."
            )
        # The compiler cannot follow `check`; a model calls it when it is built.
        compiling = torch.compiler.is_compiling()
        if not compiling:
            check(q.shape[-1], q.dtype, q.device)
        out, lse = (flash_decode if compiling else run_decode)(
            q if q.stride(-1) == 1 else q.contiguous(),
            *cache,
            fp32(terms.slopes),
            fp32(terms.sinks),
            terms.score.causal,
            terms.scale,
            self.config.allow_tf32,
            terms.score.window,
            terms.score.soft_cap,
        )
        return AttentionOutput(out, lse)


def fp32(x: Tensor | None) -> Tensor | None:
    """x (H,) as the kernels read it."""
    return None if x is None else x.float().contiguous()


def bounds(x: Tensor | None) -> Tensor | None:
    """Bounds of documents (B, L) as the kernels read them."""
    return None if x is None else x.to(torch.int32).contiguous()


def prepared(x: Tensor) -> Tensor:
    """x with a contiguous last dimension that spans a multiple of 16 bytes, copied only if it has none."""
    excess = -x.shape[-1] % (ALIGNMENT // x.element_size())
    if excess:
        return F.pad(x, (0, excess))
    expanded = any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.contiguous() if expanded or x.stride(-1) != 1 else x
