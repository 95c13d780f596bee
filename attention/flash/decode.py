"""Attention to a cache: flash-decoding (Dao, Haziza, Massa, Sizov 2023), programs that share a sequence's keys.

    decode_kernel   a split of the keys of one sequence and key/value head    m, l and the unnormalised o of each row
    join_kernel     one row, over all splits                                  out and lse

The query heads that share a key/value head, and the new tokens, are rows of one tile, so keys and values are read once.
A program carries m, l and o over its keys as the forward kernel does (forward.py), and the join combines them:

    out = sum of exp(m_i - M) o_i / sum of exp(m_i - M) l_i        M = max of m_i

The bounds of a sequence's splits depend only on its length, and splits are added in order: a sequence has bitwise
the same result beside any other sequences, contiguous or in pages.
Lengths are read on the device; programs beyond a sequence's end return at once.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .. import gpu
from ..decode.cache import Cache
from ..gpu import INTERPRET, custom_operator
from ..layout import Layout
from ..scores.alibi import alibi_bias
from ..scores.soft_cap import soft_cap_tanh
from ..spec import Inputs, Spec
from .call import KernelCall, Mode
from .formula import Place, kernel_inputs, with_row_terms
from .launch import UNIT, launch, replayed
from .score import LOG2_E, Positions, change_scores, key_interval, log2_factor, seen_keys
from .tiles import dot, kernel_mode, strided

STEP = tl.constexpr(64)  # keys: splits begin at multiples of it
CHAIN = tl.constexpr(16)  # columns whose fp32 products are added one after the other
JOINED_COLUMNS = tl.constexpr(32)  # of a program of the join


class Results(NamedTuple):
    """out (B, H, T, D) and lse (B, H, T), both contiguous, and the Partial results of splits; None: there is one."""

    out: Any
    lse: Any
    partial: Any


class DecodeInputs(NamedTuple):
    """The tensors of a call besides q, k and v: the cache's lengths and pages, and the Inputs of the score."""

    lengths: Any
    pages: Any
    inputs: Any


class Partial(NamedTuple):
    """Results of the splits, for the join: o (B H_kv, n_splits, rows, columns), m and l without columns, all fp32.

    Rows are the queries of a key/value head, in the order of decode_kernel. Columns are D, rounded up: the address of
    an element is then one sum in the kernel, and costs no registers.
    """

    o: Tensor
    m: Tensor
    l: Tensor


