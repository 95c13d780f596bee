"""How often the arena's verdicts are false, and how often its intervals hold the truth, on differences that are drawn.

    python -m recipe.compare.simulate        prints the table "Is it right?" of docs/arena.md

Every look that a plan has is taken, and every arm judged at the level of Holm's procedure, as compare.py does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from recipe.compare.statistics import ALPHA, POWER, Verdict, holm_levels, judge, outlier, paired, seeds_needed
from recipe.wording import markdown_table

SWEEPS = 20_000
MARGIN = 0.5  # of the deviation of a difference
Draw = Callable[[np.random.Generator, int, int, int], NDArray[np.float64]]  # (sweeps, arms, seeds)


def main() -> None:
    """Print the table."""
    needed = seeds_needed(MARGIN, 1.0, ALPHA) or 0
    limit, covered = f"at most {100 * ALPHA:g} %", f"{100 * (1 - ALPHA):g} %"
    lines = [
        [name, f"{arms} x {', '.join(map(str, looks))}", share(false_verdicts(draw, arms, looks)), limit,
         share(coverage(draw, looks[0])), covered]
        for name, draw, arms, looks in (
            ("equal arms, normal differences", normal, 1, (6,)),
            ("equal arms, losses skewed alike (gamma)", gamma, 3, (5, 10)),
            ("one arm with rare plateaus: 6 deviations, 1 seed in 10", plateaus, 1, (6,)),
            ("the same, of those without a warning", plateaus_unseen, 1, (6,)),
        )
    ]  # fmt: skip
    found = float(np.mean([verdict is Verdict.better for verdict in verdicts(better_by_the_margin, needed)]))
    lines.append([f"better by the margin, {needed} seeds", f"1 x {needed}", share(found), f"{100 * POWER:g} %", "", ""])
    head = [
        "differences",
        "arms x seeds",
        "*better* or *worse*",
        "promised",
        "95 % interval holds the truth",
        "promised",
    ]
    print(markdown_table(head, lines))


def share(value: float) -> str:
    return f"{100 * value:.1f} %"


def normal(generator: np.random.Generator, sweeps: int, arms: int, seeds: int) -> NDArray[np.float64]:
    """Differences of equal arms without skew."""
    return generator.normal(size=(sweeps, arms, seeds))


def better_by_the_margin(generator: np.random.Generator, sweeps: int, arms: int, seeds: int) -> NDArray[np.float64]:
    """Differences of arms that are better by the margin."""
    return generator.normal(-MARGIN, size=(sweeps, arms, seeds))


def gamma(generator: np.random.Generator, sweeps: int, arms: int, seeds: int) -> NDArray[np.float64]:
    """Differences of equal arms whose losses are skewed; all share the baseline's."""
    losses = generator.gamma(9.0, 1 / 3, (sweeps, arms + 1, seeds))
    return losses[:, 1:] - losses[:, :1]


def plateaus(generator: np.random.Generator, sweeps: int, arms: int, seeds: int) -> NDArray[np.float64]:
    """Differences of arms with equal means, of which one ends 6 deviations higher with a tenth of its seeds."""
    late = 6.0 * (generator.random((sweeps, arms, seeds)) < 0.1)
    return generator.normal(size=(sweeps, arms, seeds)) + late - 0.6


def plateaus_unseen(generator: np.random.Generator, sweeps: int, arms: int, seeds: int) -> NDArray[np.float64]:
    """Those of `plateaus` in which no seed is far from the others."""
    drawn = plateaus(generator, sweeps, arms, seeds)
    return drawn[[all(outlier(list(of_arm)) is None for of_arm in sweep) for sweep in drawn]]


def false_verdicts(draw: Draw, arms: int, looks: Sequence[int]) -> float:
    """The share of sweeps of equal arms in which any is called better or worse, at any look."""
    drawn = draw(np.random.default_rng(0), SWEEPS, arms, looks[-1])
    false = np.zeros(len(drawn), bool)
    for n in looks:
        p = paired(drawn[:, :, :n]).p
        levels = np.array([holm_levels(list(of_sweep), ALPHA / len(looks)) for of_sweep in p])
        false |= (p <= levels).any(1)
    return float(false.mean())


def coverage(draw: Draw, seeds: int) -> float:
    """The share of 95 % intervals that hold 0, the mean of what is drawn."""
    low, high = paired(draw(np.random.default_rng(1), SWEEPS, 1, seeds)).interval(ALPHA)
    return float(np.mean((low <= 0) & (high >= 0)))


def verdicts(draw: Draw, seeds: int) -> list[Verdict]:
    """The verdict on one arm in each sweep, with a margin of MARGIN."""
    low, high = paired(draw(np.random.default_rng(2), SWEEPS, 1, seeds)[:, 0]).interval(ALPHA)
    return [judge(interval, MARGIN) for interval in zip(low, high, strict=True)]


if __name__ == "__main__":
    main()
