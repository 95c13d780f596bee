"""How often the arena and the referee are wrong, and how often they find a gain, on differences that are drawn.

    python -m recipe.compare.simulate            prints the table "Is it right?" of docs/arena.md
    python -m recipe.compare.simulate referee    prints those of docs/referee.md, in an hour

Every look that a plan has is taken, and every arm judged at the level of Holm's procedure, as compare.py does. Edits
are judged by the functions that the referee uses, many nights at once. A gain is in deviations of a pair.
"""

import math
import sys
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from recipe.compare.statistics import (
    ALPHA,
    FREEDOM,
    MOST_PAIRS,
    NO_GAINS,
    POWER,
    Calibration,
    Gains,
    Verdict,
    holm_levels,
    hopeless,
    judge,
    log_evidence,
    log_limit,
    outlier,
    paired,
    seeds_needed,
)
from recipe.wording import markdown_table

SWEEPS = 20_000
MARGIN = 0.5  # of the deviation of a difference
Array = NDArray[np.float64]
Draw = Callable[[np.random.Generator, int, int, int], Array]  # (sweeps, arms, seeds)
Noise = Callable[[np.random.Generator, Array], Array]
NIGHTS = 100_000
AT_ONCE = 10_000


def main(arguments: Sequence[str]) -> None:
    """Print the tables."""
    print("\n\n".join(referee_tables(NIGHTS) if "referee" in arguments else [arena_table()]))


def referee_tables(nights: int) -> list[str]:
    """Nights of edits that change nothing, and of one gain."""
    null = [
        ("change nothing", draw_normal, 0.0),
        ("the same, heavy tails: t(4)", draw_heavy, 0.0),
        ("the same, all paired with the same runs of the best", draw_shared, 0.0),
        ("double the deviation", draw_normal, 1.0),
        ("one in ten doubles it", draw_normal, 0.1),
    ]
    lines = []
    for name, noise, doubled in null:
        short, long = (spend(noise, doubled, size, nights) for size in (100, 1000))
        lines.append([name, share(short[0]), share(long[0]), f"at most {100 * ALPHA:g} %", f"{short[1]:.1f}"])
    return [
        markdown_table(["edits", "nights of 100 that keep any", "nights of 1,000", "promised", "pairs an edit"], lines),
        markdown_table(["a gain of", "as edit 1", "20", "100"], [gain_row(gain, nights) for gain in (4, 2, 1, 0.5)]),
    ]


