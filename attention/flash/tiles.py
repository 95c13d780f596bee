"""Tiles of (B, H, T, D) tensors, in and out of the chip.

From Hopper on, a tile moves by the copy engine: one thread names a tensor descriptor (base, shape, strides) and a
position, elements beyond the tensor's end are read as zeros, and stores there are clipped. Older GPUs do the same by
pointer arithmetic and masks. Either way one kernel serves every memory layout, and offsets have 64 bits.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .. import gpu
from ..gpu import ALIGNMENT, INTERPRET
from ..spec import Spec
from .call import Blocks, KernelCall, Mode
from .formula import is_biased, written
from .score import LOG2_E

ROW_ALIGNMENT = tl.constexpr(4)  # fp32 values: 16 bytes
LARGEST_FIXED = 60.0  # soft cap: exp of it is 2^87, far from the largest bf16 and fp32
L2_BUDGET = 8 * 2**20  # bytes of an H200's 50 MiB that the heads in flight may fill


def has_copy_engine(device: torch.device) -> bool:
    """Whether tiles move by tensor descriptors; the interpreter knows them too."""
    return gpu.capability(device) >= (9, 0)


def aligned(x: Tensor) -> bool:
    """Whether a descriptor can address x as it lies in memory: its last dimension contiguous, the rest aligned."""
    return x.data_ptr() % ALIGNMENT == 0 and are_aligned(x.shape, x.stride(), x.element_size())


@lru_cache(maxsize=1024)
def are_aligned(shape: tuple[int, ...], strides: tuple[int, ...], element_size: int) -> bool:
    """Whether strides are as a descriptor needs them."""
    step, outer = ALIGNMENT // element_size, zip(shape[:-1], strides[:-1], strict=True)
    return strides[-1] == 1 and all(size == 1 or (stride > 0 and stride % step == 0) for size, stride in outer)


def addressable(x: Tensor) -> Tensor:
    """x itself where a descriptor can address it, else a copy; its last dimension spans a multiple of 16 bytes."""
    return x if aligned(x) else x.clone(memory_format=torch.contiguous_format)


class Descriptor(TensorDescriptor):
    """A descriptor of a tensor that `aligned` has accepted.

    Triton's class would check the tensor again, which is most of the time that an argument takes the host.
    """

    def __post_init__(self) -> None:
        """Check nothing."""


class Strided(NamedTuple):
    """A (B, H, T, D) tensor that a descriptor could address, for a GPU without a copy engine; `shape` has 0 for B.

    The compiler does not specialise a descriptor's sizes. For a size in a tuple it compiles up to three times: for 1,
    for multiples of 16 and for all others. Here sizes are passed as they are: `unspecialised` would cost registers in
    loops.
    """

    pointer: Any
    stride_b: Any
    stride_h: Any
    stride_t: Any
    shape: Any


def strided(x: Tensor) -> Strided:
    """(B, H, T, D) as a kernel's argument."""
    stride_b, stride_h, stride_t, _ = x.stride()
    return Strided(x, stride_b, stride_h, stride_t, (0, *x.shape[1:]))


def tiles(x: Tensor, rows: int, columns: int) -> TensorDescriptor | Strided:
    """(B, H, T, D) as a kernel's argument, to be moved in tiles of rows x columns, columns >= D."""
    if not has_copy_engine(x.device):
        return strided(x)
    return Descriptor(x, x.shape, descriptor_strides(x.shape, x.stride()), [1, 1, rows, columns])


@lru_cache(maxsize=1024)
def descriptor_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides for a descriptor: the stride of an axis of length 1 is never used and need not be aligned."""
    outer = zip(shape[:-1], strides[:-1], strict=True)
    return *(ALIGNMENT if size == 1 else stride for size, stride in outer), 1


def rows_like(q: Tensor) -> Tensor:
    """(B, H, T and up to three more) fp32: one value for each row of q, with rows aligned for the copy engine."""
    B, H, T, _ = q.shape
    return q.new_empty(
        B, H, (T + ROW_ALIGNMENT.value - 1) // ROW_ALIGNMENT.value * ROW_ALIGNMENT.value, dtype=torch.float32
    )


def row_tiles(x: Tensor, T: int, rows: int) -> TensorDescriptor | Strided:
    """(B, H, T or more) of `rows_like` as a kernel's argument, to be moved `rows` values at a time."""
    B, H, T_padded = x.shape
    if not has_copy_engine(x.device):
        # -T, as 1 would be a constant: a tuple with two constants in another tuple is lost on Triton 3.6.
        return Strided(x, 0, T_padded, 1, (0, 0, -T, 0))
    return Descriptor(x, [B * H, T], [T_padded, 1], [1, rows])


