"""The page: the ladder with its checks, the walk through FlashAttention, and the bytes it moves, in one file.

The bytes are counted by running the algorithms, beside the paper's theorem. Dao et al. 2022, theorem 2: standard
attention moves Theta(N d + N^2) numbers, FlashAttention Theta(N^2 d^2 / M).

Every number that the page shows was recorded from the functions of this package (tracing.py). The page holds all
recordings, compressed, and needs no network.
"""

import base64
import inspect
import itertools
import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import torch
from matplotlib.figure import Figure
from torch import Tensor

from learn.flash import block_sizes, lowest
from learn.ladder import Measured, silent_error
from learn.problem import Problem, prepared, solve
from learn.tracing import Recording, record
from learn.why import reasons
from recipe.drawing import COLOURS, Chart, label_axes, legend, log_axis, render_svg

TEMPLATES = Path(__file__).parent / "templates"
# The choices of the page's controls. A window is causal.
CHOICES: dict[str, tuple[Any, ...]] = {
    "algorithm": ("flash_1", "flash_2"),
    "direction": ("forward", "backward"),
    "N": (5, 8),
    "d": (2, 3),
    "M": (36, 59, 120),
    "mask": ("full", "causal", "window 2"),
    "dropout": (0.0, 0.25),
}
FIRST = {"algorithm": "flash_2", "direction": "forward", "N": 5, "d": 3, "M": 59, "mask": "full", "dropout": 0.0}
BYTES = 4  # of a number: fp32
LABELS = {"standard": "standard attention", "flash_1": "FlashAttention-1", "flash_2": "FlashAttention-2"}
TONES = {"standard": "naive", "flash_1": "tiled", "flash_2": "flash"}


def problem_of(choice: dict[str, Any]) -> Problem:
    """The problem of a setting of the controls."""
    mask = choice["mask"]
    window = int(mask.split()[1]) if mask.startswith("window") else 0
    return Problem(choice["N"], choice["d"], choice["M"], mask != "full", window, choice["dropout"])


def record_choice(choice: dict[str, Any]) -> Recording:
    """Run the algorithm of a setting, and record it."""
    ready = prepared(problem_of(choice), choice["algorithm"], backward=choice["direction"] == "backward")
    return record(ready.function, ready.slow, ready.arguments)


def choices() -> Iterator[dict[str, Any]]:
    """Every setting of the controls."""
    for values in itertools.product(*CHOICES.values()):
        yield dict(zip(CHOICES, values, strict=True))


def shown(value: float) -> str:
    """A number as the page shows it."""
    if math.isnan(value):
        return "nan"
    if value <= lowest(torch.float32):
        return "−∞" if math.isinf(value) else "lowest"
    return f"{value:.2f}".replace("-", "−")


def numbers(tensor: Tensor) -> list[list[str]]:
    """A matrix as the page shows it, row by row."""
    return [[shown(value) for value in row] for row in tensor.reshape(len(tensor), -1).tolist()]


def packed(recording: Recording, choice: dict[str, Any]) -> dict[str, Any]:
    """The recording of a setting for the page: after each step only what changed."""
    problem = problem_of(choice)
    steps: list[dict[str, Any]] = []
    before: dict[str, dict[str, Tensor]] = {"fast": {}, "slow": {}}
    for step in recording.steps:
        entry: dict[str, Any] = {"line": step.line, "read": step.read, "written": step.written}
        entry |= {name: [rows.start, rows.stop] for name, rows in step.tile.items()}
        if step.idle:
            entry["idle"] = sorted(step.idle)
        if step.moves:
            entry["moves"] = [[move.name, move.rows.start, move.rows.stop, move.kind] for move in step.moves]
        for kind, tensors in (("fast", step.fast), ("slow", step.slow)):
            old = before[kind]
            entry[kind] = {
                name: numbers(tensor)
                for name, tensor in tensors.items()
                if name not in old or not torch.equal(tensor, old[name])
            }
            before[kind] = tensors
        steps.append(entry)
    B_r, B_c = block_sizes(problem.d, problem.M)
    return {
        "source": recording.source,
        "why": reasons(f"{choice['algorithm']}_{choice['direction']}", recording.source),
        "steps": steps,
        "B_r": B_r,
        "B_c": B_c,
        "visible": problem.visible().int().tolist(),
        "kept": (problem.dropout_factors() != 0).int().tolist(),
    }