def gain_row(gain: float, nights: int) -> list[str]:
    """How often a gain is kept after edits that make it worse, and with how many pairs (median)."""
    row = [f"{gain:g} deviations"]
    for place in (1, 20, 100):
        keeps, pairs = night(draw_normal, place, max(1, nights // 10), seed=1, gain=gain)
        last = keeps[:, -1]
        row.append(f"{100 * last.mean():.0f} %, {np.median(pairs[last, -1]):.0f} pairs" if last.any() else "0 %")
    return row


def spend(noise: Noise, doubled: float, size: int, nights: int) -> tuple[float, float]:
    """The share of nights that keep anything, and the mean number of pairs of an edit."""
    parts = range(0, nights, AT_ONCE)
    found = [night(noise, size, min(AT_ONCE, nights - start), seed=start, doubled=doubled) for start in parts]
    keeping = np.concatenate([keeps.any(1) for keeps, _ in found])
    return float(keeping.mean()), float(np.mean([pairs.mean() for _, pairs in found]))


def night(
    noise: Noise, size: int, nights: int, seed: int, *, doubled: float = 0.0, gain: float = 0.0
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Whether each edit was kept, and its pairs, both (nights, size), on a track with a calibration of FREEDOM.

    doubled  the share of edits that double the deviation
    gain     of the last edit, where those before it make it much worse; 0: no edit changes the mean
    """
    generator = np.random.default_rng(seed)
    keeps, pairs = np.zeros((nights, size), bool), np.zeros((nights, size), np.int64)
    calibration = Calibration(np.full(nights, FREEDOM), generator.chisquare(FREEDOM, nights))
    shared = generator.normal(size=(nights, MOST_PAIRS))
    for number in range(1, size + 1):
        wider = generator.random(nights) < doubled if 0 < doubled < 1 else doubled
        deviation, effect = 1.0 + wider * np.ones(nights), (gain if number == size else -9.0) if gain else 0.0
        limit = log_limit(number, keeps.sum(1))
        running, ended = np.arange(nights), np.zeros((3, nights))  # count, mean and squares of the gains
        gains = NO_GAINS
        for n in range(1, MOST_PAIRS + 1):
            gains = gains.add(effect + deviation[running] * noise(generator, shared[running, n - 1]))
            ended[:, running] = np.full(len(running), n), gains.mean, gains.squares
            prior = Calibration(*(part[running] for part in calibration))
            over = hopeless(gains, prior)
            if n > 1:
                won = ~over & (log_evidence(gains, prior) >= limit[running])
                keeps[running[won], number - 1] = over[won] = True
            running, gains = running[~over], Gains(n, gains.mean[~over], gains.squares[~over])
            if not len(running):
                break
        pairs[:, number - 1] = ended[0]
        calibration = calibration.add(Gains(*ended))
    return keeps, pairs


def draw_normal(generator: np.random.Generator, shared: Array) -> Array:
    """Noise of variance 1, as `shared` has."""
    return generator.normal(size=len(shared))


def draw_heavy(generator: np.random.Generator, shared: Array) -> Array:
    """The same from Student's t with 4 degrees of freedom."""
    return generator.standard_t(4, len(shared)) / math.sqrt(2)


def draw_shared(generator: np.random.Generator, shared: Array) -> Array:
    """The same where half the variance is the baseline's run, which all edits of the night share."""
    return (generator.normal(size=len(shared)) - shared) / math.sqrt(2)


def arena_table() -> str:
    """The arena's verdicts and intervals."""
    needed = seeds_needed(MARGIN, 1.0, ALPHA) or 0
    limit, covered = f"at most {100 * ALPHA:g} %", f"{100 * (1 - ALPHA):g} %"
    lines = [
        [name, f"{arms} x {', '.join(map(str, looks))}", share(false_verdicts(draw, arms, looks)), limit,
         share(coverage(draw, looks[0])), covered]
        for name, draw, arms, looks in (
            ("equal arms, normal differences", lambda generator, *size: generator.normal(size=size), 1, (6,)),
            ("equal arms, losses skewed alike (gamma)", gamma, 3, (5, 10)),
            ("one arm with rare plateaus: 6 deviations, 1 seed in 10", plateaus, 1, (6,)),
            ("the same, of those without a warning", plateaus_unseen, 1, (6,)),
        )
    ]  # fmt: skip
    low, high = paired(np.random.default_rng(2).normal(-MARGIN, size=(SWEEPS, needed))).interval(ALPHA)
    found = [judge(interval, MARGIN) for interval in zip(low, high, strict=True)].count(Verdict.better)
    lines.append(
        [f"better by the margin, {needed} seeds", f"1 x {needed}", share(found / SWEEPS), f"{100 * POWER:g} %", "", ""]
    )
    return markdown_table(
        [
            "differences",
            "arms x seeds",
            "*better* or *worse*",
            "promised",
            "95 % interval holds the truth",
            "promised",
        ],
        lines,
    )


def share(value: float) -> str:
    return f"{100 * value:.1f} %"


def gamma(generator: np.random.Generator, sweeps: int, arms: int, seeds: int) -> Array:
    """Differences of equal arms whose losses are skewed; all share the baseline's."""
    losses = generator.gamma(9.0, 1 / 3, (sweeps, arms + 1, seeds))
    return losses[:, 1:] - losses[:, :1]


def plateaus(generator: np.random.Generator, sweeps: int, arms: int, seeds: int) -> Array:
    """Differences of arms with equal means, of which one ends 6 deviations higher with a tenth of its seeds."""
    late = 6.0 * (generator.random((sweeps, arms, seeds)) < 0.1)
    return generator.normal(size=(sweeps, arms, seeds)) + late - 0.6


def plateaus_unseen(generator: np.random.Generator, sweeps: int, arms: int, seeds: int) -> Array:
    """Those of `plateaus` about which the page has no warning."""
    drawn = plateaus(generator, sweeps, arms, seeds)
    return drawn[[all(outlier(list(of_arm), MARGIN) is None for of_arm in sweep) for sweep in drawn]]


def false_verdicts(draw: Draw, arms: int, looks: Sequence[int]) -> float:
    """The share of sweeps of equal arms in which any is called better or worse, at any look."""
    drawn = draw(np.random.default_rng(0), SWEEPS, arms, looks[-1])
    false = np.zeros(len(drawn), bool)
    for n in looks:
        p = paired(drawn[:, :, :n]).p
        false |= (p <= np.array([holm_levels(list(of_sweep), ALPHA / len(looks)) for of_sweep in p])).any(1)
    return float(false.mean())


def coverage(draw: Draw, seeds: int) -> float:
    """The share of 95 % intervals that hold 0, the mean of what is drawn."""
    low, high = paired(draw(np.random.default_rng(1), SWEEPS, 1, seeds)).interval(ALPHA)
    return float(np.mean((low <= 0) & (high >= 0)))


if __name__ == "__main__":
    main(sys.argv[1:])
