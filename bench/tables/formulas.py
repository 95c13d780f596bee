"""docs/formulas.md: the weights that formulas give."""

from __future__ import annotations

import torch
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from torch import Tensor

from attention import AttentionConfig, Score, build_attention
from bench.tables.blocks import figure
from recipe.drawing import Chart, Palette

T = 32
GATES = torch.where(torch.arange(T) % 11 == 10, 0.02, 0.9)  # a text that ends twice
# The title of each panel, its formula and its tensors.
PANELS: tuple[tuple[str, str, dict[str, Tensor]], ...] = (
    ("causal", "s", {}),
    ("scalable softmax", "s * log(n)", {}),
    ("soft cap", "tanh(s)", {}),
    ("ALiBi", "s - slope[h] * (i - j)", {"slope": torch.tensor([0.25])}),
    ("bias", "s + bias[h, min(i - j, 7)]", {"bias": torch.tensor([[0.0, 3, 2, 1, 0, 0, 0, 0]])}),
    ("forgetting gates", "s + c[h, i] - c[h, j]", {"c": GATES.log().cumsum(0)[None]}),
)


def weights(formula: str, tensors: dict[str, Tensor]) -> Tensor:
    """(T, T): the output, where the values are the identity."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, T, T)  # as many channels as tokens, so that the values can be the identity
    attend = build_attention(AttentionConfig("naive"))
    return attend(q, k, torch.eye(T)[None, None], score=Score(formula=formula), tensors=tensors).out[0, 0]


@figure("formula-weights")
def formula_weights() -> Chart:
    """The weights of one head for six formulas, as pictures."""

    def draw(drawing: Figure, palette: Palette) -> None:
        colours = LinearSegmentedColormap.from_list("weights", [palette["surface"], palette["flash"]])
        for place, (title, formula, tensors) in zip(drawing.subplots(3, 2).flat, PANELS, strict=True):
            place.imshow(weights(formula, tensors).sqrt(), cmap=colours, vmin=0, vmax=1)
            place.set_title(f"{title}\n{formula}", fontsize=8, color=palette["ink"])
            place.set_xticks([])
            place.set_yticks([])

    return Chart(
        "formula-weights",
        "Weights by formula",
        "A row is a query; the stronger the colour, the more.",
        draw,
        height=7.4,
    )
