"""FlashAttention in plain PyTorch, tile by tile: the algorithm to read beside naive.py and the Triton kernels.

    forward    Dao 2023, "FlashAttention-2", algorithm 1: the online softmax
    backward   the same paper, algorithm 2: scores recomputed from q, k and the log-sum-exp

The score matrix is cut into tiles of block_q x block_k, and no more than one tile of it exists at a time, so
memory is linear in the sequence: the backward keeps q, k, v, out and lse. Tiles that lie wholly above the causal
diagonal are never visited. The dropout mask is drawn tile by tile, and drawn again in the backward.

Names are the paper's; the prefix b_ marks a tile. Tiles of q have the shape (B, H_kv, G, block_q, D) and tiles of
k and v (B, H_kv, 1, block_k, D), where G = H // H_kv query heads share a key/value head.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attention.dropout import DropoutKey, keep_mask, keep_scale
from attention.interface import Ablation, Attention, AttentionConfig, UnsupportedAttention, accum_dtype, causal_mask

Range = tuple[int, int]  # start, stop


class TiledAttention(Attention):
    """Attention without the score matrix, in tiles of `attention.block_q` x `attention.block_k`."""

    name = "tiled"
    options = frozenset({"block_q", "block_k", "ablate"})

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        for option in ("block_q", "block_k"):
            if getattr(config, option) < 1:
                raise UnsupportedAttention(f"attention.{option}={getattr(config, option)} must be at least 1.")

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, dropout_key: DropoutKey | None
    ) -> tuple[Tensor, Tensor]:
        key = None if dropout_key is None else dropout_key.pack(q.device)
        config = self.config
        return Tiled.apply(
            q, k, v, key, causal, scale, self.dropout, config.block_q, config.block_k, config.ablate.value
        )


class Tiled(torch.autograd.Function):
    """Keeps q, k, v, out, lse and the dropout key from forward to backward, and nothing of the size of the scores."""

    @staticmethod
    def forward(ctx, q, k, v, key, causal, scale, dropout, block_q, block_k, ablate):
        # torch.compile sees one operation: the loops, unrolled, would be a graph of thousands.
        run = forward_op if torch.compiler.is_compiling() else forward
        out, lse = run(q, k, v, key, causal, scale, dropout, block_q, block_k, ablate)
        ctx.save_for_backward(q, k, v, out, lse, key)
        ctx.mark_non_differentiable(lse)
        ctx.settings = (causal, scale, dropout, block_q, block_k)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, do, _):
        run = backward_op if torch.compiler.is_compiling() else backward
        with torch.autocast(do.device.type, enabled=False):
            dq, dk, dv = run(do, *ctx.saved_tensors, *ctx.settings)
        return dq, dk, dv, *(None,) * 7


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key: Tensor | None,
    causal: bool,
    scale: float,
    dropout: float,
    block_q: int,
    block_k: int,
    ablate: str,
) -> tuple[Tensor, Tensor]:
    """Algorithm 1: q (B, H, T, D) and k, v (B, H_kv, S, D) to out (B, H, T, D) and lse (B, H, T).

    key       (4,) int64, as DropoutKey.pack gives it; None drops nothing
    dropout   probability of dropping
    """
    T, S = q.shape[2], k.shape[2]
    q, k, v = grouped(q, k.shape[1]), k.unsqueeze(2), v.unsqueeze(2)
    dtype = accum_dtype(q.dtype)
    out = q.new_empty(q.shape)
    lse = q.new_empty(q.shape[:-1], dtype=dtype)

    for rows in tiles(0, T, block_q):
        b_q = cut(q, rows)
        # m, l, o: the running maximum, sum of exp(s - m) and sum of exp(s - m) v. The maximum starts at the lowest
        # finite number, not at -inf, so that rows that see nothing compute exp(-inf - m) = 0 and never a NaN.
        m = b_q.new_full((*b_q.shape[:-1], 1), torch.finfo(dtype).min, dtype=dtype)
        l = torch.zeros_like(m)
        o = b_q.new_zeros(b_q.shape, dtype=dtype)

        for columns in tiles(0, key_stop(rows, T, S, causal), block_k):
            b_k, b_v = cut(k, columns), cut(v, columns)
            b_s = score_tile(b_q, b_k, rows, columns, T, S, causal, scale)
            m_new = torch.maximum(m, b_s.amax(dim=-1, keepdim=True))
            if ablate == Ablation.no_max_subtraction.value:
                m_new = torch.zeros_like(m)
            alpha = torch.exp(m - m_new)  # takes l and o from the old maximum to the new one
            if ablate == Ablation.no_rescaling.value:
                alpha = torch.ones_like(m)
            b_p = torch.exp(b_s - m_new)
            l = alpha * l + b_p.sum(dim=-1, keepdim=True)
            if key is not None:  # after the row sum: dropout acts on the probabilities, not on their normalisation
                b_p = torch.where(keep_tile(key, dropout, q, S, rows, columns), b_p * keep_scale(dropout), 0.0)
            o = alpha * o + dot(b_p.to(v.dtype), b_v)
            m = m_new

        b_out = o / l
        if causal or S == 0:  # rows that see nothing are zero; l = 0 tells less, as scores of -inf give it too
            cut(b_out, (0, max(T - S - rows[0], 0))).zero_()
        cut(out, rows).copy_(b_out)
        lse[..., slice(*rows)] = (m + torch.log(l)).squeeze(-1)
    return out.flatten(1, 2), lse.flatten(1, 2)


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    key: Tensor | None,
    causal: bool,
    scale: float,
    dropout: float,
    block_q: int,
    block_k: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Algorithm 2: the gradients of q, k and v from that of out, with the shapes and names of `forward`."""
    T, S, H_kv = q.shape[2], k.shape[2], k.shape[1]
    q, do, out, lse = (grouped(x, H_kv) for x in (q, do, out, lse))
    k, v = k.unsqueeze(2), v.unsqueeze(2)
    dtype = accum_dtype(q.dtype)
    dq = q.new_zeros(q.shape, dtype=dtype)
    dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)

    # delta = rowsum(dP * P) = rowsum(do * out): what the softmax's Jacobian subtracts. Dropout leaves it valid.
    delta = (do.to(dtype) * out.to(dtype)).sum(dim=-1, keepdim=True)  # (B, H_kv, G, T, 1)
    # Where a row sees nothing every score is -inf, and exp(-inf - lse) is the zero it should be for a finite lse.
    lse = lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)  # (B, H_kv, G, T, 1)

    for columns in tiles(0, S, block_k):
        b_k, b_v = cut(k, columns), cut(v, columns)
        b_dk, b_dv = b_k.new_zeros(b_k.shape, dtype=dtype), b_v.new_zeros(b_v.shape, dtype=dtype)

        for rows in tiles(query_start(columns, T, S, causal, block_q), T, block_q):
            b_q, b_do = cut(q, rows), cut(do, rows)
            b_s = score_tile(b_q, b_k, rows, columns, T, S, causal, scale)
            b_p = torch.exp(b_s - cut(lse, rows))
            b_dp = dot(b_do, b_v.mT)
            b_p_kept = b_p  # the probabilities that met v
            if key is not None:
                b_keep = keep_tile(key, dropout, q, S, rows, columns)
                b_p_kept = torch.where(b_keep, b_p * keep_scale(dropout), 0.0)
                b_dp = torch.where(b_keep, b_dp * keep_scale(dropout), 0.0)
            b_ds = (b_p * (b_dp - cut(delta, rows))).to(q.dtype)
            b_dv += dot(b_p_kept.to(v.dtype).mT, b_do).sum(dim=2, keepdim=True)  # over the group that shares v
            b_dk += dot(b_ds.mT, b_q).sum(dim=2, keepdim=True)
            cut(dq, rows).add_(dot(b_ds, b_k))

        cut(dk, columns).copy_(b_dk * scale)
        cut(dv, columns).copy_(b_dv)
    return (dq * scale).to(q.dtype).flatten(1, 2), dk.squeeze(2), dv.squeeze(2)