def unspecialised(x: int) -> int:
    """x for a tuple among a kernel's arguments; `x >> 2` in the kernel gives it back.

    Triton compiles again for 1 and for multiples of 16, and `do_not_specialize` does not reach into tuples. 4 x + 2 is
    neither of them.
    """
    return 4 * x + 2


class Rows(NamedTuple):
    """The values that a forward stores for each row, in addition to out: see `store_lse`."""

    lse: Any
    lse2: Any


class Scalars(NamedTuple):
    """The scalars of a launch besides its tensors' shapes. All integers are `unspecialised`.

    scale_log2  the scale times log2(e)
    n_together  heads that run at the same time, see `head_group_size`
    q_start, k_start  None where the last query has the position of the last key
    length      of the documents' rows, None without documents
    """

    scale: Any
    scale_log2: Any
    n_together: Any
    q_start: Any
    k_start: Any
    length: Any


def launch_scalars(call: KernelCall, n_together: int) -> Scalars:
    """The scalars of a call's launch."""
    starts, scale = call.inputs.starts, float(call.spec.scale)  # of which Triton would make a constant if it were 1
    length = None if starts is None else starts.shape[1]
    positions = (call.q_start, call.k_start) if call.spec.offsets else (None, None)
    integers = [None if x is None else unspecialised(x) for x in (n_together, *positions, length)]
    return Scalars(scale, scale * LOG2_E.value, *integers)


