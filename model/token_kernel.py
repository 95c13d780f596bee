"""The products of one token with a layer's weights, and all steps between them, in Triton.

    product_kernel      y = f(A n(x) + a),  y = f(A n(x) + a) (B n(x) + b),  or  y += A x + a
    projection_kernel   q, k, v = A n(x) + a, with q and k rotated; k and v go to their slots of the cache

with a norm n, matrices A and B (N, C), biases a and b. Every number of a matrix is read once, for two operations, so
the GPU's memory limits the time, and must never idle: not while a kernel starts, nor while it waits for x. So each is
launched while the one before it runs (programmatic dependent launch), and its first rows are on their way into shared
memory before it waits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from attention import gpu
from attention.decode.cache import Cache
from attention.gpu import INTERPRET
from model.positions import PositionTables

WARPS = 8
PROGRAMS = 2  # of a multiprocessor
TILE = 16 * 1024  # bytes that a program multiplies at a time
AHEAD = 80 * 1024  # bytes that are on their way into its shared memory
LONGEST_ROW = 32 * 1024  # bytes
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

WAIT = tl.constexpr("griddepcontrol.wait; // $0")
WAIT_AND_LAUNCH = tl.constexpr("griddepcontrol.wait; griddepcontrol.launch_dependents; // $0")


class Norm(NamedTuple):
    """weight and bias (C,), or None, and the number under the root."""

    weight: Any = None
    bias: Any = None
    eps: float = 0.0


class Linear(NamedTuple):
    """weight (N, C), contiguous, and bias (N,) or None; both None: there is no such matrix."""

    weight: Any
    bias: Any


class Token(NamedTuple):
    """The places of a token's queries, keys and values.

    q         (H, D)
    k, v      of the cache
    lengths   of the cache: (1,), with this token
    pages     of the cache, or None
    slots     of the cache, or of a page of it
    cos, sin  (positions, D / 2), or None
    """

    q: Any
    k: Any
    v: Any
    lengths: Any
    pages: Any
    slots: Any
    cos: Any
    sin: Any


class Form(NamedTuple):
    """The function that a kernel computes.

    C         columns of the matrices
    norm      layer or rms; None: x is taken as it is
    plus_one  the norm's weight is its difference from 1
    function  gelu, relu2 or silu; None: the identity
    adds      to what y holds
    """

    C: int
    norm: str | None = None
    plus_one: bool = False
    function: str | None = None
    adds: bool = False


class Tiles(NamedTuple):
    """How a kernel computes it.

    rows     of a tile
    columns  C, rounded up to a power of two
    stages   one more than the tiles that are on their way
    warps    of a program
    early    it is launched while the kernel before it runs
    passes   the kernel after it is launched before this one waits: all tiles are on their way, and memory is free
    """

    rows: int
    columns: int
    stages: int
    warps: int
    early: bool
    passes: bool


class Heads(NamedTuple):
    """Query heads, key/value heads, and channels of each."""

    H: int
    H_kv: int
    D: int


@triton.jit
def load_rows(p_row, m_row, FORM: tl.constexpr, TILES: tl.constexpr):
    """Rows of a matrix: (rows, columns)."""
    o_c = tl.arange(0, TILES.columns)[None, :]
    return tl.load(p_row[:, None] + o_c, mask=m_row[:, None] & (o_c < FORM.C), other=0.0)


@triton.jit
def await_input(TILES: tl.constexpr):
    """Wait until the kernel before this one has ended, and let the one after it start.

    As PTX: from Triton 3.9 on, gdc_wait in a loop keeps the compiler from pipelining it.
    """
    if TILES.early:
        tl.inline_asm_elementwise(
            WAIT if TILES.passes else WAIT_AND_LAUNCH,
            "=r",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def load_norm(norm, FORM: tl.constexpr, TILES: tl.constexpr):
    """The factors and summands of the norm's channels, in fp32: (columns,) each."""
    o_c = tl.arange(0, TILES.columns)
    b_factor, b_summand = tl.full(o_c.shape, 1.0, tl.float32), tl.full(o_c.shape, 0.0, tl.float32)
    if FORM.norm is not None:
        if norm.weight is not None:
            b_factor = tl.load(norm.weight + o_c, mask=o_c < FORM.C, other=0.0).to(tl.float32)
            if FORM.plus_one:
                b_factor += 1.0
        if norm.bias is not None:
            b_summand = tl.load(norm.bias + o_c, mask=o_c < FORM.C, other=0.0).to(tl.float32)
    return b_factor, b_summand


@triton.jit
def normalised(p_x, eps, b_factor, b_summand, FORM: tl.constexpr, TILES: tl.constexpr):
    """n(x) in fp32: (columns,)."""
    o_c = tl.arange(0, TILES.columns)
    m_c = o_c < FORM.C
    b_x = tl.load(p_x + o_c, mask=m_c, other=0.0).to(tl.float32)
    if FORM.norm is not None:
        if FORM.norm == "layer":
            b_x = tl.where(m_c, b_x - tl.sum(b_x, 0) / FORM.C, 0.0)
        b_x *= tl.rsqrt(tl.sum(b_x * b_x, 0) / FORM.C + eps)
        b_x = b_x * b_factor + b_summand
    return b_x


