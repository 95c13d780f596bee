"""docs/formulas.md: the weights that formulas give; docs/notes/formulas.md: their time."""

from __future__ import annotations

import torch
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from torch import Tensor

from attention import AttentionConfig, Score, build_attention
from bench.attention.formulas import ROWS
from bench.markdown import table
from bench.record import Row
from bench.tables.blocks import Rows, block, figure
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


@block("formulas", "formulas")
def formulas(rows: Rows) -> str:
    """The time of each score over causal attention's, forward and backward, and FlexAttention's."""
    columns = {
        "head size 128": ("flash", 128, 0.0),
        "with dropout 0.1": ("flash", 128, 0.1),
        "compiled flex, 128": ("flex", 128, 0.0),
        "head size 64": ("flash", 64, 0.0),
    }
    found = {(row["score"], row["implementation"], row["head_size"], row["dropout"]): row for row in rows}
    lines = [[score.name, *(both(found.get((score.name, *column))) for column in columns.values())] for score in ROWS]
    causal = [found[ROWS[0].name, *column] for column in columns.values()]
    lines.insert(0, ["causal attention, ms", *(", ".join(times(row)) for row in causal)])
    return table(["forward, backward", *columns], lines)


def times(row: Row) -> list[str]:
    """Milliseconds of both passes."""
    return [f"{row[way]['ms']:.2f}" for way in ("forward", "backward")]


def both(row: Row | None) -> str:
    """The ratios of both passes."""
    if row is None:
        return ""
    return ", ".join("fails" if "failed" in row[way] else f"{row[way]['ratio']:.2f}" for way in ("forward", "backward"))
