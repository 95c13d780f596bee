"""A number that a formula adds to s, for each distance i - j: most tiles of scores see one number, and do not gather.

From some distance on, all may have the same number. A tile of such pairs is computed as causal attention's: its number
joins the row's offset, with which the scores enter the exponential. Only the tiles before it gather. Which tiles these
are follows from the length of the vector of distances, whatever the formula's text is.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...spec import Inputs
from .. import tiles as plain
from ..call import KernelCall, Mode
from ..formula import added_by, kernel_inputs, written
from ..score import LOG2_E

STAGES = ("distance",)  # of numbers that the Hopper kernels add by themselves


def hopper_mode(call: KernelCall, q: Tensor) -> Mode:
    """The Mode of a call, without its formula where all that this does is to add a number."""
    mode, added = plain.mode_of(call, q), added_by(call.spec.score)
    return mode._replace(formula=None, added=added) if added in STAGES else mode


def hopper_inputs(call: KernelCall, T: int, S: int) -> Inputs:
    """The inputs of a call as kernels get them; of a formula's, the number that it adds alone."""
    inputs, score = kernel_inputs(call, T, S), call.spec.score
    if added_by(score) not in STAGES:
        return inputs
    return inputs._replace(formula=(inputs.formula[written(score).added],))


@triton.jit
def first_number(x, i_b, i_h):
    """Where the numbers of a head begin; x is a vector of distances as `kernel_inputs` has it."""
    return x[0] + tl.cast(i_b, tl.int64) * (x[1] >> 2) + i_h * (x[2] >> 2)


@triton.jit
def far_number(inputs, i_b, i_h, MODE: tl.constexpr):
    """The number of the furthest distances, times log2(e); 0 where a formula does not add numbers of distances."""
    far = 0.0
    if MODE.added == "distance":
        x = inputs.formula[0]
        far = tl.load(first_number(x, i_b, i_h) + ((x[3] >> 2) - 1)) * LOG2_E
    return far


@triton.jit
def is_near(x, i_m, i_n, BN: tl.constexpr, pos):
    """Whether a pair of the queries from i_m and the BN keys from i_n has another number than the furthest."""
    return i_m + pos.offset - (i_n + (BN - 1)) < (x[4] >> 2) + (x[3] >> 2) - 1


@triton.jit
def near_numbers(x, i_b, i_h, o_m, o_n, pos):
    """The numbers of the pairs of queries o_m and keys o_n."""
    o = tl.minimum(tl.maximum(o_m - o_n + (pos.offset - (x[4] >> 2)), 0), (x[3] >> 2) - 1)
    return tl.load(first_number(x, i_b, i_h) + o)
