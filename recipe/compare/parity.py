"""Does an implementation equal the reference, up to rounding? Four measurements, and the verdict from them.

Layers alone   The probe inside a run compares each layer's attention with fp64, row by row.
               Runs of older versions have no such measurement, and are judged by the others.
Same weights   The probe inside a run compares logits and gradients of both on the run's weights, batch and dropout
               masks, beside the effect of rounding alone on the reference (parity/noise_*). Two correct implementations
               differ by about as much, a wrong one by tens to thousands of times as much; PARITY_MARGIN is allowed.
Curves         The training loss must be closer to the reference's of the same seed than the reference's seeds are to
               each other, as root mean squares over WINDOW of the run, because two curves that cross are close to
               each other by accident. Seeds draw different batches: this distinguishes the same training from another.
Final losses   Their floor is the effect of rounding on the loss of one step, added up over the updates as if it never
               cancelled. Training may amplify rounding beyond it. A difference above the floor is accepted if the
               first losses agreed to rounding, and counts against an implementation if they did not.

Parity holds when the last three were measured and all pass. It is broken when one fails, else it is open.
"""

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from recipe.compare.runs import Run, Series
from recipe.compare.sweeps import Cell, difference, pairs_of
from recipe.compare.verdict import Alone, Curve, Final, Gap, NotFinite, Probe, Verdict
from recipe.training.parity import PARITY_MARGIN

Array = NDArray[np.float64]

WINDOW = 0.1
EARLY = 0.1  # of the run
EPS = float(np.finfo(np.float32).eps)  # losses are computed in fp32, whatever the precision
ERRORS = ("parity/attention_error", "parity/attention_error_higher")
UNSEEN = "parity/attention_unseen"
MEASURES = {"logits_max_diff": "logits", "grad_rel_err": "gradients"}


def judge(cells: Sequence[Cell], reference: str = "naive") -> list[Verdict]:
    """Judge every implementation against `reference`, in each cell that has a reference run or a probe; none that
    computes another function."""
    return [
        _judge(cell, label, reference)
        for cell in cells
        if cell.of(reference) or rounding_of_a_step(cell.runs, reference) is not None
        for label in cell.labels()
        if label != reference and all(run.claims_parity for run in cell.of(label).values())
    ]


def _judge(cell: Cell, label: str, reference: str) -> Verdict:
    runs, references = cell.of(label), cell.of(reference)
    stopped = next((reason for run in runs.values() if (reason := _not_finite(run, cell, reference))), None)
    first = next(iter(runs.values()))
    if first.option("attention.dropout") and first.option("attention.rng") == "torch":
        return Verdict(label, cell, not_finite=stopped, gaps=(Gap.own_masks,))
    pairs = list(pairs_of(runs, references).values())
    probe = probe_worst(list(runs.values()), reference)
    curve = curve_worst(pairs, seed_spread(list(references.values())))
    final = final_worst(pairs, rounding_of_a_step([*runs.values(), *references.values()], reference))
    gaps = [] if probe else [Gap.no_probe]
    if not references:
        gaps.append(Gap.no_reference)
    elif pairs and len(references) == 1:
        gaps.append(Gap.single_seed)
    elif curve is None or curve.ratio is None or final is None:
        gaps.append(Gap.no_shared_losses)
    return Verdict(label, cell, probe, curve, final, stopped, tuple(gaps), alone_worst(list(runs.values())))


def _not_finite(run: Run, cell: Cell, reference: str) -> NotFinite | None:
    """A run's NaN or infinite loss at a step where another run's loss of the same seed is finite: the reference's or,
    if that did not run, that of any implementation with nothing left out."""
    step = run.diverged()
    if step is None:
        return None
    for other in [*cell.of(reference).values()] or cell.runs:
        fine, theirs = other.series("train/loss").finite().steps, other.diverged()
        lasted = len(fine) and fine[-1] >= step and (theirs is None or theirs > step)
        if other.seed == run.seed and lasted and not other.ablated:
            return NotFinite(step, run.seed, cell.label(other))
    return None


def alone_worst(runs: Sequence[Run]) -> Alone | None:
    """The worst of all checks in the runs of one implementation; None where none was made, as by older versions."""
    errors: dict[str, float] = {}
    worst, step, where, unseen = -1.0, 0, "", dict[str, None]()
    for run in runs:
        for record in run.records:
            names = (run.precision, str(record.get("parity/attention_precision")))
            for name, metric in zip(names, ERRORS, strict=True):
                # Where nothing was compared, older versions wrote 0, which is at no place.
                if metric not in record or record.get("parity/attention_worst") == "":
                    continue
                share = float(record[metric])  # "inf" is text
                errors[name] = max(errors.get(name, 0.0), share)
                if share > worst:
                    worst, step, where = share, int(record["step"]), str(record.get("parity/attention_worst", ""))
            unseen |= dict.fromkeys(filter(None, str(record.get(UNSEEN, "")).split("; ")))
    return Alone(errors, step, where, tuple(unseen)) if errors or unseen else None


def seed_spread(references: Sequence[Run]) -> Series | None:
    """Root-mean-square distance of two of the reference's seeds: their training losses, windowed, by step.

    None with fewer than two seeds that share logged steps.
    """
    squares: dict[int, list[float]] = {}
    for pair in combinations(references, 2):
        for step, distance in zip(*difference(*pair), strict=True):
            squares.setdefault(int(step), []).append(distance**2)
    steps = sorted(squares)
    distance = np.sqrt([np.mean(squares[step]) for step in steps])
    return Series(np.array(steps), rolling_rms(distance)) if steps else None


