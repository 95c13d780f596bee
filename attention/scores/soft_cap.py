"""A soft cap keeps scores between -c and c. Gemma Team 2024, "Gemma 2", section 2: c = 50 in attention."""

from __future__ import annotations

import math

from ..errors import Option, ScoreError
from ..formula.graph import Node, is_number
from .option import Recognised, ScoreOption


class SoftCap(ScoreOption):
    """c in c tanh(s / c), which keeps scores between -c and c; None: no cap"""

    name, order = "soft_cap", 2
    type, words, default = float | None, "a number", None
    title = "a soft cap"
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
