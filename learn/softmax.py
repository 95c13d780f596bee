"""The ladder for one row: from softmax as it is written in books to attention in one pass over tiles.

Each function reads the scores x (N,) and, where it computes attention, the values v (N, d) from slow memory. It
computes  softmax(x)_i = exp(x_i) / sum_j exp(x_j)  or  out = sum_i softmax(x)_i v_i.  Names are those of
attention/tiled.py: m the running maximum, l the running sum of exp(x - m), o the running sum of exp(x - m) v, and
alpha the factor that rescales l and o from an old maximum to a new one.
"""

import torch

from learn.memory import Slow, tiles


def native(x: Slow, y: Slow) -> None:
    """y = exp(x) / sum(exp(x)), as the formula says. Overflows for large x."""
    l = torch.zeros((), dtype=x.tensor.dtype)
    for i in tiles(len(x), 1):
        l = l + torch.exp(x.load(i)).sum()
    for i in tiles(len(x), 1):
        y.store(i, torch.exp(x.load(i)) / l)


def safe(x: Slow, y: Slow) -> None:
    """y = exp(x - m) / sum(exp(x - m)) with m = max(x): the same value, and no exponent above 0."""
    m = torch.full((), -torch.inf, dtype=x.tensor.dtype)
    for i in tiles(len(x), 1):
        m = torch.maximum(m, x.load(i).max())
    l = torch.zeros((), dtype=x.tensor.dtype)
    for i in tiles(len(x), 1):
        l = l + torch.exp(x.load(i) - m).sum()
    for i in tiles(len(x), 1):
        y.store(i, torch.exp(x.load(i) - m) / l)


def online(x: Slow, y: Slow) -> None:
    """Maximum and sum in one pass: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax", alg. 3."""
    m = torch.full((), -torch.inf, dtype=x.tensor.dtype)
    l = torch.zeros((), dtype=x.tensor.dtype)
    for i in tiles(len(x), 1):
        x_i = x.load(i)
        m_new = torch.maximum(m, x_i.max())
        l = l * torch.exp(m - m_new)  # rescale: l was summed with the old maximum
        l = l + torch.exp(x_i - m_new).sum()
        m = m_new
    for i in tiles(len(x), 1):
        y.store(i, torch.exp(x.load(i) - m) / l)


def two_pass_attention(x: Slow, v: Slow, out: Slow) -> None:
    """Attention on top of the online softmax: the weights are used as they are made, and never stored."""
    m = torch.full((), -torch.inf, dtype=x.tensor.dtype)
    l = torch.zeros((), dtype=x.tensor.dtype)
    for i in tiles(len(x), 1):
        x_i = x.load(i)
        m_new = torch.maximum(m, x_i.max())
        l = l * torch.exp(m - m_new)  # rescale: l was summed with the old maximum
        l = l + torch.exp(x_i - m_new).sum()
        m = m_new
    o = torch.zeros_like(v.tensor[0])
    for i in tiles(len(x), 1):
        o = o + torch.exp(x.load(i) - m) / l @ v.load(i)
    out.store(slice(0, 1), o[None])


def one_pass_attention(x: Slow, v: Slow, out: Slow) -> None:
    """The output is a sum like l, so it can be rescaled like l: one pass, and the division moves to the end."""
    m = torch.full((), -torch.inf, dtype=x.tensor.dtype)
    l = torch.zeros((), dtype=x.tensor.dtype)
    o = torch.zeros_like(v.tensor[0])
    for i in tiles(len(x), 1):
        x_i, v_i = x.load(i), v.load(i)
        m_new = torch.maximum(m, x_i.max())
        alpha = torch.exp(m - m_new)
        l, o = l * alpha, o * alpha  # rescale: both were summed with the old maximum
        p_i = torch.exp(x_i - m_new)
        l, o = l + p_i.sum(), o + p_i @ v_i
        m = m_new
    out.store(slice(0, 1), (o / l)[None])


def tiled_attention(x: Slow, v: Slow, out: Slow, block: int = 2) -> None:
    """The same with several scores at a time: nothing changes but the size of x_i."""
    m = torch.full((), -torch.inf, dtype=x.tensor.dtype)
    l = torch.zeros((), dtype=x.tensor.dtype)
    o = torch.zeros_like(v.tensor[0])
    for i in tiles(len(x), block):
        x_i, v_i = x.load(i), v.load(i)
        m_new = torch.maximum(m, x_i.max())
        alpha = torch.exp(m - m_new)
        l, o = l * alpha, o * alpha  # rescale: both were summed with the old maximum
        p_i = torch.exp(x_i - m_new)
        l, o = l + p_i.sum(), o + p_i @ v_i
        m = m_new
    out.store(slice(0, 1), (o / l)[None])
