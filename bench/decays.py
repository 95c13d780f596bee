"""How long the heads of a trained model's mixers remember: a picture of their decays.

    python -m bench.decays <run folder>      writes decays.png into it

A decay a per token halves a state in log(1/2) / log(a) tokens. Each head has a line from the 10th to the 90th
percentile over the tokens of README.md and the channels, and a dot at the median.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from matplotlib.figure import Figure
from torch import Tensor

from bench.machine import ROOT
from mixers import layers, mix
from recipe.drawing import COLOURS, Chart, label_axes, log_axis, render_png
from recipe.errors import UserError
from recipe.infer.trained import ModelChoice, Trained, load_trained

PERCENTILES = torch.tensor([0.1, 0.5, 0.9])


@torch.no_grad()
def half_lives(trained: Trained, text: str) -> list[Tensor]:
    """Of each layer with a decay (3, H): percentiles of the tokens after which half of a state is left."""
    found = []

    def recorded(*tensors: Tensor, **options: Any) -> Any:
        if (log_decay := options["log_decay"]) is not None:
            lives = (torch.tensor(0.5).log() / log_decay.float()).movedim(1, -1).flatten(0, -2)  # (tokens, H)
            found.append(lives.quantile(PERCENTILES, dim=0))
        return mix(*tensors, **options)

    tokens = trained.tokenizer.encode_ordinary(text)[: trained.model.seq_len]
    with patch.object(layers, "mix", recorded):
        trained.model(torch.tensor([tokens]))
    return found


def draw(figure: Figure, lives: Sequence[Tensor]) -> None:
    """The lines of all heads, layer by layer."""
    axes = figure.subplots()
    for layer, percentiles in enumerate(lives):
        for head, (low, middle, high) in enumerate(percentiles.T.tolist()):
            x = layer + (head + 0.5) / percentiles.shape[1] * 0.8 + 0.1
            axes.plot([x, x], [low, high], color=COLOURS["grid"], linewidth=4, solid_capstyle="round")
            axes.plot([x], [middle], "o", color=COLOURS["other-0"], markersize=4)
    whole = torch.cat([percentiles.flatten() for percentiles in lives])
    log_axis(axes, whole.min().item() / 1.5, whole.max().item() * 1.5)
    axes.set_xticks([layer + 0.5 for layer in range(len(lives))], [f"{layer + 1}" for layer in range(len(lives))])
    label_axes(axes, "tokens until half of a state is left", "layer with a mixer; a dot for each head")


def main() -> None:
    """Draw the picture."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.decays", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="a run folder")
    args = parser.parse_args()
    try:
        lives = half_lives(
            load_trained(args.run, ModelChoice(device="cpu")), (ROOT / "README.md").read_text(encoding="utf-8")
        )
    except UserError as error:
        parser.error(f"{error}")
    if not lives:
        parser.error(f"{args.run} has no layer with a decay; name a run of model=gdn or another mixer.")
    out = args.run / "decays.png"
    out.write_bytes(render_png(Chart("decays", "How long heads remember", "", lambda figure: draw(figure, lives))))
    print(out)


if __name__ == "__main__":
    main()
