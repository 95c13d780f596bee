"""Bytes moved as a function of fast memory, counted by running the algorithms, and the paper's theorem.

Dao et al. 2022, theorem 2: standard attention moves Theta(N d + N^2) numbers, FlashAttention Theta(N^2 d^2 / M).
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

from learn.problem import Problem, solve

LABELS = {"standard": "standard attention", "flash_1": "FlashAttention-1", "flash_2": "FlashAttention-2"}
# The page replaces the ink by its text colour; the others are readable on white and on black.
INK, COLOURS = "#123456", {"standard": "#d1495b", "flash_1": "#edae49", "flash_2": "#2e86ab"}


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


def count(N: int = 64, d: int = 8) -> Curves:
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


def draw(curves: Curves) -> str:
    """The curves as an SVG in the page's text colour."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    style: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "learn"}
    style |= {"font.family": "sans-serif", "axes.facecolor": "none"}
    style |= dict.fromkeys(inked, INK) | dict.fromkeys(
        ("axes.spines.top", "axes.spines.right", "legend.frameon"), False
    )
    with mpl.rc_context(style):
        figure = Figure(figsize=(7, 3.6), layout="constrained")
        axes = figure.add_subplot(xlabel="fast memory M (numbers)", ylabel="numbers moved")
        for name, counts in curves.moved.items():
            axes.loglog(curves.M, counts, marker="o", markersize=4, color=COLOURS[name], label=LABELS[name])
        for name, line, label in (("standard", ":", "N d + N²"), ("flash_1", "--", "N² d² / M")):
            axes.loglog(
                curves.M, curves.theorem[name], line, color=INK, linewidth=1, label=f"{label}, times a constant"
            )
        axes.legend()
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    svg = out.getvalue()
    return svg[svg.index("<svg") :].replace(INK, "currentColor")
