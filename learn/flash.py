"""FlashAttention-1 and -2 on matrices, forward and backward, one head, with every move to and from slow memory.

    S = Q K^T / sqrt(d),  P = softmax(S),  O = P V                                      (N, d) in and out

FlashAttention-1 (Dao et al. 2022, algorithms 1 and 4) walks over tiles of keys and, for each, over all tiles of
queries: O, l and m live in slow memory and are read and written again for each. FlashAttention-2 (Dao 2023, algorithms
1 and 2) changes the order of the loops: o, l and m of a tile of queries stay in fast memory until it is done, and the
backward reads one log-sum-exp a row instead of l and m.

`see(i, j)` is a tile of the mask, True where a query sees a key; `keep(i, j)` a tile of the dropout mask times its
scale. A tile of which no query sees anything is never loaded.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from learn.memory import Rows, SlowMemory, tiles

Tile = Callable[[Rows, Rows], Tensor]  # of an (N, N) matrix, for a tile of queries and a tile of keys


def lowest(dtype: torch.dtype) -> float:
    """The start of the running maximum: finite, so that a row that sees nothing yet computes exp(-inf - m) = 0."""
    return torch.finfo(dtype).min


def block_sizes(d: int, M: int) -> tuple[int, int]:
    """B_r and B_c: rows of a tile of queries and of a tile of keys, for a fast memory of M numbers.

    FlashAttention-1, algorithm 1: B_c = M / 4d, as tiles of Q, K, V and O are held at once, and B_r = min(B_c, d). The
    paper rounds up; rounded down the four tiles fit. Raises ValueError where not even one row of each fits.
    """
    B_c = M // (4 * d)
    if B_c < 1:
        raise ValueError(f"M={M} does not hold one row of {d} numbers of each of Q, K, V and O; use M={4 * d} or more.")
    return min(B_c, d), B_c


def standard_forward(hbm: SlowMemory, see: Tile, keep: Tile) -> None:
    """The formula, one operation after the other: S and P (N, N) go out to slow memory and come back."""
    scale = 1 / math.sqrt(hbm.Q.tensor.shape[1])
    rows, columns = slice(0, len(hbm.Q)), slice(0, len(hbm.K))
    hbm.S.store(rows, (scale * hbm.Q.load(rows) @ hbm.K.load(columns).T).masked_fill(~see(rows, columns), -torch.inf))
    hbm.P.store(rows, torch.softmax(hbm.S.load(rows), dim=1))
    hbm.O.store(rows, (hbm.P.load(rows) * keep(rows, columns)) @ hbm.V.load(columns))


def standard_backward(hbm: SlowMemory, see: Tile, keep: Tile) -> None:
    """FlashAttention-1, algorithm 3: the gradients by the formulas, with P and dS (N, N) in slow memory."""
    scale = 1 / math.sqrt(hbm.Q.tensor.shape[1])
    rows, columns = slice(0, len(hbm.Q)), slice(0, len(hbm.K))
    hbm.dV.store(columns, (hbm.P.load(rows) * keep(rows, columns)).T @ hbm.dO.load(rows))
    dp = hbm.dO.load(rows) @ hbm.V.load(columns).T * keep(rows, columns)
    p = hbm.P.load(rows)
    hbm.dS.store(rows, p * (dp - (p * dp).sum(dim=1, keepdim=True)))
    hbm.dQ.store(rows, scale * hbm.dS.load(rows) @ hbm.K.load(columns))
    hbm.dK.store(columns, scale * hbm.dS.load(rows).T @ hbm.Q.load(rows))


def flash_1_forward(hbm: SlowMemory, B_r: int, B_c: int, see: Tile, keep: Tile) -> None:
    """Keys outside, queries inside: O, l and m are read and written once for every tile of keys."""
    scale = 1 / math.sqrt(hbm.Q.tensor.shape[1])
    for j in tiles(len(hbm.K), B_c):
        k, v = hbm.K.load(j), hbm.V.load(j)
        for i in tiles(len(hbm.Q), B_r):
            if not see(i, j).any():
                continue
            q, o_i, l_i, m_i = hbm.Q.load(i), hbm.O.load(i), hbm.l.load(i), hbm.m.load(i)
            s = (scale * q @ k.T).masked_fill(~see(i, j), -torch.inf)
            m_new = torch.maximum(m_i, s.amax(dim=1, keepdim=True))
            p = torch.exp(s - m_new)
            alpha = torch.exp(m_i - m_new)
            l_new = alpha * l_i + p.sum(dim=1, keepdim=True)
            o_new = (alpha * l_i * o_i + (p * keep(i, j)) @ v) / l_new.clamp(min=torch.finfo(l_new.dtype).tiny)
            hbm.O.store(i, o_new)
            hbm.l.store(i, l_new)
            hbm.m.store(i, m_new)


def flash_2_forward(hbm: SlowMemory, B_r: int, B_c: int, see: Tile, keep: Tile) -> None:
    """Queries outside, keys inside: o, l and m stay in fast memory, and one division ends the tile."""
    scale = 1 / math.sqrt(hbm.Q.tensor.shape[1])
    for i in tiles(len(hbm.Q), B_r):
        q = hbm.Q.load(i)
        m = torch.full_like(q[:, :1], lowest(q.dtype))
        l = torch.zeros_like(m)
        o = torch.zeros_like(q)
        for j in tiles(len(hbm.K), B_c):
            if not see(i, j).any():
                continue
            k, v = hbm.K.load(j), hbm.V.load(j)
            s = (scale * q @ k.T).masked_fill(~see(i, j), -torch.inf)
            m_new = torch.maximum(m, s.amax(dim=1, keepdim=True))
            p = torch.exp(s - m_new)
            alpha = torch.exp(m - m_new)
            l = alpha * l + p.sum(dim=1, keepdim=True)
            o = alpha * o + (p * keep(i, j)) @ v
            m = m_new
        hbm.O.store(i, o / l)
        hbm.lse.store(i, m + torch.log(l))


def flash_1_backward(hbm: SlowMemory, B_r: int, B_c: int, see: Tile, keep: Tile) -> None:
    """Scores are computed again from Q, K, l and m; every tile reads O once more for D = rowsum(dO * O)."""
    scale = 1 / math.sqrt(hbm.Q.tensor.shape[1])
    for j in tiles(len(hbm.K), B_c):
        k, v = hbm.K.load(j), hbm.V.load(j)
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        for i in tiles(len(hbm.Q), B_r):
            if not see(i, j).any():
                continue
            q, do, l_i, m_i = hbm.Q.load(i), hbm.dO.load(i), hbm.l.load(i), hbm.m.load(i)
            s = (scale * q @ k.T).masked_fill(~see(i, j), -torch.inf)
            p = torch.exp(s - m_i) / l_i
            dv = dv + (p * keep(i, j)).T @ do
            dp = do @ v.T * keep(i, j)
            delta = (do * hbm.O.load(i)).sum(dim=1, keepdim=True)
            ds = p * (dp - delta)
            hbm.dQ.store(i, hbm.dQ.load(i) + scale * ds @ k)
            dk = dk + scale * ds.T @ q
        hbm.dK.store(j, dk)
        hbm.dV.store(j, dv)


def flash_2_backward(hbm: SlowMemory, B_r: int, B_c: int, see: Tile, keep: Tile) -> None:
    """D = rowsum(dO * O) is computed once, and the log-sum-exp gives P in one step."""
    scale = 1 / math.sqrt(hbm.Q.tensor.shape[1])
    for i in tiles(len(hbm.Q), B_r):
        hbm.D.store(i, (hbm.dO.load(i) * hbm.O.load(i)).sum(dim=1, keepdim=True))
    for j in tiles(len(hbm.K), B_c):
        k, v = hbm.K.load(j), hbm.V.load(j)
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        for i in tiles(len(hbm.Q), B_r):
            if not see(i, j).any():
                continue
            q, do, lse_i, delta = hbm.Q.load(i), hbm.dO.load(i), hbm.lse.load(i), hbm.D.load(i)
            s = (scale * q @ k.T).masked_fill(~see(i, j), -torch.inf)
            p = torch.exp(s - lse_i)
            dv = dv + (p * keep(i, j)).T @ do
            dp = do @ v.T * keep(i, j)
            ds = p * (dp - delta)
            hbm.dQ.store(i, hbm.dQ.load(i) + scale * ds @ k)
            dk = dk + scale * ds.T @ q
        hbm.dK.store(j, dk)
        hbm.dV.store(j, dv)
