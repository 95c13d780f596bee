"""Tile sizes of the Hopper kernels."""

import math
from functools import lru_cache
from typing import NamedTuple

from torch import bfloat16

from ...score import Score
from ..call import Problem
from ..formula import added_by, sums_of
from .softmax import STEEP

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
    optimistic 0, or n: a step keeps the rows' maxima, and looks for new ones only where a thread's weights in a row add
               up to more than 2^n. STEEP where rows are steep
    """

    consumers: int
    k: int
    columns: int
    stages: int
    q_stages: int
    registers: int
    ping_pong: bool
    out_in_q: bool = False
    optimistic: int = 0


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


def row_of(score: Score) -> str:
    """The row of a table for scores: what they are, besides causal; "formula" for one that computes with the scores."""
    if score.formula is not None:
        added = added_by(score)
        return "formula" if added is None else f"{added} values"
    if score.alibi:
        return "alibi" if score.soft_cap is None else "alibi and soft_cap"
    return "causal" if score.soft_cap is None else "soft_cap"


# The forward's shapes, and where each was measured to be the fastest.
FORWARD: dict[str, tuple[ForwardBlocks, str]] = {
    "256": (ForwardBlocks(2, 64, 256, 2, 1, 240, False, True), "H100"),
    "128": (ForwardBlocks(2, 128, 128, 2, 2, 240, False), "H200"),
    # Programs of a single consumer divide short sequences better, and smaller tiles the shortest. With larger ones,
    # what comes with the product besides q and k would leave no room for a third program on a multiprocessor.
    "short": (ForwardBlocks(1, 64, 64, 2, 1, 128, False, True), "H200"),
    "alone": (ForwardBlocks(1, 128, 64, 2, 1, 168, False, True), "H200"),
    # The values of pairs take the registers of a third consumer.
    "two": (ForwardBlocks(2, 128, 64, 4, 2, 240, False), "H200"),
    # Fastest for long sequences, with few registers for each. They spill, and are slower, with values of distances, and
    # with dropout where steps are optimistic and the mask is not full.
    "three": (ForwardBlocks(3, 128, 64, 4, 2, 160, False), "H200"),
}
EVER = math.inf
# At most 64 columns: for scores without dropout and with it, the most keys that a query sees where the shape is
# "short", the most where it is "alone", and the shape for more. Measured on an H200.
FORWARD_64: dict[str, tuple[tuple[float, float, str], tuple[float, float, str]]] = {
    "causal": ((2048, 8191, "three"), (2048, EVER, "alone")),
    "full": ((1023, 8191, "three"), (1023, 16383, "three")),
    "alibi": ((2048, 0, "three"), (EVER, 0, "short")),
    "alibi and soft_cap": ((EVER, 0, "short"), (EVER, 0, "short")),
    "soft_cap": ((2048, 8191, "three"), (2048, 16383, "three")),
    "formula": ((2048, 8191, "three"), (2048, 16383, "three")),
    "column values": ((2048, 0, "three"), (16383, 0, "three")),
    "full column values": ((1023, 0, "three"), (16383, 0, "three")),
    "distance values": ((2048, EVER, "alone"), (2048, EVER, "alone")),
    "pair values": ((2048, 0, "two"), (2048, 0, "two")),
}


@lru_cache(maxsize=1024)
def forward_blocks(problem: Problem) -> ForwardBlocks:
    """The forward's shape for a call with a head size that it supports."""
    spec, dropout, length, kind = problem.spec, problem.dropout, problem.visible, row_of(problem.spec.score)
    if problem.head_dim > 128:
        return FORWARD["256"][0]
    # Other formulas are slower that way, or less accurate (docs/notes/kernels.md). Soft caps up to 60 need no maxima.
    optimistic = 15 if kind in ("causal", "alibi", "column values") else 0  # fp16 ends at 2^16
    if optimistic and spec.factors != "none" and problem.dtype == bfloat16:
        optimistic = STEEP.value  # maxima grow in many steps
    if problem.head_dim > 64:
        # The further operands of the product leave no room for a second stage of queries; for values of keys a tile of
        # out makes room for it, which is faster without dropout.
        biased = kind == "column values"
        q_stages = 1 if spec.score.alibi or (biased and dropout) else 2
        return FORWARD["128"][0]._replace(q_stages=q_stages, out_in_q=biased and not dropout, optimistic=optimistic)
    if optimistic and not (spec.score.causal or spec.bounded):
        kind = "full" if kind == "causal" else f"full {kind}"
    short, alone, more = FORWARD_64[kind][dropout]
    name = "short" if length <= short else "alone" if length <= alone else more
    blocks = FORWARD[name][0]._replace(optimistic=optimistic, ping_pong=name == "three" and not optimistic)
    # Two tiles of queries of a short row: with a causal mask, all programs then have the same number of keys.
    is_square = problem.queries == problem.keys and not (spec.bounded or spec.offsets)
    in_pairs = name == "short" and spec.score.causal and is_square and length <= 1024
    return blocks._replace(q_stages=2) if in_pairs else blocks


# The backward's shapes, and where each was measured to be the fastest.
BACKWARD: dict[str, tuple[BackwardBlocks, str]] = {
    "256": (BackwardBlocks(64, 64, 256, 2, 1, False, False, 64, 1, None), "H100"),
    "128": (BackwardBlocks(64, 128, 128, 2, 1, False, False, 64, 2, None), "H200"),
    # With 128 queries there would be no registers for dropout's mask, values of pairs or the sums of ds (i - j).
    "64 queries": (BackwardBlocks(64, 128, 64, 3, 2, False, False, 64, 1, None), "H200"),
    "128 queries": (BackwardBlocks(128, 128, 64, 2, 2, False, False, 128, 1, None), "H100"),
}


@lru_cache(maxsize=1024)
def backward_blocks(problem: Problem) -> BackwardBlocks:
    """The backward's shape for a call with a head size that it supports."""
    kind, dropout = row_of(problem.spec.score), problem.dropout
    if problem.head_dim > 128:
        return BACKWARD["256"][0]
    sums = sums_of(problem.spec)
    # lse2 and delta cannot come with their products where a soft cap, a formula or dropout changes s or dp in between.
    # Below 1,024 keys it takes longer to write them as operands than it saves. At head size 64 they take the place of
    # the next keys in shared memory, as do the ones by which all ds are summed.
    changed = kind in ("soft_cap", "alibi and soft_cap", "formula")
    rows = not (dropout or changed) and (problem.visible >= 1024 if problem.head_dim > 64 else kind != "causal")
    if problem.head_dim > 64:
        return BACKWARD["128"][0]._replace(rows_in_products=rows, sums=sums)
    if dropout or kind == "pair values" or sums == "distance":
        return BACKWARD["64 queries"][0]._replace(rows_in_products=rows, mask_drawer=dropout, sums=sums)
    # The scores of 128 queries leave no registers for tanh, for instance; with ALiBi they are 2 % slower.
    return BACKWARD["128 queries"][0]._replace(
        rows_in_products=rows,
        sums=sums,
        key_stages=1 if rows or sums == "ds" else 2,
        part=128 if kind == "causal" else 64,
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