def score_tile(
    b_q: Tensor, b_k: Tensor, rows: Range, columns: Range, T: int, S: int, causal: bool, scale: float
) -> Tensor:
    """scale * q k^T for one tile, (B, H_kv, G, block_q, block_k), -inf where the query does not see the key."""
    b_s = scale * dot(b_q, b_k.mT)
    if causal and columns[1] > rows[0] + 1 + S - T:  # else the first row sees the last column: nothing to mask
        b_s.masked_fill_(~causal_mask(T, S, rows=rows, columns=columns, device=b_q.device), -torch.inf)
    return b_s


def keep_tile(key: Tensor, dropout: float, q: Tensor, S: int, rows: Range, columns: Range) -> Tensor:
    """The weights of one tile that dropout keeps, (B, H_kv, G, block_q, block_k), for q (B, H_kv, G, T, D)."""
    B, H_kv, G, T, _ = q.shape
    keep = keep_mask(key, dropout, B, H_kv * G, T, S, rows=rows, columns=columns, device=q.device)
    return grouped(keep, H_kv)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Matrix product as a tensor core makes it: operands in their own precision, sums in fp32."""
    return a.to(accum_dtype(a.dtype)) @ b.to(accum_dtype(b.dtype))


def grouped(x: Tensor, H_kv: int) -> Tensor:
    """(B, H, ...) to (B, H_kv, G, ...): the query heads that share a key/value head side by side."""
    return x.unflatten(1, (H_kv, x.shape[1] // H_kv))


def cut(x: Tensor, rows: Range) -> Tensor:
    """The rows of x (..., T, D) that belong to a tile, as a view."""
    return x[..., slice(*rows), :]


def tiles(start: int, stop: int, block: int) -> Iterator[Range]:
    """(start, stop) of each tile; the last may be shorter."""
    for i in range(start, stop, block):
        yield i, min(i + block, stop)


def key_stop(rows: Range, T: int, S: int, causal: bool) -> int:
    """One past the last key that the rows see; tiles beyond it lie above the diagonal."""
    return max(0, min(S, rows[1] + S - T)) if causal else S


def query_start(columns: Range, T: int, S: int, causal: bool, block_q: int) -> int:
    """The first row of the first tile of queries that see one of the columns."""
    return max(0, columns[0] + T - S) // block_q * block_q if causal else 0


forward_op = torch.library.custom_op("attention::tiled_forward", forward, mutates_args=())
backward_op = torch.library.custom_op("attention::tiled_backward", backward, mutates_args=())


@forward_op.register_fake
def _(q, k, v, key, causal, scale, dropout, block_q, block_k, ablate):
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=accum_dtype(q.dtype))


@backward_op.register_fake
def _(do, q, k, v, out, lse, key, causal, scale, dropout, block_q, block_k):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