def curve_worst(pairs: Sequence[tuple[Run, Run]], spread: Series | None) -> Curve | None:
    """The worst window of the worst seed; None where no pair has a step in common."""
    curves = []
    for pair in pairs:
        gap = difference(*pair)
        if not len(gap.steps):
            continue
        distance = rolling_rms(gap.values)
        at, ratio = int(np.argmax(distance)), None
        if spread is not None:
            steps, here, there = np.intersect1d(gap.steps, spread.steps, return_indices=True)
            if len(steps):
                with np.errstate(divide="ignore", invalid="ignore"):  # 0 / 0 counts as 0
                    shares = np.where(distance[here] == 0, 0.0, distance[here] / spread.values[there])
                at, ratio = int(here[np.argmax(shares)]), float(np.max(shares))
        curves.append(Curve(float(distance[at]), ratio, int(gap.steps[at])))
    return max(curves, key=lambda curve: (curve.ratio or 0, curve.largest), default=None)


def final_worst(pairs: Sequence[tuple[Run, Run]], rounding: float | None) -> Final | None:
    """The pair whose final losses differ most; of interrupted runs, the last losses both have.

    rounding   effect of rounding on the loss of one step, from the probe
    """
    metric = "val/loss" if all(len(_trained(difference(*pair, "val/loss")).steps) for pair in pairs) else "train/loss"
    finals = []
    for pair in pairs:
        gap = _trained(difference(*pair, metric))
        if not len(gap.steps):
            continue
        # An evaluation covers many sequences, a step's training loss only its batch.
        last = gap.values[-1:] if metric == "val/loss" else gap.values[-window_of(len(gap.values)) :]
        size, floor = abs(float(last.mean())), None if rounding is None else rounding * float(gap.steps[-1])
        amplified = rounding is not None and floor is not None and size > floor and _began_within(pair, rounding)
        finals.append(Final(size, floor, amplified))
    return max(finals, key=lambda final: (final.agrees is False, final.difference), default=None)


def _trained(series: Series) -> Series:
    """The series from the first update on: before it all seeds are equally untrained."""
    return Series(series.steps[series.steps > 0], series.values[series.steps > 0])


def _began_within(pair: tuple[Run, Run], rounding: float) -> bool:
    """Whether the first losses of two runs agree up to rounding; true without early losses."""
    return all(
        abs(start.values[0]) <= PARITY_MARGIN * rounding * max(1, start.steps[0])
        for start in [difference(*pair, metric) for metric in ("val/loss", "train/loss")]
        if len(start.steps) and start.steps[0] <= EARLY * max(start.steps[-1], 1)
    )


def probe_worst(runs: Sequence[Run], reference: str) -> Probe | None:
    """The worst of every check in the runs of one implementation; None where none ran against `reference`.

    The loss does not decide: the difference of two scalars is near zero by accident too often to be a floor.
    """
    probed, probes = _probed(runs, reference), []
    for name in MEASURES:
        noises = _noises(probed, name)
        if not len(noises):
            continue
        least = max(float(np.median(noises)), EPS)
        for run in probed:
            steps, values, noise = beside_rounding(run, name)
            shares = np.nan_to_num(values / np.maximum(noise, least), nan=np.inf, posinf=np.inf)
            parameters = {record["step"]: record.get("parity/worst_parameter") for record in run.records}
            probes += [
                Probe(float(share), name, int(step), parameters.get(int(step)))
                for share, step in zip(shares, steps, strict=True)
            ]
    return max(probes, key=lambda probe: probe.ratio, default=None)


def beside_rounding(run: Run, measure: str) -> tuple[NDArray[np.int64], Array, Array]:
    """The steps at which a probe took one of MEASURES, the differences there, and the effects of rounding alone."""
    values, noise = run.series(f"parity/{measure}"), run.series(f"parity/noise_{measure}").finite()
    steps, here, there = np.intersect1d(values.steps, noise.steps, return_indices=True)
    return steps, values.values[here], noise.values[there]


def _probed(runs: Sequence[Run], reference: str) -> list[Run]:
    return [run for run in runs if run.option("parity.reference") == reference.split(" ")[0]]


def _noises(runs: Sequence[Run], measure: str) -> Array:
    """The effects of rounding that the probes of all runs measured."""
    return np.concatenate([np.zeros(0), *(run.series(f"parity/noise_{measure}").finite().values for run in runs)])


def rounding_of_a_step(runs: Sequence[Run], reference: str) -> float | None:
    """The effect of rounding on the reference's loss in one step: the largest that a probe measured, and at least one
    unit in the last place of an fp32 loss. None without a probe."""
    noises = _noises(_probed(runs, reference), "loss_diff")
    if not len(noises):
        return None
    losses = [loss for run in runs if (loss := run.series("train/loss").finite().last()) is not None]
    return max(float(np.max(noises)), EPS * max(map(abs, losses), default=1.0))


def rolling_rms(values: Array) -> Array:
    """Root mean square over a centred window of WINDOW of the points, cut off at the ends."""
    ones = np.ones(window_of(len(values)))
    middle = slice(len(ones) // 2, len(ones) // 2 + len(values))
    total, count = np.convolve(values**2, ones)[middle], np.convolve(np.ones(len(values)), ones)[middle]
    return np.sqrt(np.maximum(total, 0) / count)


def window_of(points: int) -> int:
    """An odd number of logged points: WINDOW of the run, and at least 11, because two seeds are one pair a point."""
    return max(11, int(WINDOW * points)) | 1
