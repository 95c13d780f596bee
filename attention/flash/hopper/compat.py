"""Names that differ between the releases of Gluon (Triton 3.6 to 3.9), and those that it does not export.

Gluon is Triton's lower level: layouts, shared memory and barriers are written out. It is experimental: the names that
another release may change are collected here, and the kernels import them from here.
"""

from triton._C.libtriton import ir
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

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


@builtin
def tma_add(descriptor, position, tile, _semantic=None):
    """Add a tile in shared memory to device memory by the copy engine: cp.reduce.async.bulk.tensor."""
    position = _semantic._convert_to_ir_values(position, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, position, tile.handle)
