"""FlashAttention in plain PyTorch, tile by tile: the algorithm to read together with naive.py and the Triton kernels.

    forward    Dao 2023, "FlashAttention-2", algorithm 1: the online softmax
    backward   the same paper, algorithm 2: scores recomputed from q, k and the log-sum-exp

The score matrix is cut into tiles of block_q x block_k, and only one tile exists at a time. So memory is linear in the
sequence: the backward keeps q, k, v, out and lse. Tiles in which no query sees a key (above the causal diagonal,
outside the window and, on a CPU, of other documents) are never visited. The dropout mask is drawn tile by tile, and
again in the backward.

Names are the paper's; the prefix b_ marks a tile. Tiles of q have the shape (B, H_kv, G, block_q, D) and tiles of
k and v (B, H_kv, 1, block_k, D), where G = H // H_kv query heads share a key/value head.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .decode.cache import Cache
from .dropout import keep_mask, keep_scale
from .errors import Option, UnsupportedAttention
from .gpu import custom_operator
from .interface import FEATURES, Attention, AttentionOutput, Call
from .options import Ablation, AttentionConfig
from .precision import accum_dtype
from .score import Range
from .scores.sinks import sinks_gradient, start_with_sinks
from .spec import Inputs, Spec
from .tile_scores import TileScores, tiles


class TiledAttention(Attention):
    """Attention without the score matrix, in tiles of `attention.block_q` x `attention.block_k`."""

    name = "tiled"
    options = frozenset({"block_q", "block_k", "ablate"})
    supports = FEATURES
    exact = True

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        for option in ("block_q", "block_k"):
            if getattr(config, option) < 1:
                size = Option(f"attention.{option}", getattr(config, option))
                raise UnsupportedAttention("{} must be at least 1.", size)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> AttentionOutput:
        layout = call.layout
        inputs = Inputs(
            call.dropout_key,
            sinks=call.tensors.get("sinks"),
            starts=layout.document_starts,
            ends=layout.document_ends,
            formula=call.formula,
        ).present()
        return AttentionOutput(*Tiled.apply(call.spec, (layout.q_start, layout.k_start), q, k, v, *inputs))

    def attend_cache(self, q: Tensor, cache: Cache, call: Call) -> AttentionOutput:
        inputs = Inputs(sinks=call.tensors.get("sinks"), formula=call.formula).present()
        k, v = cache.read(0, cache.longest())
        out, lse = forward_op(q, k, v, inputs, call.spec.text(), None, 0, cache.lengths)
        return AttentionOutput(out.to(q.dtype), lse)


class Tiled(torch.autograd.Function):
    """Keeps its inputs, out and lse from forward to backward, and nothing of the size of the scores.

    Where tensors of the scores learn, out has rounded no weight and is kept in fp32: see `Spec.learns`.
    """

    @staticmethod
    def forward(ctx: Any, spec: Spec, positions: tuple[int | None, int], *tensors: Tensor) -> tuple[Tensor, Tensor]:
        # torch.compile leaves out `ctx` where no gradient is needed and it counts as many parameters, ctx included, as
        # arguments without ctx. There are always more of these here.
        q, k, v, *inputs = tensors
        # One operation for torch.compile: unrolled, the loops would be a graph of thousands.
        if torch.compiler.is_compiling():
            out, lse = forward_op(q, k, v, inputs, spec.text(), *positions)
        else:
            out, lse = forward(q, k, v, Inputs.of(spec, inputs), spec, *positions)
        ctx.save_for_backward(q, k, v, out, lse, *inputs)
        ctx.mark_non_differentiable(lse)
        ctx.spec, ctx.positions = spec, positions
        # Compiled, torch 2.11 loses the gradient of a saved tensor that `to` gives back as it is.
        return out if out.dtype == q.dtype else out.to(q.dtype), lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, _: None) -> tuple[Tensor | None, ...]:
        spec, positions, saved = ctx.spec, ctx.positions, ctx.saved_tensors
        with torch.autocast(do.device.type, enabled=False):
            if torch.compiler.is_compiling():
                gradients = backward_op(do, saved, spec.text(), *positions)
            else:
                gradients = backward(do, saved, spec, *positions)
        dq, dk, dv, *rest = gradients
        learned = dict(zip(spec.learned, rest, strict=False))  # and after them that of the sinks
        formula = [learned.get(k) for k in range(spec.computed)]
        return None, None, dq, dk, dv, *formula, *(rest[-1] if name == "sinks" else None for name in spec.inputs())


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inputs: Inputs,
    spec: Spec,
    q_start: int | None,
    k_start: int,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Algorithm 1: q (B, H, T, D) and k, v (B, H_kv, S, D) to out (B, H, T, D), in `dtype_of_out`, and lse (B, H, T).

    q_start, k_start, lengths  as in Layout
    """
    T, S, H_kv = q.shape[2], k.shape[2], k.shape[1]
    key, sinks, dropout = inputs.key, inputs.sinks, spec.threshold / 256
    scores = TileScores(q, k, inputs, spec, q_start, k_start, lengths)
    q, k, v = grouped(q, H_kv), k.unsqueeze(2), v.unsqueeze(2)
    dtype = accum_dtype(q.dtype)
    out = q.new_empty(q.shape, dtype=dtype_of_out(q, spec))
    lse = q.new_empty(q.shape[:-1], dtype=dtype)

    for rows in tiles(0, T, spec.block_q):
        b_q = cut(q, rows)
        # m, l, o: the running maximum, sum of exp(s - m) and sum of exp(s - m) v. The maximum starts at the lowest
        # finite number, not at -inf, so that rows that see nothing compute exp(-inf - m) = 0 and never a NaN.
        m = b_q.new_full((*b_q.shape[:-1], 1), torch.finfo(dtype).min, dtype=dtype)
        l = torch.zeros_like(m)
        start_with_sinks(m, l, sinks)
        o = b_q.new_zeros(b_q.shape, dtype=dtype)

        for columns in scores.key_tiles(rows):
            b_k, b_v = cut(k, columns), cut(v, columns)
            b_s = scores.change(spec.scale * dot(b_q, b_k.mT), rows, columns)
            m_new = torch.maximum(m, b_s.amax(dim=-1, keepdim=True))
            if spec.ablate == Ablation.no_max_subtraction.value:
                m_new = torch.zeros_like(m)
            alpha = torch.exp(m - m_new)  # rescales l and o from the old maximum to the new one
            if spec.ablate == Ablation.no_rescaling.value:
                alpha = torch.ones_like(m)
            b_p = torch.exp(b_s - m_new)
            l = alpha * l + b_p.sum(dim=-1, keepdim=True)
            if key is not None:  # after the row sum: dropout acts on the probabilities, not on their normalisation
                b_p = torch.where(keep_tile(key, dropout, q, S, rows, columns), b_p * keep_scale(dropout), 0.0)
            o = alpha * o + dot(b_p if spec.learns else b_p.to(v.dtype), b_v)
            m = m_new

        b_out, fully_masked = o / l, scores.fully_masked(rows)
        if fully_masked is not None:  # rows that see nothing are zero; l = 0 is no test, as scores of -inf give it too
            b_out.masked_fill_(fully_masked, 0.0)
        cut(out, rows).copy_(b_out)
        lse[..., slice(*rows)] = (m + torch.log(l)).squeeze(-1)
    return out.flatten(1, 2), lse.flatten(1, 2)


