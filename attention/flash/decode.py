"""Attention to a cache: the launch of the kernels in decode_kernel.py, and the operator for torch.compile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from .. import gpu
from ..decode.cache import Cache
from ..gpu import INTERPRET, NAMESPACE
from ..layout import Layout
from ..spec import Inputs, Spec
from .call import KernelCall, Mode
from .decode_kernel import JOINED_COLUMNS, UNIT, Given, Partial, Results, decode_kernel, join_kernel
from .formula import kernel_inputs, with_row_terms
from .score import LOG2_E
from .tiles import kernel_mode, strided

MAX_ROWS = 32  # of a tile of queries: more do not fit the registers
MIN_ROWS = 16  # of a matrix instruction
# The join reads all splits at a time, up to MAX_JOINED. A larger power of two only adds zeros at the end of its sums,
# so that room for more splits does not change their order.
MIN_JOINED, MAX_JOINED = 8, 64


class Blocks(NamedTuple):
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


def choose_blocks(rows: int, head_dim: int, mode: Mode) -> Blocks:
    """The blocks for a group's rows and a head size, timed on an H200. STEP is a multiple of their keys."""
    BM = max(MIN_ROWS, min(MAX_ROWS, triton.next_power_of_2(rows)))
    if mode.exact:
        return Blocks(BM, 16, 8, 2 if head_dim <= 128 else 1)
    if head_dim > 128:
        return Blocks(BM, 64, 4, 2)
    return Blocks(BM, 64, 4, 2, programs=384) if head_dim > 64 else Blocks(BM, 64, 2, 2, programs=1056)


def count_splits(keys: int, heads: int, blocks: Blocks) -> int:
    """The splits of a sequence whose queries see at most `keys`; `heads` tiles of rows have a program for each."""
    return max(1, min(blocks.programs // heads, triton.cdiv(keys, UNIT.value)))


def run_decode(q: Tensor, cache: Sequence[Tensor | None], inputs: Sequence[Tensor], spec: str) -> tuple[Tensor, Tensor]:
    """q (B, H, T, D) against a Cache to out (B, H, T, D) and lse (B, H, T).

    cache   k, v, lengths and pages, as Cache has them
    inputs  slopes and sinks, (H,) fp32, where the score has them, and a formula's values
    spec    the text of a Spec
    """
    k, v, lengths, pages = Cache(*cache)  # type: ignore[arg-type]
    (B, H, T, D), H_kv, known = q.shape, k.shape[1], Spec.read(spec)
    out, lse = q.new_empty(B, H, T, D), q.new_empty(B, H, T, dtype=torch.float32)
    call = KernelCall(known, Inputs.of(known, inputs))
    mode, window = kernel_mode(known, D, q.dtype), known.score.window
    G = H // H_kv
    blocks = choose_blocks(G * T, D, mode)
    capacity = k.shape[2] * (1 if pages is None else pages.shape[1])
    visible = capacity if window is None else min(capacity, window + T - 1 + blocks.k - 1)
    n_m = triton.cdiv(G * T, blocks.q)
    n_splits = count_splits(visible, H_kv * n_m, blocks)
    # Each kernel is launched while the one before it runs, and waits for it: programmatic dependent launch.
    early = not INTERPRET.value and gpu.capability(q.device) >= (9, 0)
    partial = None
    if n_splits > 1:
        shape = (B * H_kv, n_splits, G * T)
        partial = Partial(*(q.new_empty(*shape, *last, dtype=torch.float32) for last in ((mode.columns,), (), ())))
    with torch.cuda.device_of(q):
        decode_kernel[(H_kv * n_m, n_splits, B)](
            *(strided(x) for x in (q, k, v)),
            Results(out, lse, partial),
            Given(lengths, pages, kernel_inputs(call, T, capacity, Layout(lengths=lengths))),
            known.scale * LOG2_E.value,
            G,
            T,
            capacity,
            None if pages is None else pages.stride(0),
            BLOCKS=blocks._replace(page=None if pages is None else k.shape[2], early=early),
            MODE=mode,
            num_warps=blocks.warps,
            launch_pdl=early,
            enable_fp_fusion=True,
        )
        if partial is not None:
            join_kernel[(B * H * T, triton.cdiv(D, JOINED_COLUMNS.value))](
                *(Results(out, lse, partial), lengths, n_splits, H, G, T, D),
                CAUSAL=known.score.causal,
                COLUMNS=mode.columns,
                JOINED=max(MIN_JOINED, min(MAX_JOINED, triton.next_power_of_2(n_splits))),
                EARLY=early,
                num_warps=1,
                launch_pdl=early,
                enable_fp_fusion=True,
            )
    return out, with_row_terms(lse, call)


flash_decode = torch.library.custom_op(f"{NAMESPACE}::flash_decode", run_decode, mutates_args=())


@flash_decode.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.float32)
