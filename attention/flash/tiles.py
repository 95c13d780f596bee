"""Tiles of (B, H, T, D) tensors, in and out of the chip.

A tensor descriptor carries base, shape and strides, so one kernel serves every memory layout; Hopper's copy engine
moves the tile, fills what lies beyond the tensor's end with zeros and clips what is stored there, so that no kernel
masks a load. Older GPUs get the same from Triton by pointer arithmetic.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

ALIGNMENT = 16  # bytes: what the copy engine asks of the base and of every stride
INPUT_PRECISION = {False: "ieee", True: "tf32"}  # by allow_tf32; says nothing to 16-bit inputs


def aligned(x: Tensor) -> bool:
    """Whether a descriptor can address x as it lies in memory: its last dimension contiguous, the rest aligned."""
    step = ALIGNMENT // x.element_size()
    outer = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    return (
        x.stride(-1) == 1
        and x.data_ptr() % ALIGNMENT == 0
        and all(size == 1 or (stride > 0 and stride % step == 0) for size, stride in outer)
    )


def addressable(x: Tensor) -> Tensor:
    """x itself where a descriptor can address it, else a copy; its last dimension spans a multiple of 16 bytes."""
    return x if aligned(x) else x.clone(memory_format=torch.contiguous_format)


def descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """(B, H, T, D) in tiles of `rows` by D rounded up to a power of two."""
    columns = max(16, triton.next_power_of_2(x.shape[-1]))
    # The stride of an axis of length 1 is never used and need not be aligned.
    strides = [ALIGNMENT if size == 1 else stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, rows, columns])


INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def load_tile(x, i_b, i_h, i_t):
    """Rows from i_t of one head: (rows, D)."""
    return x.load([i_b, i_h, i_t, 0]).reshape(x.block_shape[2], x.block_shape[3])


@triton.jit
def store_tile(x, i_b, i_h, i_t, b_x):
    """Write (rows, D) to the rows from i_t of one head."""
    x.store([i_b, i_h, i_t, 0], b_x.to(x.dtype).reshape(1, 1, x.block_shape[2], x.block_shape[3]))


@triton.jit
def load_row(x, i_bh, i_t):
    """One number for each row from i_t of one head: (rows,)."""
    return x.load([i_bh, i_t]).reshape(x.block_shape[1])


@triton.jit
def dot(b_a, b_b, b_c, PRECISION: tl.constexpr):
    """b_a b_b + b_c in fp32."""
    if INTERPRET:
        # The interpreter would multiply bfloat16's bit patterns. In fp32 the products of 16-bit numbers are exact.
        b_a, b_b = b_a.to(tl.float32), b_b.to(tl.float32)
    return tl.dot(b_a, b_b, b_c, input_precision=PRECISION)
