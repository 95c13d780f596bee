"""Flash-decoding in Triton (Dao, Haziza, Massa, Sizov 2023): the keys of a sequence are shared out over programs.

    decode_kernel   splits of the keys of one sequence and key head       m, l and the unnormalised o of each row
    join_kernel     one row, over all splits                             out and lse

The query heads that share a key head, and the new tokens, are rows of one tile, so keys and values are read once. A
program carries m, l and o over its keys as the forward kernel does (forward.py), and the join is theirs:

    out = sum of exp(m_i - M) o_i / sum of exp(m_i - M) l_i        M = max of m_i

Splits lie at fixed positions, whatever the batch and the capacity, and are added up in their order: a sequence has the
same result, to the bit, whatever other sequences there are, contiguous as in pages. They are short at first, as there
are few, and grow. Where there are more than keep the GPU busy, a program walks over several, in one loop.
Lengths are read on the device; programs behind a sequence's end leave at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gpu import NAMESPACE
from .configs import Extras, Mode, Options
from .score import (
    LOG2_E,
    Positions,
    alibi_bias,
    change_scores,
    key_interval,
    log2_factor,
    seen_keys,
    soft_cap_tanh,
)
from .tiles import dot, kernel_mode, strided

# Split i begins FIRST * ((i - RUN * level) << level) keys after the first visible tile, level = i // RUN - 1 within 0
# and LEVELS: 2 RUN splits of FIRST keys, RUN each of twice as many, four times as many and so on, then no longer ones.
FIRST = tl.constexpr(128)
RUN = tl.constexpr(8)
LEVELS = tl.constexpr(4)  # as many as `splits_of` has
CHAIN = tl.constexpr(16)  # columns of fp32 products that are added up one after the other
JOINED = tl.constexpr(64)  # splits that the join reads at a time, however many there are: sums keep their order
JOINED_COLUMNS = tl.constexpr(32)  # of a program of the join
MAX_ROWS = 32  # of a tile of queries: more do not fit the registers
MIN_ROWS = 16  # of a matrix instruction


class Blocks(NamedTuple):
    """Rows of a query tile, rows of a key tile, warps of a program, tiles in flight."""

    q: int
    k: int
    warps: int
    stages: int


class Partial(NamedTuple):
    """What programs leave for the join: o (B H_kv, n_splits, rows, columns), m and l without columns, all fp32.

    Rows are those of a key head's queries, in the order of decode_kernel, and columns D, rounded up: the address of an
    element is then one sum in the kernel, and costs no registers.
    """

    o: Tensor
    m: Tensor
    l: Tensor


@triton.jit
def locate_rows(i_b, i_n, p_pages, n_first, n_end, PAGE: tl.constexpr, ROWS: tl.constexpr):
    """The place (row or page) and slot of the positions i_n to i_n + ROWS, and which lie within n_first and n_end.

    A page's slots keep 32 bits, which spares registers.
    """
    o_n = i_n + tl.arange(0, ROWS)
    m_n = (o_n >= n_first) & (o_n < n_end)
    if PAGE is None:
        o_place, o_slot = tl.cast(i_b, tl.int64), o_n.to(tl.int64)
    elif PAGE >= ROWS:  # the tile lies in one page
        o_place, o_slot = tl.load(p_pages + i_n // PAGE).to(tl.int64), o_n % PAGE
    else:
        o_place, o_slot = tl.load(p_pages + o_n // PAGE, mask=m_n, other=0).to(tl.int64)[:, None], o_n % PAGE
    return o_place, o_slot[:, None], m_n[:, None]


@triton.jit
def load_rows(x, i_h, o_place, o_slot, m_n, COLUMNS: tl.constexpr):
    """The keys or values at places and slots: (rows, COLUMNS), zero where m_n is false."""
    o_d = tl.arange(0, COLUMNS)[None, :]
    p_x = x.pointer + tl.cast(i_h, tl.int64) * x.stride_h + o_place * x.stride_b
    return tl.load(p_x + o_slot * x.stride_t + o_d, mask=m_n & (o_d < x.shape[3]), other=0.0)


@triton.jit
def scores(b_q, b_k, MODE: tl.constexpr):
    """b_q b_k^T in fp32.

    On a GPU a product of fp32 adds up one column after the other. A single chain of them is off by more than the sums
    of a product with one row, which are trees; so there are several, and their sum is a tree.
    """
    if MODE.exact:
        BM: tl.constexpr = b_q.shape[0]
        BN: tl.constexpr = b_k.shape[0]
        N: tl.constexpr = MODE.columns // CHAIN
        b_q = b_q.reshape(BM, N, CHAIN).permute(1, 0, 2)
        b_k = b_k.reshape(BN, N, CHAIN).permute(1, 2, 0)
        b_s = tl.sum(dot(b_q, b_k, None, MODE), 0)
    else:
        b_s = dot(b_q, b_k.T, None, MODE)
    return b_s


@triton.jit
def store_split(partial, i_row, o_row, m_row, m, l, o, COLUMNS: tl.constexpr):
    """Write m, l and o of a split, whose rows begin at i_row of `partial`."""
    tl.store(partial.m + i_row + o_row, m, mask=m_row)
    tl.store(partial.l + i_row + o_row, l, mask=m_row)
    o_o = o_row[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(partial.o + i_row * COLUMNS + o_o, o, mask=m_row[:, None])


@triton.jit
def split_start(i_split):
    """Where a split begins, in keys."""
    level = min(max(i_split // RUN - 1, 0), LEVELS)
    return FIRST * ((i_split - RUN * level) << level)


@triton.jit
def splits_of(keys):
    """How many splits it takes for the first `keys` keys: the inverse of split_start, rounded up."""
    units = (keys + FIRST - 1) // FIRST
    runs = max(units - 1, 0) // RUN
    two, four, eight, sixteen = min(runs // 2, 1), min(runs // 4, 1), min(runs // 8, 1), min(runs // 16, 1)
    longest = 1 + two + 2 * four + 4 * eight + 8 * sixteen  # of these splits, in units
    return RUN * (two + four + eight + sixteen) + (units + longest - 1) // longest


@triton.jit(do_not_specialize=["G", "T", "capacity", "n_pages", "n_splits", "program_keys"])
def decode_kernel(
    q, k, v, out, p_lse, partial, p_lengths, p_pages, extras, scale_log2, G, T, capacity, n_pages, n_splits,
    program_keys,
    PAGE: tl.constexpr, BLOCKS: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Some splits of the keys for one tile of rows. Grid: key heads x tiles of rows, sequences, groups of splits.

    A group is the splits of `program_keys` keys, or one split where that is 0. The last ones come first: they are the
    longest, and short ones fill what they leave idle at the end. `partial` is None where there is one split: the
    program then writes out and lse itself.
    """
    BM: tl.constexpr = BLOCKS.q
    BN: tl.constexpr = BLOCKS.k
    BD: tl.constexpr = MODE.columns
    STAGES: tl.constexpr = BLOCKS.stages
    i_b, i_group = tl.program_id(1), tl.num_programs(2) - 1 - tl.program_id(2)
    n_m = tl.cdiv(G * T, BM)
    i_kv, i_m = tl.program_id(0) // n_m, tl.program_id(0) % n_m * BM
    H = tl.num_programs(0) // n_m * G
    i_first = tl.where(program_keys == 0, i_group, splits_of(i_group * program_keys))
    i_end = tl.where(program_keys == 0, i_group + 1, splits_of((i_group + 1) * program_keys))
    i_end = tl.minimum(i_end, n_splits)

    # Rows are tokens, and within a token the heads of the group.
    o_row = i_m + tl.arange(0, BM)
    o_t, o_h, m_row = o_row // G, i_kv * G + o_row % G, o_row < G * T
    length = tl.minimum(tl.load(p_lengths + i_b), capacity)
    at = Positions(T, length, length - T, 0, 0, 0, 0)
    n_base, n_full_start, n_full_end, n_end = seen_keys(i_m // G, at, BLOCKS, MODE)
    first, end = key_interval(o_t, at, MODE)
    n_first = tl.maximum(i_m // G + at.offset - (MODE.window - 1), 0) if MODE.window else 0
    i_left = (tl.cast(i_b, tl.int64) * tl.num_programs(0) // n_m + i_kv) * n_splits  # of split 0, in Partial
    if partial is not None:
        nothing_left = (i_first > 0) & (n_base + split_start(i_first) >= n_end)
        if nothing_left:
            for i_split in range(i_first, i_end):
                tl.store(partial.m + (i_left + i_split) * (G * T) + o_row, -float("inf"), mask=m_row)
            return

    o_d = tl.arange(0, BD)
    p_q = q.pointer + tl.cast(i_b, tl.int64) * q.stride_b + o_h.to(tl.int64) * q.stride_h + o_t * q.stride_t
    b_q = tl.load(p_q[:, None] + o_d[None, :], mask=m_row[:, None] & (o_d < q.shape[3])[None, :], other=0.0)
    if MODE.sinks:
        b_sink = tl.load(extras.sinks + o_h, mask=m_row, other=0.0) * LOG2_E
    slope2 = tl.load(extras.slopes + o_h, mask=m_row, other=0.0)[:, None] * LOG2_E if MODE.alibi else None
    unit = log2_factor(scale_log2, MODE)
    if PAGE is not None:
        p_pages += tl.cast(i_b, tl.int64) * n_pages

    # All keys of a program are one loop, so that those of the next split are on their way before a split ends.
    i_split = i_first
    n_start = n_base + split_start(i_first)
    n_stop = tl.minimum(n_base + split_start(i_end), n_end)
    o = tl.zeros([BM, BD], tl.float32)
    m = tl.full([BM], -float("inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    if MODE.sinks:  # as if a key without a value had been seen before all others
        m = tl.where(i_first == 0, b_sink, m)
        l = tl.where(i_first == 0, 1.0, l)
    for i_n in tl.range(n_start, n_stop, BN, num_stages=STAGES):
        # (BM, BN)
        o_place, o_slot, m_n = locate_rows(i_b, i_n, p_pages, n_first, n_end, PAGE, BN)
        b_k = load_rows(k, i_kv, o_place, o_slot, m_n, BD)
        b_s = scores(b_q, b_k, MODE)
        b_tanh = soft_cap_tanh(b_s, scale_log2, MODE) if MODE.soft_cap is not None else None
        b_bias = None
        if MODE.alibi:
            o_own = (o_t + at.offset)[:, None]
            b_bias = alibi_bias(slope2, o_t[:, None], tl.arange(0, BN)[None, :], i_n, o_own, at, MODE)
        b_s = change_scores(b_s, b_tanh, b_bias, scale_log2, MODE) * unit
        if (i_n >= n_full_end) | (i_n < n_full_start):
            o_n = i_n + tl.arange(0, BN)
            b_s = tl.where((o_n[None, :] >= first[:, None]) & (o_n[None, :] < end[:, None]), b_s, -float("inf"))

        # (BM,) A row that has seen nothing yet has maximum -inf, and exp2(-inf - -inf) would be NaN.
        m_new = tl.maximum(m, tl.max(b_s, 1))
        m_safe = tl.where(m_new == -float("inf"), 0.0, m_new)
        alpha = tl.exp2(m - m_safe)
        m = m_new
        b_p = tl.exp2(b_s - m_safe[:, None])
        l = l * alpha + tl.sum(b_p, 1)

        # (BM, D)
        b_v = load_rows(v, i_kv, o_place, o_slot, m_n, BD)
        o = dot(b_p.to(b_v.dtype), b_v, o * alpha[:, None], MODE)

        if partial is not None:
            i_next = i_n + BN
            if (i_next >= n_stop) | (i_next >= n_base + split_start(i_split + 1)):
                store_split(partial, (i_left + i_split) * (G * T), o_row, m_row, m, l, o, BD)
                i_split += 1
                o = tl.zeros([BM, BD], tl.float32)
                m = tl.full([BM], -float("inf"), tl.float32)
                l = tl.zeros([BM], tl.float32)

    if partial is None:
        # Rows that see nothing are 0; l = 0 tells less, as scores of -inf give it too.
        l = tl.where(first < end, l, 1.0)
        o = (o / l[:, None]).to(out.dtype.element_ty)
        o_out = (tl.cast(i_b, tl.int64) * H + o_h) * T + o_t
        m_o = m_row[:, None] & (o_d < q.shape[3])[None, :]
        tl.store(out + o_out[:, None] * q.shape[3] + o_d[None, :], o, mask=m_o)
        tl.store(p_lse + o_out, (m + tl.log2(l)) / LOG2_E, mask=m_row)
    else:
        if i_split == 0:  # no keys at all; there may be a sink
            store_split(partial, i_left * (G * T), o_row, m_row, m, l, o, BD)
            i_split = 1
        for i_empty in range(i_split, i_end):  # the join reads no more of a split without keys
            tl.store(partial.m + (i_left + i_empty) * (G * T) + o_row, -float("inf"), mask=m_row)


@triton.jit(do_not_specialize=["n_splits", "H", "G", "T", "D"])
def join_kernel(
    out, p_lse, partial, p_lengths, n_splits, H, G, T, D,
    CAUSAL: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out and lse of one row from those of its splits. Grid: B x H x T, tiles of D. SPLITS is n_splits, rounded up."""
    i_row = tl.program_id(0).to(tl.int64)
    i_bh, i_t = i_row // T, i_row % T
    i_left = i_bh // G * n_splits * (G * T) + i_t * G + i_bh % G  # of split 0; that of the next is G T further on
    o_all, o_d = tl.arange(0, SPLITS), tl.program_id(1) * JOINED_COLUMNS + tl.arange(0, JOINED_COLUMNS)
    b_all = tl.load(partial.m + i_left + o_all * (G * T), mask=o_all < n_splits, other=-float("inf"))
    m = tl.max(b_all, 0)
    m_safe = tl.where(m == -float("inf"), 0.0, m)
    l = tl.zeros([JOINED], tl.float32)
    o = tl.zeros([JOINED, JOINED_COLUMNS], tl.float32)
    for i in range(0, n_splits, JOINED):
        o_i = i + tl.arange(0, JOINED)
        at = i_left + o_i.to(tl.int64) * (G * T)
        b_m = tl.load(partial.m + at, mask=o_i < n_splits, other=-float("inf"))
        seen = b_m > -float("inf")  # of the others nothing was written
        b_weight = tl.exp2(b_m - m_safe)
        l += b_weight * tl.load(partial.l + at, mask=seen, other=0.0)
        b_o = tl.load(partial.o + at[:, None] * COLUMNS + o_d[None, :], mask=seen[:, None], other=0.0)
        o += b_weight[:, None] * b_o
    length = tl.load(p_lengths + i_bh // H)
    sees = length - T + i_t >= 0 if CAUSAL else length > 0
    l_all = tl.where(sees, tl.sum(l, 0), 1.0)
    b_out = tl.sum(o, 0) / l_all
    tl.store(out + i_row * D + o_d, b_out.to(out.dtype.element_ty), mask=o_d < D)
    if tl.program_id(1) == 0:
        tl.store(p_lse + i_row, (m + tl.log2(l_all)) / LOG2_E)


def choose_blocks(rows: int, head_dim: int, mode: Mode, paged: bool) -> Blocks:
    """The blocks for a group's rows and a head size, with FIRST a multiple of their keys; timed on an H200."""
    BM = max(MIN_ROWS, min(MAX_ROWS, triton.next_power_of_2(rows)))
    if mode.exact:
        return Blocks(BM, 16, 8, 2 if head_dim <= 128 else 1)
    if head_dim > 128:
        return Blocks(BM, 64, 4, 2)
    # Two warps have no registers left for more rows or changed scores. A page's number is loaded a tile ahead of the
    # page; all else is the same, or pages would give other bits.
    more = BM > MIN_ROWS or mode.soft_cap is not None or mode.alibi
    return Blocks(BM, 64, 4 if more and head_dim > 64 else 2, 4 if paged else 2)


def keys_per_program(keys: int, heads: int) -> int:
    """How many keys a program walks over where each of `heads` sees `keys`; 0: one split. Multiples of all splits.

    On an H200 programs of one length were fastest where they keep all multiprocessors busy, with four on each.
    """
    return 2048 if heads * triton.cdiv(keys, 2048) >= 512 else 0


def run_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    pages: Tensor | None,
    slopes: Tensor | None,
    sinks: Tensor | None,
    causal: bool,
    scale: float,
    tf32: bool,
    window: int | None,
    soft_cap: float | None,
) -> tuple[Tensor, Tensor]:
    """q (B, H, T, D) against a Cache (k, v, lengths, pages) to out (B, H, T, D) and lse (B, H, T).

    slopes, sinks  (H,) fp32, or None
    """
    (B, H, T, D), H_kv = q.shape, k.shape[1]
    out, lse = q.new_empty(B, H, T, D), q.new_empty(B, H, T, dtype=torch.float32)
    extras = Extras(slopes=slopes, sinks=sinks)
    mode = kernel_mode(q, Options(causal, scale, 0, tf32, window, soft_cap), extras)
    G = H // H_kv
    blocks = choose_blocks(G * T, D, mode, pages is not None)
    capacity = k.shape[2] * (1 if pages is None else pages.shape[1])
    visible = capacity if window is None else min(capacity, window + T - 1 + blocks.k - 1)
    n_m = triton.cdiv(G * T, blocks.q)
    n_splits = max(1, int(splits_of.fn(visible)))
    program_keys = keys_per_program(visible, B * H_kv * n_m)
    n_groups = triton.cdiv(visible, program_keys) if program_keys else n_splits
    partial = None
    if n_splits > 1:
        shape = (B * H_kv, n_splits, G * T)
        partial = Partial(*(q.new_empty(*shape, *last, dtype=torch.float32) for last in ((mode.columns,), (), ())))
    with torch.cuda.device_of(q):
        decode_kernel[(H_kv * n_m, B, n_groups)](
            *(strided(x) for x in (q, k, v)),
            out,
            lse,
            partial,
            lengths,
            pages,
            extras,
            scale * LOG2_E.value,
            G,
            T,
            capacity,
            None if pages is None else pages.stride(0),
            n_splits,
            program_keys,
            PAGE=None if pages is None else k.shape[2],
            BLOCKS=blocks,
            MODE=mode,
            num_warps=blocks.warps,
        )
        if partial is not None:
            join_kernel[(B * H * T, triton.cdiv(D, JOINED_COLUMNS.value))](
                *(out, lse, partial, lengths, n_splits, H, G, T, D),
                CAUSAL=causal,
                SPLITS=triton.next_power_of_2(n_splits),
                COLUMNS=mode.columns,
                num_warps=4,
            )
    return out, lse


flash_decode = torch.library.custom_op(f"{NAMESPACE}::flash_decode", run_decode, mutates_args=())


@flash_decode.register_fake
def _(q, *_):
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.float32)