@triton.jit
def locate_rows(i_b, i_n, p_pages, n_first, n_end, PAGE: tl.constexpr, ROWS: tl.constexpr):
    """The place (row or page) and slot of the positions i_n to i_n + ROWS, and the mask of n_first to n_end.

    Slots within a page have 32 bits, which saves registers.
    """
    o_n = i_n + tl.arange(0, ROWS)
    m_n = (o_n >= n_first) & (o_n < n_end)
    if PAGE is None:
        o_place, o_slot = tl.cast(i_b, tl.int64), o_n.to(tl.int64)
    elif PAGE >= ROWS:  # the tile is in one page
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

    On a GPU a product of fp32 values adds one column after the other. The error of a single chain is larger than that
    of a product with one row, whose sums are trees. So there are several chains, and their sum is a tree.
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
def split_bounds(i_split, n_splits, n_base, n_end):
    """(start, end) of a split's keys, end not included. The splits cover all keys up to n_end."""
    n_filled = tl.maximum(tl.minimum(tl.cdiv(n_end - n_base, UNIT), n_splits), 1)
    n_steps = tl.cdiv(n_end - n_base, STEP)
    start = n_base + i_split * n_steps // n_filled * STEP
    return start, tl.minimum(n_base + (i_split + 1) * n_steps // n_filled * STEP, n_end)


@triton.jit(do_not_specialize=["G", "T", "capacity", "n_pages"])
def decode_kernel(
    q, k, v, results, tensors, scale_log2, G, T, capacity, n_pages, BLOCKS: tl.constexpr, MODE: tl.constexpr
):
    """One split of the keys for one tile of rows. Grid: key/value heads x tiles of rows, splits, sequences.

    Without partial results the program writes out and lse itself.
    """
    PAGE: tl.constexpr = BLOCKS.page
    if PAGE is None:  # of the keys as a replay has them: a cache may be made anew for each token
        capacity = k.shape[2]
    BM: tl.constexpr = BLOCKS.q
    BN: tl.constexpr = BLOCKS.k
    BD: tl.constexpr = MODE.columns
    STAGES: tl.constexpr = BLOCKS.stages
    if BLOCKS.early:
        gdc_launch_dependents()
        gdc_wait()
    # Sequences come last: programs that run at the same time read few of them, and so few pages of the GPU's memory.
    i_b, i_split, n_splits = tl.program_id(2), tl.program_id(1), tl.num_programs(1)
    n_m = tl.cdiv(G * T, BM)
    i_kv, i_m = tl.program_id(0) // n_m, tl.program_id(0) % n_m * BM
    H = tl.num_programs(0) // n_m * G

    # Rows are tokens, and within a token the heads of the group.
    o_row = i_m + tl.arange(0, BM)
    o_t, o_h, m_row = o_row // G, i_kv * G + o_row % G, o_row < G * T
    length = tl.minimum(tl.load(tensors.lengths + i_b), capacity)
    pos = Positions(T, length, length - T, 0, 0, 0, 0, 0)
    n_base, n_full_start, n_full_end, n_end = seen_keys(i_m // G, pos, BLOCKS, MODE)
    first, end = key_interval(o_t, pos, MODE)
    n_first = tl.maximum(i_m // G + pos.offset - (MODE.window - 1), 0) if MODE.window else 0
    n_start, n_stop = split_bounds(i_split, n_splits, n_base, n_end)
    i_left = ((tl.cast(i_b, tl.int64) * tl.num_programs(0) // n_m + i_kv) * n_splits + i_split) * (G * T)  # in Partial
    if results.partial is not None:
        nothing_left = (i_split > 0) & (n_start >= n_end)
        if nothing_left:  # the join uses only m of it
            tl.store(results.partial.m + i_left + o_row, -float("inf"), mask=m_row)
            return

    o_d = tl.arange(0, BD)
    p_q = q.pointer + tl.cast(i_b, tl.int64) * q.stride_b + o_h.to(tl.int64) * q.stride_h + o_t * q.stride_t
    b_q = tl.load(p_q[:, None] + o_d[None, :], mask=m_row[:, None] & (o_d < q.shape[3])[None, :], other=0.0)
    slope2 = tl.load(tensors.inputs.slopes + o_h, mask=m_row, other=0.0)[:, None] * LOG2_E if MODE.alibi else None
    if MODE.formula is not None:
        head = MODE.formula.head(tensors.inputs.formula, i_b, o_h[:, None])
        row = MODE.formula.row(tensors.inputs.formula, i_b, o_h[:, None], o_t[:, None], T)
    factor = log2_factor(scale_log2, MODE)
    p_pages = tensors.pages
    if PAGE is not None:
        p_pages += tl.cast(i_b, tl.int64) * n_pages

    o = tl.zeros([BM, BD], tl.float32)
    m = tl.full([BM], -float("inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    if MODE.sinks:  # as if a key without a value had been seen before all others
        m = tl.where(i_split == 0, tl.load(tensors.inputs.sinks + o_h, mask=m_row, other=0.0) * LOG2_E, m)
        l = tl.where(i_split == 0, 1.0, l)
    for i_n in tl.range(n_start, n_stop, BN, num_stages=STAGES):
        # (BM, BN)
        o_place, o_slot, m_n = locate_rows(i_b, i_n, p_pages, n_first, n_end, PAGE, BN)
        b_k = load_rows(k, i_kv, o_place, o_slot, m_n, BD)
        b_s = scores(b_q, b_k, MODE)
        b_tanh = soft_cap_tanh(b_s, scale_log2, MODE) if MODE.soft_cap is not None else None
        b_bias = None
        if MODE.alibi:
            o_own = (o_t + pos.offset)[:, None]
            b_bias = alibi_bias(slope2, o_t[:, None], tl.arange(0, BN)[None, :], i_n, o_own, pos, MODE)
        if MODE.formula is not None:
            f_given, o_heads = tensors.inputs.formula, o_h[:, None]
            place = Place(i_b, o_heads, o_t[:, None], (i_n + tl.arange(0, BN))[None, :], pos)
            column = MODE.formula.column(f_given, i_b, o_heads, 0, place.o_n, capacity)
            scale = scale_log2 / LOG2_E
            b_s = MODE.formula.value(b_s, scale, head, row, column, f_given, place, MODE.exact) * factor
        else:
            b_s = change_scores(b_s, b_tanh, b_bias, scale_log2, MODE) * factor
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

    if results.partial is None:
        # Rows that see no key are zero; l = 0 is no test, as scores of -inf give it too.
        l = tl.where(first < end, l, 1.0)
        o = (o / l[:, None]).to(results.out.dtype.element_ty)
        o_out = (tl.cast(i_b, tl.int64) * H + o_h) * T + o_t
        m_o = m_row[:, None] & (o_d < q.shape[3])[None, :]
        tl.store(results.out + o_out[:, None] * q.shape[3] + o_d[None, :], o, mask=m_o)
        tl.store(results.lse + o_out, (m + tl.log2(l)) / LOG2_E, mask=m_row)
    else:
        tl.store(results.partial.m + i_left + o_row, m, mask=m_row)
        tl.store(results.partial.l + i_left + o_row, l, mask=m_row)
        tl.store(results.partial.o + i_left * BD + o_row[:, None] * BD + o_d[None, :], o, mask=m_row[:, None])


@triton.jit(do_not_specialize=["n_splits", "H", "G", "T", "D"])
def join_kernel(
    results, p_lengths, n_splits, H, G, T, D,
    CAUSAL: tl.constexpr, COLUMNS: tl.constexpr, JOINED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out and lse of one row from those of its splits, JOINED at a time. Grid: B x H x T, tiles of D.

    EARLY: launched while decode_kernel still runs, it waits for that kernel's results.
    """
    i_row = tl.program_id(0).to(tl.int64)
    i_bh, i_t = i_row // T, i_row % T
    i_left = i_bh // G * n_splits * (G * T) + i_t * G + i_bh % G  # of split 0; that of the next is G T further on
    o_d = tl.program_id(1) * JOINED_COLUMNS + tl.arange(0, JOINED_COLUMNS)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    length = tl.load(p_lengths + i_bh // H)
    m = -float("inf")
    l = tl.zeros([JOINED], tl.float32)
    o = tl.zeros([JOINED, JOINED_COLUMNS], tl.float32)
    for i in range(0, n_splits, JOINED):
        o_i = i + tl.arange(0, JOINED)
        m_i = o_i < n_splits
        o_left = i_left + o_i.to(tl.int64) * (G * T)
        b_m = tl.load(results.partial.m + o_left, mask=m_i, other=-float("inf"))
        b_l = tl.load(results.partial.l + o_left, mask=m_i, other=0.0)
        b_o = tl.load(results.partial.o + o_left[:, None] * COLUMNS + o_d[None, :], mask=m_i[:, None], other=0.0)
        m_new = tl.maximum(m, tl.max(b_m, 0))
        m_safe = tl.where(m_new == -float("inf"), 0.0, m_new)
        alpha, b_weight = tl.exp2(m - m_safe), tl.exp2(b_m - m_safe)
        m = m_new
        seen = b_m > -float("inf")  # the others' l and o were not written
        l = l * alpha + b_weight * tl.where(seen, b_l, 0.0)
        o = o * alpha + b_weight[:, None] * tl.where(seen[:, None], b_o, 0.0)
    sees = length - T + i_t >= 0 if CAUSAL else length > 0
    l_all = tl.where(sees, tl.sum(l, 0), 1.0)
    b_out = tl.sum(o, 0) / l_all
    tl.store(results.out + i_row * D + o_d, b_out.to(results.out.dtype.element_ty), mask=o_d < D)
    if tl.program_id(1) == 0:
        tl.store(results.lse + i_row, (m + tl.log2(l_all)) / LOG2_E)


MAX_ROWS = 32  # of a tile of queries: more do not fit the registers
MIN_ROWS = 16  # of a matrix instruction
# The join reads all splits at a time, up to MAX_JOINED. A larger power of two only adds zeros at the end of its sums,
# so that room for more splits does not change their order.
MIN_JOINED, MAX_JOINED = 8, 64


class DecodeBlocks(NamedTuple):
    """Rows of a query tile, rows of a key tile, warps of a program, stages of its pipeline.

    programs    of one sequence, over all heads: the 132 multiprocessors of an H200 run them at a time. The same on
                every GPU, so that all cut a sequence into the same splits
    page        slots of a page; None: contiguous
    early       whether a kernel is launched while the one before it runs, and waits for its results
    """

    q: int
    k: int
    warps: int
    stages: int
    programs: int = 264
    page: int | None = None
    early: bool = False


def choose_blocks(rows: int, head_dim: int, mode: Mode) -> DecodeBlocks:
    """The blocks for a group's rows and a head size, timed on an H200. STEP is a multiple of their keys."""
    BM = max(MIN_ROWS, min(MAX_ROWS, triton.next_power_of_2(rows)))
    if mode.exact:
        return DecodeBlocks(BM, 16, 8, 2 if head_dim <= 128 else 1)
    if head_dim > 128:
        return DecodeBlocks(BM, 64, 4, 2)
    return DecodeBlocks(BM, 64, 4, 2, programs=384) if head_dim > 64 else DecodeBlocks(BM, 64, 2, 2, programs=1056)


def run_decode(q: Tensor, cache: Sequence[Tensor], inputs: Sequence[Tensor], spec: Spec) -> tuple[Tensor, Tensor]:
    """q (B, H, T, D) against a Cache to out (B, H, T, D) and lse (B, H, T).

    cache   k, v, lengths and pages, as `present` gives them
    inputs  slopes and sinks, (H,) fp32, where the score has them, and a formula's values
    """
    return replayed(compute_decode, (q, *cache, *inputs), (spec, len(cache)), grows=len(cache) == 3 and not inputs)


def present(cache: Sequence[Tensor | None]) -> list[Tensor]:
    """k, v, lengths and, where there are some, pages."""
    return [x for x in cache if x is not None]


def compute_decode(tensors: Sequence[Tensor], spec: Spec, n: int, n_results: int = 2) -> tuple[Tensor, ...]:
    """`run_decode`'s first results; tensors are q, the n of the Cache and the inputs."""
    q, inputs = tensors[0], tensors[n + 1 :]
    k, v, lengths, pages = Cache(*tensors[1 : n + 1])
    (B, H, T, D), H_kv = q.shape, k.shape[1]
    out, lse = q.new_empty(B, H, T, D), q.new_empty(B, H, T, dtype=torch.float32)
    call = KernelCall(spec, Inputs.of(spec, inputs))
    mode, window = kernel_mode(spec, D, q.dtype), spec.score.window
    G = H // H_kv
    blocks = choose_blocks(G * T, D, mode)
    capacity = k.shape[2] * (1 if pages is None else pages.shape[1])
    visible = capacity if window is None else min(capacity, window + T - 1 + blocks.k - 1)
    n_m = triton.cdiv(G * T, blocks.q)
    n_splits = max(1, min(blocks.programs // (H_kv * n_m), triton.cdiv(visible, UNIT.value)))
    # Each kernel is launched while the one before it runs, and waits for it: programmatic dependent launch.
    early = not INTERPRET.value and gpu.capability(q.device) >= (9, 0)
    partial = None
    if n_splits > 1:
        shape = (B * H_kv, n_splits, G * T)
        partial = Partial(*(q.new_empty(*shape, *last, dtype=torch.float32) for last in ((mode.columns,), (), ())))
    with torch.cuda.device_of(q):
        launch(
            decode_kernel,
            (H_kv * n_m, n_splits, B),
            *(strided(x) for x in (q, k, v)),
            Results(out, lse, partial),
            DecodeInputs(lengths, pages, kernel_inputs(call, T, capacity, Layout(lengths=lengths))),
            spec.scale * LOG2_E.value,
            G,
            T,
            *(None, None) if pages is None else (capacity, pages.stride(0)),
            BLOCKS=blocks._replace(page=None if pages is None else k.shape[2], early=early),
            MODE=mode,
            num_warps=blocks.warps,
            launch_pdl=early,
            enable_fp_fusion=True,
        )
        if partial is not None:
            launch(
                join_kernel,
                (B * H * T, triton.cdiv(D, JOINED_COLUMNS.value)),
                *(Results(out, lse, partial), lengths, n_splits, H, G, T, D),
                CAUSAL=spec.score.causal,
                COLUMNS=mode.columns,
                JOINED=max(MIN_JOINED, min(MAX_JOINED, triton.next_power_of_2(n_splits))),
                EARLY=early,
                num_warps=1,
                launch_pdl=early,
                enable_fp_fusion=True,
            )
    return (out, with_row_terms(lse, call))[:n_results]


def decode_from_text(
    q: Tensor, cache: Sequence[Tensor | None], inputs: Sequence[Tensor], spec: str
) -> tuple[Tensor, Tensor]:
    """`run_decode`, from the text of a Spec."""
    return run_decode(q, present(cache), inputs, Spec.read(spec))


flash_decode = custom_operator(
    "flash_decode",
    decode_from_text,
    lambda q, *_: (q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.float32)),
)
