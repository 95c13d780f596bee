"""Tile sizes of the Hopper kernels."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

from ..call import Problem
from ..formula import added_by, is_biased, sums_of

HEAD_DIMS = range(33, 257)  # in tiles of 64, 128 or 256 columns
MAX_HEAD_DIM_OF_SUMS = 128  # above it, the backward has no formulas and sums no ds for learned slopes
# The sequence length from which a kernel was faster than the plain one on an H200, or as fast if both passes together
# were faster: (columns, dropout, backward), then by what the scores are; plain where there is no entry. Sinks, a full
# mask and offsets are as causal attention.
FASTER_FROM: dict[tuple[int, bool, bool], dict[str, int]] = {
    (64, False, False): {"causal": 128, "alibi": 512, "soft_cap": 512, "window": 128, "documents": 128},
    (64, False, True): {"causal": 128, "alibi": 512, "soft_cap": 512, "window": 128, "documents": 128},
    (64, True, False): {"causal": 128, "alibi": 512, "soft_cap": 512, "window": 512, "documents": 512},
    (64, True, True): {"causal": 128, "alibi": 512, "soft_cap": 512, "window": 512, "documents": 512},
    (128, False, False): {"causal": 128, "alibi": 512, "soft_cap": 512, "window": 512, "documents": 512},
    (128, False, True): {"causal": 128, "alibi": 512, "soft_cap": 512, "window": 1024, "documents": 1024},
    (128, True, False): {"causal": 128, "alibi": 512, "soft_cap": 2048, "window": 512},
    (128, True, True): {"causal": 128, "alibi": 512, "soft_cap": 512, "window": 512, "documents": 512},
    # On an H100, and no shorter ones were timed.
    **{
        (256, dropout, backward): {"causal": 128, "alibi": 128, "soft_cap": 128, "window": 128, "documents": 128}
        for dropout in (False, True)
        for backward in (False, True)
    },
}


class ForwardBlocks(NamedTuple):
    """The forward's shape.

    consumers  of 64 queries each; a single one has no producer, and several programs share a multiprocessor; with two
               q_stages it has two tiles of queries, one after the other
    k          rows of a key tile
    columns    of all tiles: the head size, rounded up
    stages     key tiles in flight
    q_stages   query tiles of a consumer in flight
    registers  of a consumer's thread: 168 for three programs per multiprocessor, 128 for four
    ping_pong  whether the consumers start their products one after the other, so that one multiplies during the
               softmax of another (FlashAttention-3, section 3.1)
    out_in_q   whether a tile of out takes the place of its queries in shared memory
    optimistic whether a step keeps the rows' maxima, and looks for new ones only where its weights are too large
    """

    consumers: int
    k: int
    columns: int
    stages: int
    q_stages: int
    registers: int
    ping_pong: bool
    out_in_q: bool = False
    optimistic: bool = False


class DqBlocks(NamedTuple):
    """The shape of the kernel for dq of wide heads, whose backward has two kernels; fields are as in ForwardBlocks."""

    consumers: int
    k: int
    columns: int
    stages: int
    q_stages: int


DQ_BLOCKS = DqBlocks(consumers=2, k=64, columns=256, stages=2, q_stages=1)


class BackwardBlocks(NamedTuple):
    """The backward's shape.

    q                 rows of a query tile, 64 or 128
    k                 rows of a key tile
    columns           of all tiles
    stages            query tiles in flight
    key_stages        key tiles in flight
    rows_in_products  whether lse2 and delta come with the products s and dp, which takes shared memory
    mask_drawer       whether four more warps draw dropout's mask, which takes registers and shared memory
    part              queries whose scores are computed at a time: a whole tile's, or 64 of 128
    pieces            1 or 2: of a part; the products of a piece run while the weights of the next are computed
    sums              what is summed along the columns, see `sums_of`
    writes_ds         whether ds is written to device memory
    ds_aligned        whether its rows begin at multiples of 16 bytes
    """

    q: int
    k: int
    columns: int
    stages: int
    key_stages: int
    rows_in_products: bool
    mask_drawer: bool
    part: int
    pieces: int
    sums: str | None
    writes_ds: bool = False
    ds_aligned: bool = False


@lru_cache(maxsize=1024)
def forward_blocks(problem: Problem) -> ForwardBlocks:
    """The forward's shape for a call with a head size that it supports."""
    head_dim, length, dropout, score = problem.head_dim, problem.visible, problem.dropout, problem.spec.score
    alibi, biased, soft_cap = score.alibi, is_biased(score), score.soft_cap is not None
    if head_dim > 128:
        return ForwardBlocks(
            consumers=2, k=64, columns=256, stages=2, q_stages=1, registers=240, ping_pong=False, out_in_q=True
        )
    # Other formulas are slower that way, or less accurate (docs/notes/kernels.md). Soft caps up to 60 need no
    # maxima.
    optimistic = (score.formula is None or biased) and not soft_cap
    if head_dim > 64:
        # The further operands of the product leave no room for a second stage of queries; for values of keys a tile of
        # out makes room for it, which is faster without dropout.
        out_in_q = biased and not dropout
        q_stages = 1 if alibi or (biased and dropout) else 2
        return ForwardBlocks(
            consumers=2,
            k=128,
            columns=128,
            stages=2,
            q_stages=q_stages,
            registers=240,
            ping_pong=False,
            out_in_q=out_in_q,
            optimistic=optimistic,
        )
    # Three consumers are fastest for long sequences, and leave few registers to each. Programs of a single one divide
    # short sequences better, and smaller tiles the shortest. With larger ones, what comes with the product besides q
    # and k would leave no room for a third program on a multiprocessor.
    longest = 16384 if dropout else 8192
    spec = problem.spec
    full = optimistic and not (score.causal or spec.bounded)
    shortest = 1023 if full else 2048
    alone = ForwardBlocks(
        consumers=1,
        k=128,
        columns=64,
        stages=2,
        q_stages=1,
        registers=168,
        ping_pong=False,
        out_in_q=True,
        optimistic=optimistic,
    )
    if length <= shortest or (alibi and (dropout or soft_cap)) or (biased and dropout and length < longest):
        # Two tiles of queries of a short row: with a causal mask, all programs then have the same number of keys.
        is_square = problem.queries == problem.keys and not (spec.bounded or spec.offsets)
        q_stages = 2 if score.causal and is_square and length <= 1024 else 1
        return alone._replace(k=64, q_stages=q_stages, registers=128)
    if added_by(score) == "pair":  # whose values take the registers of a third consumer
        return ForwardBlocks(consumers=2, k=128, columns=64, stages=4, q_stages=2, registers=240, ping_pong=False)
    # Three consumers spill with dropout, and with values of distances, and are slower then, but not with a full mask.
    spills = added_by(score) == "distance" or (optimistic and dropout and not full)
    if (length < longest or spills) and not (alibi or biased):
        return alone
    return ForwardBlocks(
        consumers=3,
        k=128,
        columns=64,
        stages=4,
        q_stages=2,
        registers=160,
        ping_pong=not optimistic,
        optimistic=optimistic,
    )