def backward(do: Tensor, saved: Sequence[Tensor], spec: Spec, q_start: int | None, k_start: int) -> list[Tensor]:
    """Algorithm 2: from the gradient of out the gradients of q, k, v, the formula's learned inputs and the sinks.

    saved  q, k, v, out, lse and the inputs that are present, with the shapes of `forward`
    """
    q, k, v, out, lse, *rest = saved
    inputs = Inputs.of(spec, rest)
    key, sinks, dropout = inputs.key, inputs.sinks, spec.threshold / 256
    S, H_kv = k.shape[2], k.shape[1]
    scores = TileScores(q, k, inputs, spec, q_start, k_start)
    q, do, out, lse = (grouped(x, H_kv) for x in (q, do, out, lse))
    k, v = k.unsqueeze(2), v.unsqueeze(2)
    dtype = accum_dtype(q.dtype)
    dq = q.new_zeros(q.shape, dtype=dtype)
    dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)

    # delta = rowsum(dP * P) = rowsum(do * out): what the softmax's Jacobian subtracts. Dropout leaves it valid. Its
    # error has one sign for a whole row, and tensors of the scores would learn from the sum of these errors.
    of_sum = torch.float64 if spec.learns else dtype
    delta = (do.to(dtype) * out.to(dtype)).sum(dim=-1, keepdim=True, dtype=of_sum).to(dtype)  # (B, H_kv, G, T, 1)
    # Where a row sees nothing every score is -inf, and exp(-inf - lse) is the zero it should be for a finite lse.
    lse = lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)  # (B, H_kv, G, T, 1)
    dsinks = [] if sinks is None else [sinks_gradient(sinks, lse, delta)]
    if scores.formula is not None:
        scores.formula.start_sums(spec.learned)

    for columns in tiles(0, S, spec.block_k):
        b_k, b_v = cut(k, columns), cut(v, columns)
        b_dk, b_dv = b_k.new_zeros(b_k.shape, dtype=dtype), b_v.new_zeros(b_v.shape, dtype=dtype)

        for rows in scores.query_tiles(columns):
            b_q, b_do = cut(q, rows), cut(do, rows)
            b_s, gradients = scores.change_with_gradients(spec.scale * dot(b_q, b_k.mT), rows, columns)
            b_p = torch.exp(b_s - cut(lse, rows))
            b_dp = dot(b_do, b_v.mT)
            b_p_kept = b_p  # the probabilities that met v
            if key is not None:
                b_keep = keep_tile(key, dropout, q, S, rows, columns)
                b_p_kept = torch.where(b_keep, b_p * keep_scale(dropout), 0.0)
                b_dp = torch.where(b_keep, b_dp * keep_scale(dropout), 0.0)
            b_ds = gradients.back(b_p * (b_dp - cut(delta, rows))).to(q.dtype)
            b_dv += dot(b_p_kept.to(v.dtype).mT, b_do).sum(dim=2, keepdim=True)  # over the group that shares v
            b_dk += dot(b_ds.mT, b_q).sum(dim=2, keepdim=True)
            cut(dq, rows).add_(dot(b_ds, b_k))

        cut(dk, columns).copy_(b_dk * spec.scale)
        cut(dv, columns).copy_(b_dv)
    learned = [] if scores.formula is None else scores.formula.gradients()
    return [(dq * spec.scale).to(q.dtype).flatten(1, 2), dk.squeeze(2), dv.squeeze(2), *learned, *dsinks]


