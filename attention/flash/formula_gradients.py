"""Gradients of the tensors in a formula: a separate pass, after that of q, k and v.

With w the derivative of a score by a value, and ds the gradient of the score, the gradient of the value is the sum of
ds w over the scores that depend on it. Every sum has a fixed order, without atomics:

    head, row    a program visits the keys that its queries see, and adds along rows; torch adds a head's rows
    column       a program visits the queries that see its keys
    distance     a program visits a diagonal of tiles, which all have the same distances, and adds them up; if the
                 backward has summed ds over the pairs that share a value, only for the other distances
    pair, table  ds w of every score is written to memory, for some queries at a time, and torch adds it up

Weights are recomputed from the log-sum-exp, as in backward.py.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dropout.kernel import drop, dropped_tile, load_key
from ..formula.call import positions, visible_distances
from ..formula.evaluate import ProgramInputs, full_index, run, sum_of_entries
from ..formula.hoist import Steps
from ..layout import Layout
from .backward import Gradients
from .call import Blocks, KernelCall
from .formula import Place, added_by, kernel_inputs, written
from .score import LOG2_E, key_interval, locate, seeing_queries, seen_keys, sees_key
from .tiles import ROW_ALIGNMENT, compile_options, dot, kernel_mode, launch_scalars, load_tile, tiles

WRITTEN = 2**26  # the most elements of ds w in memory at a time
MOST_PROGRAMS = 2**13  # for the diagonals, unless there are more of these


class Operands(NamedTuple):
    """The operands of a tile of ds: tensors as `load_tile` takes them; lse2, and delta without dropout's scale, as
    `rows_like` has them."""

    q: Any
    k: Any
    v: Any
    do: Any
    lse2: Any
    delta: Any


class PassConfig(NamedTuple):
    """The constants of a pass: `numbers` are the indices of the inputs whose gradients it sums."""

    blocks: Any
    mode: Any
    numbers: Any


@triton.jit
def load_queries(x, i_b, i_h, i_m, BLOCKS: tl.constexpr, MODE: tl.constexpr):
    """(q, do, lse2, delta) of a tile of queries; rows beyond the last have no weight."""
    BM: tl.constexpr = BLOCKS.q
    BD: tl.constexpr = MODE.columns
    H, T = x.q.shape[1], x.q.shape[2]
    o_m = i_m + tl.arange(0, BM)
    o_row = (tl.cast(i_b, tl.int64) * H + i_h) * tl.cdiv(T, ROW_ALIGNMENT) * ROW_ALIGNMENT + o_m
    b_lse2 = tl.load(x.lse2 + o_row, mask=o_m < T, other=float("inf"))
    b_delta = tl.load(x.delta + o_row, mask=o_m < T, other=0.0)
    return load_tile(x.q, i_b, i_h, i_m, BM, BD), load_tile(x.do, i_b, i_h, i_m, BM, BD), b_lse2, b_delta


@triton.jit
def load_keys(x, i_b, i_kv, i_n, BLOCKS: tl.constexpr, MODE: tl.constexpr):
    """(k, v) of a tile of keys."""
    return (
        load_tile(x.k, i_b, i_kv, i_n, BLOCKS.k, MODE.columns),
        load_tile(x.v, i_b, i_kv, i_n, BLOCKS.k, MODE.columns),
    )


@triton.jit
def tile_gradients(b_rows, b_kv, i_b, i_h, i_m, i_n, inputs, scalars, pos, BLOCKS: tl.constexpr, MODE: tl.constexpr):
    """(ds, derivatives of the scores by all inputs) of a tile (BM, BN); both are 0 where a query does not see a key."""
    BM: tl.constexpr = BLOCKS.q
    BN: tl.constexpr = BLOCKS.k
    THRESHOLD: tl.constexpr = MODE.threshold
    KEEP_SCALE: tl.constexpr = 256 / (256 - THRESHOLD)
    b_q, b_do, b_lse2, b_delta = b_rows
    b_k, b_v = b_kv
    o_m, o_n = (i_m + tl.arange(0, BM))[:, None], (i_n + tl.arange(0, BN))[None, :]
    values, place = inputs.formula, Place(i_b, i_h, o_m, o_n, pos)
    head = MODE.formula.head(values, i_b, i_h)
    row = MODE.formula.row(values, i_b, i_h, o_m, pos.T)
    column = MODE.formula.column(values, i_b, i_h, 0, o_n, None)
    b_s = dot(b_q, b_k.T, None, MODE)
    result = MODE.formula.weights(b_s, scalars.scale, head, row, column, values, place, MODE.exact)
    b_p = tl.exp2(result[0] * (MODE.formula.factor * LOG2_E) - b_lse2[:, None])
    interval = key_interval(i_m + tl.arange(0, BM), pos, MODE) if MODE.bounded or MODE.offsets else (0, 0)
    seen = sees_key(o_m, o_n, interval, pos, MODE) & (o_m < pos.T) & (o_n < pos.S)
    b_p = tl.where(seen, b_p, 0.0)
    b_dp = dot(b_do, b_v.T, None, MODE)
    if THRESHOLD:
        b_dp = drop(b_dp, dropped_tile(load_key(inputs.key, i_b, i_h), i_m, i_n, THRESHOLD, BM, BN, False))
    return b_p * (b_dp - b_delta[:, None]) * KEEP_SCALE, seen, result


@triton.jit
def times_weight(b_ds, seen, result, K: tl.constexpr):
    """ds times the derivative by input K."""
    return tl.where(seen, b_ds * result[K + 1], 0.0)


@triton.jit
def rows_kernel(q, k, v, do, lse2, delta, sums, inputs, scalars, CONFIG: tl.constexpr):
    """sums (numbers, B, H, T): along the rows of a tile of queries. Grid: tiles, B x H."""
    BLOCKS: tl.constexpr = CONFIG.blocks
    MODE: tl.constexpr = CONFIG.mode
    NUMBERS: tl.constexpr = CONFIG.numbers
    BM: tl.constexpr = BLOCKS.q
    BN: tl.constexpr = BLOCKS.k
    x = Operands(q, k, v, do, lse2, delta)
    H, T, H_kv, S = q.shape[1], q.shape[2], k.shape[1], k.shape[2]
    i_m, i_bh = tl.program_id(0) * BM, tl.program_id(1)
    i_b, i_h = i_bh // H, i_bh % H
    pos = locate(T, S, inputs, scalars, i_b, i_bh, 1)
    b_rows = load_queries(x, i_b, i_h, i_m, BLOCKS, MODE)
    n_start, _, _, n_end = seen_keys(i_m, pos, BLOCKS, MODE)
    totals = ()
    for _ in tl.static_range(len(NUMBERS)):
        totals += (tl.zeros([BM], tl.float32),)  # type: ignore[assignment]
    for i_n in tl.range(n_start, n_end, BN):
        b_kv = load_keys(x, i_b, i_h // (H // H_kv), i_n, BLOCKS, MODE)
        b_ds, seen, result = tile_gradients(b_rows, b_kv, i_b, i_h, i_m, i_n, inputs, scalars, pos, BLOCKS, MODE)
        new = ()
        for n in tl.static_range(len(NUMBERS)):
            new += (totals[n] + tl.sum(times_weight(b_ds, seen, result, NUMBERS[n]), 1),)  # type: ignore[assignment]
        totals = new
    o_m = i_m + tl.arange(0, BM)
    for n in tl.static_range(len(NUMBERS)):
        o_sum = (tl.cast(n * tl.num_programs(1) + i_bh, tl.int64)) * T + o_m
        tl.store(sums + o_sum, totals[n], mask=o_m < T)


@triton.jit
def columns_kernel(q, k, v, do, lse2, delta, sums, inputs, scalars, CONFIG: tl.constexpr):
    """sums (numbers, B, H, S): along the columns of a tile of keys. Grid: tiles, B x H."""
    BLOCKS: tl.constexpr = CONFIG.blocks
    MODE: tl.constexpr = CONFIG.mode
    NUMBERS: tl.constexpr = CONFIG.numbers
    BM: tl.constexpr = BLOCKS.q
    BN: tl.constexpr = BLOCKS.k
    x = Operands(q, k, v, do, lse2, delta)
    H, T, H_kv, S = q.shape[1], q.shape[2], k.shape[1], k.shape[2]
    i_n, i_bh = tl.program_id(0) * BN, tl.program_id(1)
    i_b, i_h = i_bh // H, i_bh % H
    pos = locate(T, S, inputs, scalars, i_b, i_bh, 1)
    b_kv = load_keys(x, i_b, i_h // (H // H_kv), i_n, BLOCKS, MODE)
    m_start, _, _, m_end = seeing_queries(i_n, pos, BLOCKS, MODE)
    totals = ()
    for _ in tl.static_range(len(NUMBERS)):
        totals += (tl.zeros([BN], tl.float32),)  # type: ignore[assignment]
    for i_m in tl.range(m_start, m_end, BM):
        b_rows = load_queries(x, i_b, i_h, i_m, BLOCKS, MODE)
        b_ds, seen, result = tile_gradients(b_rows, b_kv, i_b, i_h, i_m, i_n, inputs, scalars, pos, BLOCKS, MODE)
        new = ()
        for n in tl.static_range(len(NUMBERS)):
            new += (totals[n] + tl.sum(times_weight(b_ds, seen, result, NUMBERS[n]), 0),)  # type: ignore[assignment]
        totals = new
    o_n = i_n + tl.arange(0, BN)
    for n in tl.static_range(len(NUMBERS)):
        o_sum = (tl.cast(n * tl.num_programs(1) + i_bh, tl.int64)) * S + o_n
        tl.store(sums + o_sum, totals[n], mask=o_n < S)


@triton.jit
def diagonals_kernel(q, k, v, do, lse2, delta, sums, inputs, scalars, first, n_parts, CONFIG: tl.constexpr):
    """sums (B, H, diagonals, n_parts, 2 BN): of tiles whose first query stands (first + n) BM after their first key.

    Entry e is that of the pairs whose distance is e - (BN - 1) more than that of the first query and the first key.
    first and n_parts have 4 x + 2 for x. Grid: diagonals x n_parts, B x H.
    """
    BLOCKS: tl.constexpr = CONFIG.blocks
    MODE: tl.constexpr = CONFIG.mode
    NUMBER: tl.constexpr = CONFIG.numbers[0]
    BM: tl.constexpr = BLOCKS.q
    BN: tl.constexpr = BLOCKS.k
    x = Operands(q, k, v, do, lse2, delta)
    H, T, H_kv, S = q.shape[1], q.shape[2], k.shape[1], k.shape[2]
    parts = n_parts >> 2
    i_diagonal, i_part, i_bh = tl.program_id(0) // parts, tl.program_id(0) % parts, tl.program_id(1)
    i_b, i_h = i_bh // H, i_bh % H
    pos = locate(T, S, inputs, scalars, i_b, i_bh, 1)
    shift = ((first >> 2) + i_diagonal) * BM  # i_m - i_n
    total = tl.zeros([BM, BN], tl.float32)
    n_start = tl.cdiv(tl.maximum(-shift, 0), BN)
    n_end = tl.cdiv(tl.minimum(S, T - shift), BN)
    n_each = tl.cdiv(tl.maximum(n_end - n_start, 0), parts)
    n_start += i_part * n_each
    for i_tile in tl.range(n_start, tl.minimum(n_start + n_each, n_end)):
        i_n = i_tile * BN
        b_rows = load_queries(x, i_b, i_h, i_n + shift, BLOCKS, MODE)
        b_kv = load_keys(x, i_b, i_h // (H // H_kv), i_n, BLOCKS, MODE)
        b_ds, seen, result = tile_gradients(
            b_rows, b_kv, i_b, i_h, i_n + shift, i_n, inputs, scalars, pos, BLOCKS, MODE
        )
        total += times_weight(b_ds, seen, result, NUMBER)
    o_n = tl.arange(0, BM)[:, None] - tl.arange(0, 2 * BN)[None, :] + (BN - 1)  # along the diagonals
    b_skewed = tl.gather(total, tl.minimum(tl.maximum(o_n, 0), BN - 1), 1)
    b_sum = tl.sum(tl.where((o_n >= 0) & (o_n < BN), b_skewed, 0.0), 0)
    o_sum = (tl.cast(i_bh, tl.int64) * tl.num_programs(0) + tl.program_id(0)) * (2 * BN)
    tl.store(sums + o_sum + tl.arange(0, 2 * BN), b_sum)


@triton.jit
def pairs_kernel(q, k, v, do, lse2, delta, terms, inputs, scalars, first, CONFIG: tl.constexpr):
    """terms (B, H, rows, S) of the queries from `first`, which has 4 x + 2 for x. Grid: tiles, tiles of keys, B x H."""
    BLOCKS: tl.constexpr = CONFIG.blocks
    MODE: tl.constexpr = CONFIG.mode
    NUMBER: tl.constexpr = CONFIG.numbers[0]
    BM: tl.constexpr = BLOCKS.q
    BN: tl.constexpr = BLOCKS.k
    x = Operands(q, k, v, do, lse2, delta)
    H, T, H_kv, S = q.shape[1], q.shape[2], k.shape[1], k.shape[2]
    i_row, i_n, i_bh = tl.program_id(0) * BM, tl.program_id(1) * BN, tl.program_id(2)
    i_m, i_b, i_h = (first >> 2) + i_row, i_bh // H, i_bh % H
    pos = locate(T, S, inputs, scalars, i_b, i_bh, 1)
    b_rows = load_queries(x, i_b, i_h, i_m, BLOCKS, MODE)
    b_kv = load_keys(x, i_b, i_h // (H // H_kv), i_n, BLOCKS, MODE)
    b_ds, seen, result = tile_gradients(b_rows, b_kv, i_b, i_h, i_m, i_n, inputs, scalars, pos, BLOCKS, MODE)
    b_terms = times_weight(b_ds, seen, result, NUMBER)
    o_n, rows = (i_n + tl.arange(0, BN))[None, :], tl.num_programs(0) * BM
    o_row = tl.cast(i_bh, tl.int64) * rows + i_row + tl.arange(0, BM)
    tl.store(terms + o_row[:, None] * S + o_n, b_terms, mask=o_n < S)


class Pass:
    """The gradients of one call's inputs."""

    def __init__(self, saved: Sequence[Tensor], call: KernelCall, steps: Steps) -> None:
        """saved: q, k, v, do, lse2 and delta of a backward, addressable."""
        q, k, v, do, lse2, delta = saved
        self.call, self.steps, self.q, self.S = call, steps, q, k.shape[2]
        (self.B, self.H, self.T, _), self.device = q.shape, q.device
        self.mode = kernel_mode(call.spec, q.shape[-1], q.dtype, call.inputs.horizons is not None)
        # Dropout numbers queries in groups of 16 and keys in groups of 64.
        narrow = q.dtype == torch.float32 or q.shape[-1] > 128
        self.blocks = Blocks(32 if narrow else 64, 64, 4, 1)
        rows, columns = self.blocks.q, self.mode.columns
        self.operands = Operands(
            tiles(q, rows, columns),
            tiles(k, self.blocks.k, columns),
            tiles(v, self.blocks.k, columns),
            tiles(do, rows, columns),
            lse2,
            delta,
        )
        self.inputs, self.scalars = kernel_inputs(call, self.T, self.S), launch_scalars(call, 1)

    def run(self, kernel: Any, grid: tuple[int, ...], target: Tensor, numbers: Sequence[int], *rest: int) -> Tensor:
        """Launch a kernel that fills `target`."""
        config = PassConfig(self.blocks, self.mode, tuple(numbers))
        # One by one: Triton 3.6 launches no tuple of descriptors.
        kernel[grid](
            *self.operands, target, self.inputs, self.scalars, *rest, CONFIG=config, **compile_options(self.blocks)
        )
        return target

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def along_rows(self, numbers: Sequence[int]) -> Tensor:
        """(numbers, B, H, T)."""
        target = self.empty(len(numbers), self.B, self.H, self.T)
        return self.run(rows_kernel, (triton.cdiv(self.T, self.blocks.q), self.B * self.H), target, numbers)

    def along_columns(self, numbers: Sequence[int]) -> Tensor:
        """(numbers, B, H, S)."""
        target = self.empty(len(numbers), self.B, self.H, self.S)
        return self.run(columns_kernel, (triton.cdiv(self.S, self.blocks.k), self.B * self.H), target, numbers)

    def by_distance(self, number: int, like: Tensor, far: Tensor | None) -> Tensor:
        """(B, H, length): the sum over all scores of one distance; the last entry is that of all further ones.

        far  (B, H) the last entry, where it is known: then tiles of further ones alone are not visited.
        """
        (BM, BN), length = self.blocks[:2], like.shape[2]
        call, score = self.call, self.call.spec.score
        layout = Layout(call.q_start, call.k_start) if call.spec.offsets else Layout()
        offset = layout.query_start(self.T, self.S) - layout.k_start
        low = visible_distances(score, layout, self.T, self.S)[0]
        # Of element (a, b) of the diagonal n the distance is (first + n) BM + a - b + offset.
        first = -((-(low - offset) + BM - 1) // BM)
        lowest = -(-self.S // BN) * BN  # of i_m - i_n
        first = max(first, -lowest // BM)
        last = (self.T - 1) // BM
        if score.window is not None:
            last = min(last, (score.window - 1 - offset + BN - 1) // BM)
        if far is not None:
            last = min(last, (low + length - 2 - offset + BN - 1) // BM)
        count = max(last - first + 1, 1)
        parts = max(1, min(self.S // (8 * BN), MOST_PROGRAMS // (count * self.B * self.H)))
        target = self.empty(self.B, self.H, count, parts, 2 * BN)
        self.run(diagonals_kernel, (count * parts, self.B * self.H), target, [number], 4 * first + 2, 4 * parts + 2)
        by_tile = target.sum(3, dtype=torch.float64)
        sums = by_tile.new_zeros(self.B, self.H, count * BM + 2 * BN)
        for start in range(0, 2 * BN, BM):  # parts of BM entries, each added to the diagonal it belongs to
            sums[..., start : start + count * BM] += by_tile[..., start : start + BM].flatten(2)
        # sums[x] is of the distance first BM - (BN - 1) + x + offset.
        shift = low - (first * BM - (BN - 1) + offset)
        sums = torch.nn.functional.pad(sums, (-shift, max(0, length + shift - sums.shape[-1])))
        far = sums[..., length - 1 :].sum(-1) if far is None else far
        return torch.cat([sums[..., : length - 1], far[..., None]], -1)

    def by_pair(self, number: int, like: Tensor, table: int | None) -> Tensor:
        """The gradient of values of pairs (B or 1, H or 1, T, S), or of a table."""
        rows = max(1, WRITTEN // (self.B * self.H * self.S * self.blocks.q)) * self.blocks.q
        total = torch.zeros(like.shape, dtype=torch.float64 if table is not None else torch.float32, device=self.device)
        for start in range(0, self.T, rows):
            n = triton.cdiv(min(rows, self.T - start), self.blocks.q)
            terms = self.empty(self.B, self.H, n * self.blocks.q, self.S)
            grid = (n, triton.cdiv(self.S, self.blocks.k), self.B * self.H)
            self.run(pairs_kernel, grid, terms, [number], 4 * start + 2)
            terms = terms[:, :, : self.T - start]
            if table is not None:
                total += sum_of_entries(terms, self.index(table, like, start, terms.shape[2]), list(like.shape))
            else:
                total[:, :, start : start + terms.shape[2]] = summed(terms, like)
        return total

    def index(self, table: int, like: Tensor, start: int, rows: int) -> list[Tensor]:
        """The entries of a table that the scores of some queries read."""
        call = self.call
        layout = Layout(call.q_start, call.k_start) if call.spec.offsets else Layout()
        i, j = positions(layout, self.T, self.S, self.device)
        low, high = visible_distances(call.spec.score, layout, self.T, self.S)
        i = i[start : start + rows, None]
        j = torch.minimum(torch.maximum(j, i - high), i - low)
        b, h = (torch.arange(size, device=self.device) for size in (self.B, self.H))
        leaves = {"i": i, "j": j, "h": h.view(-1, 1, 1), "b": b.view(-1, 1, 1, 1)}
        _, program = self.steps.tables[table]
        index = full_index(like, run(program, ProgramInputs(leaves, torch.float32, [], [])), leaves["b"])
        return list(torch.broadcast_tensors(*index)) if index else []


def summed(x: Tensor, like: Tensor) -> Tensor:
    """x (B, H, ...) summed over the batch and the heads where `like` has one for all."""
    for axis in (0, 1):
        if like.shape[axis] == 1 and x.shape[axis] > 1:  # else a sum would copy gradients of all pairs, in fp64
            x = x.sum(axis, keepdim=True, dtype=torch.float64)
    return x


def learned_gradients(saved: Sequence[Tensor], gradients: Gradients, call: KernelCall) -> list[Tensor]:
    """The gradients of the inputs `call.spec.learned`, in this order.

    saved      q, k, v, do and lse2, addressable
    gradients  the results of the backward of q, k and v, with delta
    """
    spec, steps = call.spec, call.spec.score.steps()
    if not spec.learned:
        return []
    assert steps is not None
    inputs = call.inputs.formula
    if saved[0].numel() == 0 or saved[1].numel() == 0 or kernel_mode(spec, 1, saved[0].dtype).formula is None:
        return [torch.zeros_like(inputs[k]) for k in spec.learned]
    entering = written(spec.score).entering
    # Summands that are the same along a row cancel in the softmax.
    found = {k: torch.zeros_like(inputs[k]) for k in spec.learned if k not in entering}
    # The backward gives the gradient of a value that is the only input of a score besides s.
    of_scores = gradients.sums if added_by(spec.score) == "column" else gradients.ds
    if of_scores is not None:
        found.update(dict.fromkeys(entering.intersection(spec.learned), of_scores))
    stages = {
        k: steps.hoisted[k][0] if k < len(steps.hoisted) else "table"
        for k in spec.learned
        if k in entering and k not in found
    }
    if stages:
        assert gradients.delta is not None
        found.update(by_second_pass(Pass((*saved, gradients.delta), call, steps), stages, gradients.sums))
    return [
        (found[k] if stages.get(k) in ("pair", "table") else summed(found[k], inputs[k])).to(inputs[k].dtype)
        for k in spec.learned
    ]


def by_second_pass(work: Pass, stages: dict[int, str], sums: Tensor | None) -> dict[int, Tensor]:
    """The gradients of these inputs, not yet summed over the sequences and heads that share them."""
    found = {}
    along = {k for k, stage in stages.items() if stage in ("head", "row")}
    if along:
        for k, x in zip(sorted(along), work.along_rows(sorted(along)), strict=True):
            found[k] = x.sum(-1, keepdim=True, dtype=torch.float64) if stages[k] == "head" else x
    columns = sorted(k for k, stage in stages.items() if stage == "column")
    if columns:
        found.update(zip(columns, work.along_columns(columns), strict=True))
    for k, stage in stages.items():
        like = work.call.inputs.formula[k]
        if stage == "distance":
            found[k] = work.by_distance(k, like, None if sums is None else sums.sum(-1, dtype=torch.float64))
        elif stage in ("pair", "table"):
            found[k] = work.by_pair(k, like, k - len(work.steps.hoisted) if stage == "table" else None)
    return found
