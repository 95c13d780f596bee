"""A soft cap keeps scores between -c and c. Gemma Team 2024, "Gemma 2", section 2: c = 50 in attention."""

import math

from ..errors import Option, ScoreError
from ..formula.graph import Node, is_number
from ..gpu import HAS_TRITON
from .option import Recognised, ScoreOption


class SoftCap(ScoreOption):
    """c in c tanh(s / c), which keeps scores between -c and c; None: no cap"""

    name = "soft_cap"
    type, words, default = float | None, "a number", None
    is_formula = in_kernels = True

    def check(self, value: float) -> None:
        if not 0 < value < math.inf:
            soft_cap = Option("score.soft_cap", value)
            raise ScoreError("{} must be positive and finite; leave it out for no cap.", soft_cap)

    def formula(self, value: float, s: str) -> str:
        return f"{value!r} * tanh(({s}) / {value!r})"

    def recognised(self, x: Node) -> Recognised | None:
        if x.op != "mul" or not is_number(x.args[0]) or x.args[1].op != "tanh":
            return None
        cap, s = x.args[0].value, x.args[1].args[0]
        if cap <= 0 or s.op != "div" or not is_number(s.args[1], cap):
            return None
        return Recognised(float(cap), s.args[0], {})


if HAS_TRITON:
    import triton
    import triton.language as tl

    from ..gpu import INTERPRET, LOG2_E

    # The lowest maximum of a row whose scores a soft cap bounds, in base 2. exp(s) is at most 2^87 there, so that a
    # weight is at most 2^103, and no sum of weights and values overflows.
    LEAST_MAXIMUM = tl.constexpr(-16.0)

    @triton.jit
    def soft_cap_tanh(b_s, scale_log2, MODE: tl.constexpr):
        """tanh(s / c) of a soft cap, for s = scale q k^T."""
        b_x = b_s * (scale_log2 / (MODE.soft_cap * LOG2_E))
        if INTERPRET or MODE.exact:
            b_tanh = tanh(b_x)
        else:  # off by 2^-11 of itself, where bf16 is off by 2^-9
            asm: tl.constexpr = "tanh.approx.f32 $0, $1;"
            b_tanh = tl.inline_asm_elementwise(asm, "=f,f", [b_x], dtype=tl.float32, is_pure=True, pack=1)
        return b_tanh

    @triton.jit
    def tanh(x):
        """tanh in fp32, to within a few roundings (Moshier's Cephes, tanhf)."""
        z = x * x
        poly = -5.70498872745e-3 * z + 2.06390887954e-2
        poly = poly * z - 5.37397155531e-2
        poly = poly * z + 1.33314422036e-1
        poly = poly * z - 3.33332819422e-1
        far = 1.0 - 2.0 / (tl.exp2(tl.abs(x) * (2.0 * LOG2_E)) + 1.0)
        return tl.where(tl.abs(x) < 0.625, poly * z * x + x, tl.where(x < 0, -far, far))

    @triton.jit
    def times_derivative(b_x, b_tanh, MODE: tl.constexpr):
        """b_x times the derivative of the changed scores by s = scale q k^T: 1 - tanh(s / c)^2 where there is a cap."""
        if MODE.soft_cap is not None:
            b_x = b_x * (1.0 - b_tanh * b_tanh)
        return b_x
