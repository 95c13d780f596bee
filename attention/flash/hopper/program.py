"""What the Hopper kernels share: the state and the schedule of a program, stages of shared memory, copies.

All roles of a kernel agree on the order in which programs take tiles and on the tiles that see each other. Bounds and
masks are those of attention/flash/score.py, here in units of tiles.

Some roles fill the stages of a pipeline in shared memory and others empty them. Step i uses stage i % n. A barrier's
phase is the parity of how often it was waited for, so it follows from the step.

Gluon is Triton's lower level: layouts, shared memory and barriers are written out. It is experimental: the names that
differ between its releases (Triton 3.6 to 3.9), and those that it does not export, are collected here.
"""

from typing import Any, NamedTuple

from torch import Tensor
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..call import Blocks
from ..score import seeing_queries, seen_keys
from ..tiles import descriptor_strides


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


class Stage(NamedTuple):
    """The stage of a step: its index, and how many steps used it before."""

    index: Any
    uses: Any


@gluon.jit
def stage_of(i_step, STAGES):
    """The Stage of step i_step in a pipeline of so many."""
    return Stage(i_step % STAGES, i_step // STAGES)


@gluon.jit
def wait_full(barriers, stage, is_there=True):
    """Wait until the stage is filled for this step, if it will be."""
    mbarrier.wait(barriers.index(stage.index), stage.uses & 1, pred=is_there)


@gluon.jit
def wait_empty(barriers, stage):
    """Wait until the stage is free for this step: until the step that used it before is done with it."""
    mbarrier.wait(barriers.index(stage.index), (stage.uses & 1) ^ 1)


# Waits for the threads of this partition, and orders their shared memory; Triton 3.6 calls it thread_barrier.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

# Tiles between device and shared memory by the copy engine; these are the names since Triton 3.8.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


@builtin
def reinterpret(memory, dtype, shape, layout, _semantic=None):
    """A tile in shared memory as one of another dtype, shape or layout; before Triton 3.9 its method is private."""
    method = memory.reinterpret if hasattr(memory, "reinterpret") else memory._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)


@gluon.jit
def fetch_tile(x, position, full, memory, is_there=True):
    """Have a tile of x brought to shared memory, if it is there; `full` learns of it."""
    tma_load(x, position, full, reinterpret(memory, x.dtype, x.block_shape, x.layout), pred=is_there)


@gluon.jit
def take_tile(x, position, memory):
    """Have a tile of x taken from shared memory."""
    tma_store(x, position, reinterpret(memory, x.dtype, x.block_shape, x.layout))


@builtin
def tma_add(descriptor, position, tile, _semantic=None):
    """Add a tile in shared memory to device memory by the copy engine: cp.reduce.async.bulk.tensor."""
    position = _semantic._convert_to_ir_values(position, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, position, tile.handle)


@builtin
def run_roles(first, others, _semantic=None, _generator=None):
    """Divide a program among warps. Triton takes the functions as literals of the call.

    first   (function, arguments), with the warps of the launch and the registers that are left
    others  (function, arguments, warps, registers of a thread) of each other role; without warps it is left out
    """
    others = [(*role[:2], *(getattr(x, "value", x) for x in role[2:])) for role in others]
    others = [role for role in others if role[2]]
    functions, warps, registers = (
        [role[:2] for role in others],
        [role[2] for role in others],
        [role[3] for role in others],
    )
    return _semantic.warp_specialize([first, *functions], warps, registers, _generator)


TILE_LAYOUT = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
PARTS_LAYOUT = NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2)
FP32_LAYOUT = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


class SharedDescriptor(TensorDescriptor):
    """A descriptor of a tensor that is known to be aligned, without Triton's checks: as in the plain tiles.py."""

    def __post_init__(self) -> None:
        """Check nothing."""


def tiles(x: Tensor, rows: int, columns: int) -> SharedDescriptor:
    """(B, H, T, D) of 16 bits as a kernel's argument, to be moved in tiles of rows x columns, columns >= D."""
    return SharedDescriptor(x, x.shape, descriptor_strides(x.shape, x.stride()), [1, 1, rows, columns], TILE_LAYOUT)


def row_tiles(x: Tensor, T: int, rows: int) -> SharedDescriptor:
    """(B, H, T or more) of `rows_like` as a kernel's argument, to be moved `rows` values at a time."""
    B, H, T_padded = x.shape
    return SharedDescriptor(x, [B * H, T], [T_padded, 1], [1, rows], FP32_LAYOUT)


def matrix(x: Tensor, rows: int) -> SharedDescriptor:
    """(M, N) fp32, contiguous, as a kernel's argument, to be moved `rows` whole rows at a time."""
    return SharedDescriptor(x, x.shape, x.stride(), [rows, x.shape[1]], FP32_LAYOUT)


def parts_tiles(x: Tensor, rows: int, columns: int) -> SharedDescriptor:
    """(M, N) bf16, contiguous, as a kernel's argument, to be moved in tiles of rows x columns, columns >= N."""
    return SharedDescriptor(x, x.shape, x.stride(), [rows, columns], PARTS_LAYOUT)
