"""Launches of kernels without what Triton does for each of them.

Triton looks at every argument of a launch, as it may have to compile the kernel anew; that takes the host longer than a
short kernel takes the GPU. Here the caller says what a kernel is compiled for, and a second launch of that kind goes to
the compiled kernel itself. All else is Triton's public interface, the same in its releases 3.6 to 3.9.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor

from ..gpu import ALIGNMENT
from .call import KernelCall

COMPILED: dict[Hashable, Any] = {}  # (function, kind, constants) -> Triton's compiled kernel
MOST_COMPILED = 4096  # then they are looked up anew, so that the dictionary cannot grow for ever

Grid = tuple[int, int, int]
Kind = tuple[Hashable, ...]


def kind_of(q: Tensor, call: KernelCall) -> Kind | None:
    """What a kernel for a call is compiled for besides its constants; None for formulas, whose tensors Triton looks at.

    New tensors are aligned, and q, k, v and those like q come as descriptors, for which nothing is specialised.
    """
    if call.inputs.formula is not None or call.inputs.factors is not None:
        return None
    inputs = [None if x is None else (x.dtype, x.data_ptr() % ALIGNMENT) for x in call.inputs[:-1]]
    return (q.device, q.dtype, *inputs)


def launch(
    kernel: Any, grid: Grid, kind: Kind | None, arguments: Sequence[Any], constants: tuple[Any, ...], **options: Any
) -> None:
    """kernel[grid](*arguments, *constants, **options).

    kind       equal for launches that Triton would compile the kernel once for, if their constants are equal too
    arguments  all parameters of the kernel up to its constants; integers among them are not specialised
    options    of Triton's; they follow from the constants
    """
    key = (kernel.fn, kind, constants)
    compiled = None if kind is None else COMPILED.get(key)
    if compiled is not None:
        compiled[grid](*arguments, *constants)
        return
    compiled = kernel[grid](*arguments, *constants, **options)
    if kind is None or compiled is None:  # the interpreter compiles nothing
        return
    if len(COMPILED) >= MOST_COMPILED:
        COMPILED.clear()
    COMPILED[key] = compiled