class BackwardConfig(NamedTuple):
    """The constants of a kernel of the backward: its shape, and the mode of `added.hopper_mode`."""

    blocks: BackwardBlocks
    mode: Any


@lru_cache(maxsize=1024)
def backward_blocks(problem: Problem) -> BackwardBlocks:
    """The backward's shape for a call with a head size that it supports."""
    head_dim, length, dropout, score = problem.head_dim, problem.visible, problem.dropout, problem.spec.score
    if head_dim > 128:
        return BackwardBlocks(
            q=64,
            k=64,
            columns=256,
            stages=2,
            key_stages=1,
            rows_in_products=False,
            mask_drawer=False,
            part=64,
            pieces=1,
            sums=None,
        )
    alibi, sums = score.alibi, sums_of(problem.spec)
    changed = score.soft_cap is not None or (
        score.formula is not None and added_by(score) not in ("column", "distance", "pair")
    )
    # lse2 and delta cannot come with their products where a soft cap, a formula or dropout changes s or dp in between.
    # Below 1,024 keys it takes longer to write them as operands than it saves. At head size 64 they take the place of
    # the next keys in shared memory, as do the ones by which all ds are summed.
    rows = not (dropout or changed) and (length >= 1024 if head_dim > 64 else alibi or added_by(score) is not None)
    if head_dim > 64:
        return BackwardBlocks(
            q=64,
            k=128,
            columns=128,
            stages=2,
            key_stages=1,
            rows_in_products=rows,
            mask_drawer=False,
            part=64,
            pieces=2,
            sums=sums,
        )
    # With 128 queries there would be no registers for dropout's mask, values of pairs or the sums of ds (i - j).
    if dropout or added_by(score) == "pair" or sums == "distance":
        return BackwardBlocks(
            q=64,
            k=128,
            columns=64,
            stages=3,
            key_stages=2,
            rows_in_products=rows,
            mask_drawer=dropout,
            part=64,
            pieces=1,
            sums=sums,
        )
    key_stages = 1 if rows or sums == "ds" else 2
    # The scores of 128 queries leave no registers for tanh, for instance; with ALiBi they are 2 % slower.
    part = 64 if alibi or score.soft_cap is not None or score.formula is not None else 128
    return BackwardBlocks(
        q=128,
        k=128,
        columns=64,
        stages=2,
        key_stages=key_stages,
        rows_in_products=rows,
        mask_drawer=False,
        part=part,
        pieces=1,
        sums=sums,
    )


def key_tiles_together(problem: Problem, sharing: int) -> int:
    """The number of a head's key tiles that the backward works on at a time; `sharing` query heads share their keys.

    With fewer, what they read and add again does not stay in the L2 cache. With more they wait for each other, above
    all with a causal mask, whose last key tiles meet few queries. In short rows all of it stays in the cache.
    """
    keys, visible, causal = problem.keys * sharing, problem.visible * sharing, problem.spec.score.causal
    if problem.head_dim > 64:
        if causal:
            return 3 if keys <= 1024 else 6
        return 6 if visible <= 1024 else 12
    if causal:
        return 1 if keys <= 512 else 2 if visible <= 1024 else 3
    return 2 if keys <= 512 else 3 if visible <= 1024 else 6


def is_faster(problem: Problem, backward: bool) -> bool:
    """Whether the forward or the backward was measured to be faster than the plain one, for a head size it supports.

    Of several features that take time, each must have been faster alone.
    """
    columns = next(columns for columns in (64, 128, 256) if problem.head_dim <= columns)
    faster_from = FASTER_FROM.get((columns, problem.dropout, backward), {})
    features = problem.spec.features()
    if "formula" in features:  # not timed: as a soft cap, which also changes every score
        features |= {"soft_cap"}
    kinds = features & {"alibi", "soft_cap", "window", "documents"} or {"causal"}
    return all(problem.length >= faster_from.get(kind, math.inf) for kind in kinds)