def dtype_of_out(q: Tensor, spec: Spec) -> torch.dtype:
    """The dtype of out for the backward."""
    return accum_dtype(q.dtype) if spec.learns else q.dtype


def keep_tile(key: Tensor, dropout: float, q: Tensor, S: int, rows: Range, columns: Range) -> Tensor:
    """The weights of one tile that dropout keeps, (B, H_kv, G, block_q, block_k), for q (B, H_kv, G, T, D)."""
    B, H_kv, G, T, _ = q.shape
    keep = keep_mask(key, dropout, B, H_kv * G, T, S, rows=rows, columns=columns, device=q.device)
    return grouped(keep, H_kv)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Matrix product like a tensor core's: operands in their precision, sums in fp32."""
    return a.to(accum_dtype(a.dtype)) @ b.to(accum_dtype(b.dtype))


def grouped(x: Tensor, H_kv: int) -> Tensor:
    """(B, H, ...) to (B, H_kv, G, ...): the query heads that share a key/value head side by side."""
    return x.unflatten(1, (H_kv, x.shape[1] // H_kv))


def cut(x: Tensor, rows: Range) -> Tensor:
    """The rows of x (..., T, D) that belong to a tile, as a view."""
    return x[..., slice(*rows), :]


def forward_from_text(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inputs: Sequence[Tensor],
    text: str,
    q_start: int | None,
    k_start: int,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`forward`, with its Spec as text."""
    spec = Spec.read(text)
    return forward(q, k, v, Inputs.of(spec, inputs), spec, q_start, k_start, lengths)


def backward_from_text(
    do: Tensor, saved: Sequence[Tensor], text: str, q_start: int | None, k_start: int
) -> list[Tensor]:
    """`backward`, with its Spec as text."""
    return backward(do, saved, Spec.read(text), q_start, k_start)


def fake_forward(q: Tensor, _k: Tensor, _v: Tensor, _inputs: Any, text: str, *_: Any) -> tuple[Tensor, Tensor]:
    """Room for `forward`'s results."""
    out = q.new_empty(q.shape, dtype=dtype_of_out(q, Spec.read(text)))
    return out, q.new_empty(q.shape[:-1], dtype=accum_dtype(q.dtype))


def fake_backward(do: Tensor, saved: Sequence[Tensor], text: str, *_: Any) -> list[Tensor]:
    """Room for `backward`'s results."""
    q, k, v, _out, _lse, *rest = saved
    spec = Spec.read(text)
    inputs = Inputs.of(spec, rest)
    learned = [inputs.formula[number] for number in spec.learned]
    return [x.new_empty(x.shape) for x in (q, k, v, *learned, *([] if inputs.sinks is None else [inputs.sinks]))]


forward_op = custom_operator("tiled_forward", forward_from_text, fake_forward)
backward_op = custom_operator("tiled_backward", backward_from_text, fake_backward)
