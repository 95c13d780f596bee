"""The tensors that the scores of a layer read by name: learned, fixed, or made from the layer's input."""

import json
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention.errors import Option
from attention.formula import operations as ops
from attention.formula.graph import leaf, topological
from attention.formula.parse import parse
from attention.formula.plan import summands
from attention.score import Score, ScoreError
from attention.scores.alibi import alibi_slopes

FORGET_GATE = "model.forget_gate"
SLOPES = "alibi_slopes"
# In fp32 neighbours of a sum that has fallen by 0.7 a token are 6e-5 apart from 1,024 tokens on, and 0.06 at a million.
LONGEST_SUM = 1024
OF_STEPS = "_in_steps"
STEP = 16.0  # sums in parts: fp32 has multiples of it exactly, and the rest to 5e-7


class ForgetGate(nn.Module):
    """Sums of the logarithms of gates between 0 and 1, one gate a head and token, up to each token.

    The Forgetting Transformer adds their differences to the scores: Lin et al. 2025, "Forgetting Transformer:
    Softmax Attention with a Forget Gate", equation 6.
    """

    def __init__(self, channels: int, n_heads: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, n_heads, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """The residual stream, normalised, (B, T, C) to (B, H, T) fp32."""
        return self.gates(x).cumsum(1).transpose(1, 2)

    def in_parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The same as the sum of two: what is left over, which has the gradient, and a multiple of STEP."""
        total = self.gates(x).double().cumsum(1).transpose(1, 2)
        steps = (total.detach() / STEP).round() * STEP
        return (total - steps).float(), steps.float()

    def gates(self, x: Tensor) -> Tensor:
        """The logarithms of the gates, (B, T, H) fp32."""
        with torch.autocast(x.device.type, enabled=False):
            return F.logsigmoid(F.linear(x.float(), self.linear.weight.float(), self.linear.bias.float()))


class ScoreTensors(nn.Module):
    """The tensors that one layer's score reads, from `score.learned` and `score.tensors`."""

    def __init__(
        self, score: Score, learned: dict[str, Any] | None, fixed: dict[str, Any] | None, channels: int, n_heads: int
    ) -> None:
        """Raises ScoreError for a tensor that nothing gives, and for a shape or value that is none."""
        super().__init__()
        learned, fixed = learned or {}, fixed or {}
        of_options = [tensor.name for tensor in score.head_tensors]
        self.learned, self.made = nn.ParameterDict(), nn.ModuleDict()
        self.fixed: list[str] = []
        self.score = self.score_in_parts = score
        self.in_parts: list[str] = []
        for name, axes in score.tensors().items():
            if name in of_options:
                continue
            if name in learned:
                self.learned[name] = nn.Parameter(initial(name, learned[name], n_heads))
            elif fixed.get(name) == FORGET_GATE:
                if axes not in (("head", "row"), ("head", "column"), ("head", "position")):
                    raise ScoreError(
                        f"score.tensors.{name}={FORGET_GATE} has an entry for each head and token; write {name}[h, i] "
                        f"and {name}[h, j]."
                    )
                self.made[name] = ForgetGate(channels, n_heads)
                text = str(self.score_in_parts.formula)
                if only_differs(text, name):
                    steps = f"{name}{OF_STEPS}"
                    text = f"({text}) + max({steps}[h, i] - {steps}[h, j], -1e9)"  # of pairs: no row or column alone
                    self.in_parts.append(name)
                    self.score_in_parts = replace(self.score_in_parts, formula=text)
            elif name in fixed:
                self.register_buffer(f"fixed_{name}", constant(name, fixed[name], n_heads), persistent=False)
                self.fixed.append(name)
            else:
                shape = ",".join("h" if axis == "head" else "128" for axis in axes)
                raise ScoreError(
                    f"{{}} reads {name} ({', '.join(axes)}), which nothing gives; write score.learned.{name}=[{shape}] "
                    f"or score.tensors.{name}={FORGET_GATE}, {SLOPES} or numbers.",
                    Option("score.formula", score.formula),
                )

    def forward(self, x: Tensor) -> tuple[Score, dict[str, Tensor]]:
        """The score and its tensors by name, for the residual stream x (B, T, C) that the layer's queries are made of.

        For more than LONGEST_SUM tokens a sum of gates comes in two parts, of which the score takes differences.
        """
        tensors, is_long = self.given(), x.shape[1] > LONGEST_SUM
        for name, gate in self.made.items():
            assert isinstance(gate, ForgetGate)
            if is_long and name in self.in_parts:
                tensors[name], tensors[f"{name}{OF_STEPS}"] = gate.in_parts(x)
            else:
                tensors[name] = gate(x)
        return self.score_in_parts if is_long else self.score, tensors

    def given(self) -> dict[str, Tensor]:
        """Those of these tensors that are not made from the stream."""
        return {**self.learned, **{name: getattr(self, f"fixed_{name}") for name in self.fixed}}


def only_differs(text: str, name: str) -> bool:
    """Whether a formula reads a tensor only in the summands name[h, i] - name[h, j]."""
    h, i, j = map(leaf, "hij")
    ends, parts = [ops.load(name, h, i), ops.negate(ops.load(name, h, j))], summands(parse(text))
    others = [x for x in parts if x not in ends]
    read = any(x.op == "load" and x.value == name for x in topological(others))
    return len(parts) == len(others) + 2 and all(x in parts for x in ends) and not read


def initial(name: str, asked: Any, n_heads: int) -> Tensor:
    """The first value of a learned tensor: {shape: [h, 128], init: 0}, or the shape alone for zeros."""
    typed = json.dumps(asked, separators=(",", ":")).replace('"', "")
    asked = asked if isinstance(asked, dict) else {"shape": asked}
    shape, init = asked.get("shape", []), asked.get("init", 0)
    shape = shape if isinstance(shape, list | tuple) else [shape]
    sizes = [n_heads if size == "h" else size for size in shape]
    if {*asked} - {"shape", "init"} or any(isinstance(x, bool) or not isinstance(x, int) or x < 1 for x in sizes):
        raise ScoreError(
            f"score.learned.{name}={typed} must be a shape such as [h,128], where h is the number of heads, or "
            "{shape: [h,128], init: 0}."
        )
    if init == SLOPES and sizes == [n_heads]:
        return alibi_slopes(n_heads)
    if isinstance(init, bool) or not isinstance(init, int | float):
        raise ScoreError(
            f"score.learned.{name} has init={init}, which must be a number, or {SLOPES} for a shape of [h]."
        )
    return torch.full(sizes, float(init))


def constant(name: str, asked: Any, n_heads: int) -> Tensor:
    """A fixed tensor: ALiBi's slopes, or numbers in lists."""
    if asked == SLOPES:
        return alibi_slopes(n_heads)
    try:
        return torch.tensor(asked, dtype=torch.float32)
    except (TypeError, ValueError):
        raise ScoreError(
            f"score.tensors.{name}={asked} must be {FORGET_GATE}, {SLOPES}, or numbers in lists of equal lengths."
        ) from None
