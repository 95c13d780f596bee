"""Names that differ between the releases of Gluon (Triton 3.6 and 3.7), and those that it does not export.

Gluon is Triton's lower level: layouts, shared memory and barriers are written out. It is experimental, so what another
release may rename stands here, and the kernels take it from here.
"""

from triton._C.libtriton import ir
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin

# Waits for the threads of this partition, and orders their shared memory; Triton 3.6 calls it thread_barrier.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@builtin
def tma_add(descriptor, position, tile, _semantic=None):
    """Add a tile in shared memory to device memory by the copy engine: cp.reduce.async.bulk.tensor."""
    position = _semantic._convert_to_ir_values(position, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, position, tile.handle)