def compressed(value: Any) -> str:
    """JSON, deflated, in base64: a browser can unpack it without a library."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


@torch.inference_mode()
def render(ladder: list[Measured]) -> str:
    """The page as HTML."""
    recordings = {
        "|".join(str(choice[name]) for name in CHOICES): packed(record_choice(choice), choice) for choice in choices()
    }
    line, wrong, right = silent_error()
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    curves = count_traffic()
    return environment.get_template("page.html.j2").render(
        ladder=[(entry, inspect.getsource(entry.rung.function)) for entry in ladder],
        silent={"line": line, "wrong": wrong, "right": right},
        choices=CHOICES,
        labels=LABELS,
        first=json.dumps({name: str(value) for name, value in FIRST.items()}),
        order=json.dumps(list(CHOICES)),
        recordings=compressed(recordings),
        curves=curves,
        chart=render_svg(Chart("traffic", "Numbers moved", "", partial(draw_traffic, curves=curves))),
        bytes=BYTES,
        style=(TEMPLATES / "style.css").read_text(encoding="utf-8"),
        script=(TEMPLATES / "walk.js").read_text(encoding="utf-8"),
        isinf=math.isinf,
    )


@dataclass(frozen=True)
class Curves:
    """Numbers moved by a forward and a backward pass together, for each size M of fast memory.

    theorem  N d + N^2 and N^2 d^2 / M, each times a constant: the first measured with standard attention at half the
             length, the second with FlashAttention-1 at the smallest M
    """

    N: int
    d: int
    M: tuple[int, ...]
    moved: dict[str, tuple[int, ...]]
    theorem: dict[str, tuple[float, ...]]


def count_traffic(N: int = 64, d: int = 8) -> Curves:
    """Run each algorithm with fast memories that hold one row of each matrix, two rows, and so on up to all.

    FlashAttention-2 takes tiles of M / 4d queries too: it has no reason for shorter tiles of queries than of keys.
    """
    sizes = tuple(4 * d * 2**k for k in range(N.bit_length()) if 2**k <= N)
    moved = {name: tuple(_moved(Problem(N, d, M), name) for M in sizes) for name in LABELS}
    half = N // 2
    standard = _moved(Problem(half, d, sizes[0]), "standard") / (half * d + half**2) * (N * d + N**2)
    flash = tuple(moved["flash_1"][0] * sizes[0] / M for M in sizes)
    return Curves(N, d, sizes, moved, {"standard": (standard,) * len(sizes), "flash_1": flash})


def _moved(problem: Problem, name: str) -> int:
    blocks = (problem.M // (4 * problem.d),) * 2 if name == "flash_2" else None
    solution = solve(problem, name, backward=True, blocks=blocks)
    return solution.before.total + solution.traffic.total


def draw_traffic(figure: Figure, curves: Curves) -> None:
    """The numbers moved over the size of fast memory."""
    axes = figure.add_subplot()
    for name, counts in curves.moved.items():
        axes.plot(curves.M, counts, marker="o", markersize=4, color=COLOURS[TONES[name]], label=LABELS[name])
    for name, line, label in (("standard", ":", "N d + N²"), ("flash_1", "--", "N² d² / M")):
        axes.plot(
            curves.M, curves.theorem[name], line, color=COLOURS["ink"], linewidth=1, label=f"{label}, times a constant"
        )
    label_axes(axes, "numbers moved", "fast memory M (numbers)")
    log_axis(axes, axes.dataLim.y0 / 1.3, axes.dataLim.y1 * 1.3)
    axes.set_xscale("log", base=2)
    axes.set_xticks(curves.M, [f"{M:,}" for M in curves.M])
    legend(figure, axes)
