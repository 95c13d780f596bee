"""Tensors as arguments of the Hopper kernels: descriptors that include the layout of a tile in shared memory."""

from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..tiles import descriptor_strides

TILE = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
PARTS = NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2)
FP32 = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


class Descriptor(TensorDescriptor):
    """A descriptor of a tensor that is known to be aligned, without Triton's checks: as in the plain tiles.py."""

    def __post_init__(self) -> None:
        """Check nothing."""


def tiles(x: Tensor, rows: int, columns: int) -> Descriptor:
    """(B, H, T, D) of 16 bits as a kernel's argument, to be moved in tiles of rows x columns, columns >= D."""
    return Descriptor(x, x.shape, descriptor_strides(x.shape, x.stride()), [1, 1, rows, columns], TILE)


def row_tiles(x: Tensor, T: int, rows: int) -> Descriptor:
    """(B, H, T or more) of `rows_like` as a kernel's argument, to be moved `rows` values at a time."""
    B, H, T_padded = x.shape
    return Descriptor(x, [B * H, T], [T_padded, 1], [1, rows], FP32)


def matrix(x: Tensor, rows: int) -> Descriptor:
    """(M, N) fp32, contiguous, as a kernel's argument, to be moved `rows` whole rows at a time."""
    return Descriptor(x, x.shape, x.stride(), [rows, x.shape[1]], FP32)


def parts_tiles(x: Tensor, rows: int, columns: int) -> Descriptor:
    """(M, N) bf16, contiguous, as a kernel's argument, to be moved in tiles of rows x columns, columns >= N."""
    return Descriptor(x, x.shape, x.stride(), [rows, columns], PARTS)