@triton.jit
def applied(b_x, FORM: tl.constexpr):
    """f(x), as model/mlps.py has it."""
    if FORM.function == "gelu":
        b_x = b_x * tl.sigmoid(1.5957691216057308 * (b_x + 0.044715 * b_x * b_x * b_x))
    elif FORM.function == "silu":
        b_x = b_x * tl.sigmoid(b_x)
    elif FORM.function == "relu2":
        b_x = tl.maximum(b_x, 0.0) * tl.maximum(b_x, 0.0)
    return b_x


@triton.jit
def product(b_w, b_x):
    """b_w b_x in fp32: (rows,)."""
    return tl.sum(b_w.to(tl.float32) * b_x[None, :], 1)


@triton.jit
def biased(b_y, p_bias, o_n, m_n):
    """b_y plus its rows' biases, where there are any."""
    if p_bias is not None:
        b_y += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)
    return b_y


@triton.jit
def in_pairs(b_y):
    """Even and odd numbers of b_y."""
    return tl.split(b_y.reshape(b_y.shape[0] // 2, 2))


@triton.jit
def rows_of_product(linear, i_tile, o_r, N, FORM: tl.constexpr, TILES: tl.constexpr):
    """Where rows o_r of a tile begin, and which there are."""
    o_n = i_tile * TILES.rows + o_r
    return linear.weight + o_n.to(tl.int64) * FORM.C, o_n < N


@triton.jit(do_not_specialize=["N"])
def product_kernel(p_x, norm, first, second, p_y, N, FORM: tl.constexpr, TILES: tl.constexpr):
    """y. A program has every so many-th tile of rows, at least one. Grid: programs."""
    i_first, n_programs, o_r = tl.program_id(0), tl.num_programs(0), tl.arange(0, TILES.rows)
    if TILES.passes:
        gdc_launch_dependents()
    b_factor, b_summand = load_norm(norm, FORM, TILES)
    COLUMNS: tl.constexpr = TILES.columns
    b_x = tl.zeros([COLUMNS], tl.float32)
    for i_tile in tl.range(i_first, tl.cdiv(N, TILES.rows), n_programs, num_stages=TILES.stages):
        if i_tile == i_first:
            await_input(TILES)
            b_x = normalised(p_x, norm.eps, b_factor, b_summand, FORM, TILES)
        p_row, m_row = rows_of_product(first, i_tile, o_r, N, FORM, TILES)
        b_w = load_rows(p_row, m_row, FORM, TILES)
        if second.weight is not None:
            p_row, m_row = rows_of_product(second, i_tile, o_r, N, FORM, TILES)
            b_v = load_rows(p_row, m_row, FORM, TILES)
        o_n = i_tile * TILES.rows + o_r
        m_n = o_n < N
        b_y = applied(biased(product(b_w, b_x), first.bias, o_n, m_n), FORM)
        if second.weight is not None:
            b_y *= biased(product(b_v, b_x), second.bias, o_n, m_n)
        if FORM.adds:
            tl.atomic_add(p_y + o_n, b_y, mask=m_n, sem="relaxed")
        else:
            tl.store(p_y + o_n, b_y.to(p_y.dtype.element_ty), mask=m_n)


@triton.jit
def rows_of_projection(linear, i_tile, o_r, HEADS: tl.constexpr, FORM: tl.constexpr, TILES: tl.constexpr):
    """Where rows o_r of a tile begin, and which there are. Rows 2i and 2i + 1 are the channels i and i + D / 2."""
    HALF: tl.constexpr = HEADS.D // 2
    o_pair = i_tile * (TILES.rows // 2) + o_r // 2
    o_n = o_pair // HALF * HEADS.D + o_pair % HALF + o_r % 2 * HALF
    return linear.weight + o_n.to(tl.int64) * FORM.C, o_n < (HEADS.H + 2 * HEADS.H_kv) * HEADS.D


@triton.jit
def projection_kernel(p_x, norm, linear, token, HEADS: tl.constexpr, FORM: tl.constexpr, TILES: tl.constexpr):
    """q, and k and v in the cache. A program has every so many-th tile of rows, at least one. Grid: programs."""
    HALF: tl.constexpr = HEADS.D // 2
    PAIRS: tl.constexpr = TILES.rows // 2
    N_PAIRS: tl.constexpr = (HEADS.H + 2 * HEADS.H_kv) * HALF
    i_first, n_programs, o_r = tl.program_id(0), tl.num_programs(0), tl.arange(0, TILES.rows)
    if TILES.passes:
        gdc_launch_dependents()
    b_factor, b_summand = load_norm(norm, FORM, TILES)
    COLUMNS: tl.constexpr = TILES.columns
    b_x = tl.zeros([COLUMNS], tl.float32)
    position = -1
    for i_tile in tl.range(i_first, tl.cdiv(N_PAIRS, PAIRS), n_programs, num_stages=TILES.stages):
        if i_tile == i_first:
            await_input(TILES)
            position = tl.load(token.lengths) - 1
            b_x = normalised(p_x, norm.eps, b_factor, b_summand, FORM, TILES)
        p_row, m_row = rows_of_projection(linear, i_tile, o_r, HEADS, FORM, TILES)
        b_w = load_rows(p_row, m_row, FORM, TILES)
        b_1, b_2 = in_pairs(product(b_w, b_x))
        o_pair = i_tile * PAIRS + tl.arange(0, PAIRS)
        o_h, o_d, m_pair = o_pair // HALF, o_pair % HALF, o_pair < N_PAIRS
        b_1 = biased(b_1, linear.bias, o_h * HEADS.D + o_d, m_pair)
        b_2 = biased(b_2, linear.bias, o_h * HEADS.D + o_d + HALF, m_pair)
        if position >= 0:  # there is a sequence
            is_q, is_qk = o_h < HEADS.H, o_h < HEADS.H + HEADS.H_kv
            if token.cos is not None:
                b_cos = tl.load(token.cos + position * HALF + o_d, mask=m_pair & is_qk, other=1.0)
                b_sin = tl.load(token.sin + position * HALF + o_d, mask=m_pair & is_qk, other=0.0)
                b_1, b_2 = b_1 * b_cos - b_2 * b_sin, b_2 * b_cos + b_1 * b_sin
            place, slot = tl.cast(0, tl.int64), position
            if token.pages is not None:
                place, slot = tl.load(token.pages + position // token.slots).to(tl.int64), position % token.slots
            slot = tl.where((place >= 0) & (slot < token.slots), slot, -1)
            o_kv = o_h - HEADS.H - tl.where(is_qk, 0, HEADS.H_kv)
            o_slot = place * HEADS.H_kv * token.slots + o_kv * token.slots + slot
            p_to = tl.where(is_qk, token.k, token.v) + o_slot * HEADS.D
            p_to = tl.where(is_q, token.q + o_h * HEADS.D, p_to) + o_d
            m_to = m_pair & (is_q | (slot + tl.zeros_like(o_h) >= 0))
            tl.store(p_to, b_1.to(p_to.dtype.element_ty), mask=m_to)
            tl.store(p_to + HALF, b_2.to(p_to.dtype.element_ty), mask=m_to)


def has_early_launch(device: torch.device) -> bool:
    """Whether kernels can be launched while the one before runs."""
    return not INTERPRET.value and gpu.capability(device) >= (9, 0)


def can_read(weight: Tensor) -> bool:
    """Whether the kernels can read a matrix: its rows begin at multiples of 16 bytes, and a program can hold two."""
    long = triton.next_power_of_2(weight.shape[1]) * weight.element_size()
    whole = weight.is_contiguous() and weight.data_ptr() % gpu.ALIGNMENT == 0
    return whole and weight.shape[1] % 8 == 0 and long <= LONGEST_ROW and weight.dtype in DTYPES


def plan(weight: Tensor, matrices: int = 1, pairs: bool = False) -> tuple[int, Tiles]:
    """The number of programs and the tiles of a kernel that reads so many matrices like `weight`, timed on an H100.

    pairs  tiles have an even number of rows
    """
    columns = triton.next_power_of_2(weight.shape[1])
    row = columns * weight.element_size() * matrices  # bytes
    rows = max(2 if pairs else 1, min(32, TILE // row))
    stages = 1 + max(1, AHEAD // (rows * row))
    tiles = triton.cdiv(len(weight), rows)
    programs = min(tiles, PROGRAMS * gpu.multiprocessors(weight.device))
    early = has_early_launch(weight.device)
    passes = early and not pairs and tiles <= (stages - 1) * programs
    return programs, Tiles(rows, columns, stages, WARPS, early, passes)


def launch_product(x: Tensor, norm: Norm | None, first: Linear, second: Linear | None, y: Tensor, form: Form) -> Tensor:
    """y (N,), written, or added to. x (C,) and y are contiguous."""
    N = len(first.weight)
    programs, tiles = plan(first.weight, 1 if second is None else 2)
    with torch.cuda.device_of(x):
        product_kernel[(programs,)](
            *(x, norm or Norm(), first, second or Linear(None, None), y, N, form, tiles),
            num_warps=tiles.warps,
            launch_pdl=tiles.early,
            enable_fp_fusion=True,
        )
    return y


def launch_projection(
    x: Tensor, norm: Norm, linear: Linear, cache: Cache, tables: PositionTables, form: Form, q: Tensor
) -> Tensor:
    """Queries q (1, H, 1, D), written, as the keys and values in the cache.

    tables  for all positions; without cosines nothing is rotated
    """
    (_, H, _, D), (_, H_kv, slots, _) = q.shape, cache.k.shape
    programs, tiles = plan(linear.weight, pairs=True)
    with torch.cuda.device_of(x):
        projection_kernel[(programs,)](
            *(x, norm, linear, Token(q, *cache, slots, tables.cos, tables.sin), Heads(H, H_kv, D), form, tiles),
            num_warps=tiles.warps,
            launch_pdl=tiles.early,
            enable_fp_fusion=True,
        )
    return q
