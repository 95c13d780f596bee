"""The order in which programs take tiles, and the tiles that see each other: all roles of a kernel agree on both.

Bounds and masks are those of attention/flash/score.py, here in units of tiles.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..configs import Blocks
from ..score import seeing_queries, seen_keys


class Sizes(NamedTuple):
    """The sizes of a call: query heads H, query heads G that share a key/value head, queries T, keys S of a sequence.

    n_tiles of a head, n_heads of the batch, and n_together heads that run at the same time (see tiles.swizzle)
    """

    H: Any
    G: Any
    T: Any
    S: Any
    n_tiles: Any
    n_heads: Any
    n_together: Any


class Program(NamedTuple):
    """The state that all roles of a program share: tensors and scalars of the call, shared memory, barriers, sizes."""

    inputs: Any
    scalars: Any
    buffers: Any
    barriers: Any
    sizes: Any


class QueryTiles(NamedTuple):
    """The query tiles that see something of a key tile: those from `start` up to, but not including, `end`.

    Those before `last` see no later key tile, and those from `first` on no earlier one. Those from `full_start` up to
    `full_end` see all of its keys. `start` and `end` grow or stay from one key tile to the next, so that the key tiles
    that a query tile sees have no gap.
    """

    start: Any
    last: Any
    first: Any
    full_start: Any
    full_end: Any
    end: Any


@gluon.constexpr_function
def tile_shape(rows, columns):
    """A tile's shape as the BLOCKS that the functions of attention/flash/score.py take."""
    return Blocks(rows, columns, warps=4, stages=1)


@gluon.jit
def key_tiles(i_m, pos, BM: gl.constexpr, BN: gl.constexpr, MODE: gl.constexpr):
    """(n_start, n_full_start, n_full_end, n_end): the key tiles that one of the queries [i_m, i_m + BM) sees.

    All of the queries see all of those from n_full_start up to n_full_end. There is at least one tile, so that queries
    that see nothing go the same way as the others.
    """
    TILE: gl.constexpr = tile_shape(BM, BN)
    i_m = gl.minimum(i_m, pos.T - 1)  # the documents of rows beyond the last query are unknown
    n_start, n_full_start, n_full_end, n_end = seen_keys(i_m, pos, TILE, MODE)
    n_end = gl.maximum(gl.cdiv(n_end, BN), 1)
    return gl.minimum(n_start // BN, n_end - 1), n_full_start // BN, n_full_end // BN, n_end


@gluon.jit
def query_tiles(i_tile, pos, sizes, BM: gl.constexpr, BN: gl.constexpr, MODE: gl.constexpr):
    """The query tiles of BM rows that see something of key tile i_tile, of BN rows."""
    TILE: gl.constexpr = tile_shape(BM, BN)
    n_m = gl.cdiv(pos.T, BM)
    start, full_start, full_end, end = seeing_queries(i_tile * BN, pos, TILE, MODE)
    start = gl.minimum(start // BM, n_m)
    full_start = gl.minimum(full_start // BM, n_m)
    end = gl.cdiv(gl.maximum(end, 0), BM)
    # Keys beyond the last must be masked: the copy engine reads them as zeros, which would be valid scores.
    full_start = gl.where(i_tile * BN + BN > pos.S, end, full_start)
    full_end = gl.maximum(full_end, 0) // BM if MODE.bounded else end
    last = n_m
    if i_tile < sizes.n_tiles - 1:
        last, _, _, _ = seeing_queries(i_tile * BN + BN, pos, TILE, MODE)
        last = gl.minimum(last // BM, n_m)
    first = n_m * 0
    if i_tile > 0:
        _, _, _, first = seeing_queries(i_tile * BN - BN, pos, TILE, MODE)
        first = gl.cdiv(gl.maximum(first, 0), BM)
    return QueryTiles(start, last, first, full_start, full_end, end)