@lru_cache(maxsize=1024)
def kernel_mode(spec: Spec, head_dim: int, dtype: torch.dtype, horizon: bool = False) -> Mode:
    """The constants that kernels for queries of this head size and dtype are compiled for; `horizon` as Mode has it."""
    score = spec.score
    capped = score.soft_cap is not None and score.soft_cap <= LARGEST_FIXED
    return Mode(
        causal=score.causal,
        window=score.window,
        documents=spec.documents,
        bounded=spec.bounded,
        horizon=horizon,
        offsets=spec.offsets,
        soft_cap=score.soft_cap,
        alibi=score.alibi,
        formula=None if score.formula is None else written(score).code,
        biased=is_biased(score),
        added=None,
        sinks=score.sinks,
        threshold=spec.threshold,
        fixed_max=capped and not score.alibi and not score.sinks and dtype != torch.float16,
        exact=dtype == torch.float32,
        precision="tf32" if spec.tf32 else "ieee",
        # Tiles are as wide as the next power of two, and no narrower than a matrix instruction: 32 bytes.
        columns=max(32 // min(dtype.itemsize, 2), triton.next_power_of_2(head_dim)),
    )


def mode_of(call: KernelCall, q: Tensor) -> Mode:
    """`kernel_mode` for a call's queries."""
    return kernel_mode(call.spec, q.shape[-1], q.dtype, call.inputs.horizons is not None)


def compile_options(blocks: Blocks) -> dict[str, int | None]:
    """The arguments of a launch that Triton reads.

    Every launch, here and elsewhere, lets the compiler fuse a product and a sum into one rounding: the kernels are
    measured with it, and Triton 3.10 stops doing so unasked.
    """
    return {
        "num_warps": blocks.warps,
        "num_stages": blocks.stages,
        "maxnreg": blocks.registers,
        "enable_fp_fusion": True,
    }


def head_group_size(n_heads: int, head: int, shared_by: int = 1) -> int:
    """Number of heads that run at the same time, so that the tensors that their programs reread stay in the L2 cache.

    `head` is the bytes of one head of a tensor that is read twice over (keys and values, or queries and gradients), and
    `shared_by` the number of heads that read the same one.
    """
    return min(n_heads, max(1, L2_BUDGET * shared_by // (2 * head)))


def head_bytes(x: Tensor) -> int:
    """The bytes of one head of x (B, H, T, D)."""
    return x.shape[2] * x.shape[3] * x.element_size()


@triton.jit
def swizzle(i_work, n_tiles, n_heads, n_together):
    """(tile, head) of a unit of work: heads in sections of n_together, and all heads of a section tile by tile."""
    i_section = i_work // (n_together * n_tiles)
    i_rest = i_work % (n_together * n_tiles)
    n_here = tl.minimum(n_heads - i_section * n_together, n_together)
    return i_rest // n_here, i_section * n_together + i_rest % n_here


@triton.jit
def swizzle_program_id(n_tiles, scalars):
    """(tile, head) of this program; see `swizzle`."""
    n_together, n_heads = scalars.n_together >> 2, tl.num_programs(0) // n_tiles
    return swizzle(tl.program_id(0), n_tiles, n_heads, n_together)


@triton.jit
def tile_pointers(x, i_b, i_h, i_t, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The addresses of rows from i_t of one head of a Strided, (ROWS, COLUMNS), and the mask of those in the tensor."""
    o_t, o_d = i_t + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    p_x = x.pointer + tl.cast(i_b, tl.int64) * x.stride_b + tl.cast(i_h, tl.int64) * x.stride_h
    p_x = p_x + o_t.to(tl.int64)[:, None] * x.stride_t + o_d[None, :]
    return p_x, (o_t < x.shape[2])[:, None] & (o_d < x.shape[3])[None, :]


@triton.jit
def load_tile(x, i_b, i_h, i_t, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows from i_t of one head: (ROWS, COLUMNS), zero beyond the tensor."""
    if isinstance(x, tl.tensor_descriptor):
        b_x = x.load([i_b, i_h, i_t, 0]).reshape(ROWS, COLUMNS)
    else:
        p_x, m_x = tile_pointers(x, i_b, i_h, i_t, ROWS, COLUMNS)
        b_x = tl.load(p_x, mask=m_x, other=0.0)
    return b_x


@triton.jit
def store_tile(x, i_b, i_h, i_t, b_x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write (ROWS, COLUMNS) to the rows from i_t of one head, as far as they are in the tensor."""
    if isinstance(x, tl.tensor_descriptor):
        x.store([i_b, i_h, i_t, 0], b_x.to(x.dtype).reshape(1, 1, ROWS, COLUMNS))
    else:
        p_x, m_x = tile_pointers(x, i_b, i_h, i_t, ROWS, COLUMNS)
        tl.store(p_x, b_x.to(x.pointer.dtype.element_ty), mask=m_x)


@triton.jit
def load_row(x, i_bh, i_t, ROWS: tl.constexpr):
    """One value for each row from i_t of one head: (ROWS,), zero beyond the tensor."""
    if isinstance(x, tl.tensor_descriptor):
        b_x = x.load([i_bh, i_t]).reshape(ROWS)
    else:
        o_t = i_t + tl.arange(0, ROWS)
        b_x = tl.load(x.pointer + tl.cast(i_bh, tl.int64) * x.stride_h + o_t, mask=o_t < -x.shape[2], other=0.0)
    return b_x


@triton.jit
def store_lse(rows, lse2, i_bh, T, o_m):
    """Write lse2, in base 2, of the rows o_m of one head: rows.lse in base e, and rows.lse2 for the backward.

    There it is unrounded by a change of base, and +inf for a row that saw nothing, as exp2(s - inf) = 0.
    """
    tl.store(rows.lse + i_bh.to(tl.int64) * T + o_m, lse2 / LOG2_E, mask=o_m < T)
    lse2 = tl.where(lse2 == -float("inf"), float("inf"), lse2)
    T_padded = tl.cdiv(T, ROW_ALIGNMENT) * ROW_ALIGNMENT
    tl.store(rows.lse2 + i_bh.to(tl.int64) * T_padded + o_m, lse2, mask=o_m < T_padded)


@triton.jit
def dot(b_a, b_b, b_c, MODE: tl.constexpr):
    """b_a b_b + b_c in fp32."""
    if INTERPRET:
        # The interpreter would multiply bfloat16's bit patterns. In fp32 the products of 16-bit values are exact.
        b_a, b_b = b_a.to(tl.float32), b_b.to(tl.float32)
    if INTERPRET and MODE.exact:
        # NumPy adds in an order that depends on the tile's shape, a GPU does not. Forward and backward would then
        # differ in their scores, and delta would no longer cancel the sum of p dp along a row.
        b_x = tl.dot(b_a.to(tl.float64), b_b.to(tl.float64)).to(tl.float32)
        b_x = b_x if b_c is None else b_x + b_c
    else:
        b_x = tl.dot(b_a, b_b, b_c, input_precision=MODE.precision)
    return b_x
