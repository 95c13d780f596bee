"""The backward of wide heads, 129 to 256 columns, on Hopper: dk and dv in one kernel, and dq in another.

s and dp are computed twice, as in the plain backward. One kernel for all would have dk and dv of 64 keys in its
registers, and add dq of each query tile in device memory twice as often as at head size 128.
"""

import torch
from torch import Tensor

from ...gpu import multiprocessors
from ...scores.sinks import sinks_gradient_of_kernels
from .. import tiles as plain
from ..backward import Gradients
from ..call import KernelCall
from ..score import LOG2_E
from .added import hopper_inputs, hopper_mode
from .configs import DQ_BLOCKS, Config, backward_blocks
from .delta import Counters, DeltaConstants, Rows, delta_kernel
from .softmax import ROWS
from .tiles import row_tiles, tiles
from .wide_keys import dkdv_kernel
from .wide_queries import dq_kernel


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse2: Tensor,
    gradients: Gradients,
    call: KernelCall,
) -> Tensor | None:
    """do and out like q (B, H, T, D), lse2 of the forward; fills dq, dk and dv, and delta where it is asked for.

    Returns the gradient of the sinks (H,), or None where there are none.
    """
    sinks, slopes = call.inputs.sinks, call.inputs.slopes
    blocks, mode = backward_blocks(call.problem(q, k)), hopper_mode(call, q)
    (B, H, T, _), (H_kv, S) = q.shape, k.shape[1:3]
    n_m, n_n = (T + blocks.q - 1) // blocks.q, (S + blocks.k - 1) // blocks.k
    do = plain.addressable(do)
    delta = plain.rows_like(q) if gradients.delta is None else gradients.delta
    counters = Counters(None, q.new_empty(1, dtype=torch.int32), q.new_empty(1, dtype=torch.int32))
    rows = Rows(
        lse2=None if slopes is None else q.new_empty(B, H, n_m * blocks.q, dtype=torch.float32), delta=delta, parts=None
    )
    delta_kernel[(B * H * n_m,)](
        plain.tiles(out, blocks.q, blocks.columns),
        plain.tiles(do, blocks.q, blocks.columns),
        lse2,
        rows,
        counters,
        slopes,
        call.spec.scale * LOG2_E.value,
        H,
        T,
        n_m,
        BLOCKS=blocks,
        CONSTANTS=DeltaConstants((256 - call.spec.threshold) / 256, False),
        enable_fp_fusion=True,
    )
    lse2_rows = row_tiles(lse2, T, blocks.q) if slopes is None else row_tiles(rows.lse2, n_m * blocks.q, blocks.q)
    delta_rows = row_tiles(delta, T, blocks.q)
    inputs, n_programs = hopper_inputs(call, T, S), multiprocessors(q.device)
    queries = [tiles(x, blocks.q, blocks.columns) for x in (q, do, gradients.dq)]
    keys = [tiles(x, blocks.k, blocks.columns) for x in (k, v, gradients.dk, gradients.dv)]
    n_together = plain.head_group_size(B * H_kv, H // H_kv * plain.head_bytes(q))
    dkdv_kernel[(min(n_programs, n_n * B * H_kv),)](
        queries[0],
        keys[0],
        keys[1],
        queries[1],
        keys[2],
        keys[3],
        lse2_rows,
        delta_rows,
        counters.work,
        inputs,
        plain.launch_scalars(call, n_together),
        CONFIG=Config(blocks, mode),
        num_warps=4,
        enable_fp_fusion=True,
    )
    rows_of_tile = DQ_BLOCKS.consumers * ROWS.value
    n_tiles = (T + rows_of_tile - 1) // rows_of_tile
    n_together = plain.head_group_size(B * H, plain.head_bytes(k), H // H_kv)
    dq_kernel[(min(n_programs, n_tiles * B * H),)](
        queries[0],
        keys[0],
        keys[1],
        queries[1],
        queries[2],
        lse2_rows,
        delta_rows,
        counters.dq_work,
        inputs,
        plain.launch_scalars(call, n_together),
        BLOCKS=DQ_BLOCKS,
        MODE=mode,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return None if sinks is None else sinks_gradient_of_kernels(sinks, lse2, delta, T, call.spec.threshold)
