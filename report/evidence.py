"""How far an implementation is from the reference, and how far it may be: three measurements on curves and probes.

Same weights   The probe inside a run compares logits and gradients of both on the run's weights, batch and dropout
               masks, beside what rounding alone does to the reference (parity/noise_*). Two right implementations
               are about as far apart as the reference is from its exact self; MARGIN times that is allowed, at every
               check. This is what tells a wrong implementation: it is off by tens to thousands of times as much,
               long before a loss curve shows it.
Curves         At every step the training loss must be closer to the reference's of the same seed than the seeds of
               the reference are to each other. Both distances are root mean squares over a window of WINDOW of the
               run, because two curves that cross are close to each other by accident. Seeds also draw different
               batches, so this band is wide: it tells the same training from another, not a right kernel from a wrong.
Final losses   They may differ by the reference's own floating-point floor: what rounding does to the loss of one
               step by the probe, added up over the updates as if it never cancelled. Training may amplify rounding
               exponentially, at last until two runs are strangers, as two seeds are. A difference that began within
               the floor is therefore allowed to grow to STRANGERS times the distance between the seeds' final losses;
               one that was there from the start is not. Nothing is allowed beyond that limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from report.record import Run, Series
from run_folder import PARITY_MARGIN as MARGIN

Array = NDArray[np.float64]

WINDOW = 0.1
EARLY = 0.1  # of the run
# How many times the distance that so many seeds show two runs may differ: Student's t at 99.5 %, each seed beyond the
# first counting for two degrees of freedom, because the latter half of a run has more than one evaluation.
STRANGERS = {2: 9.9, 3: 4.6, 4: 3.7, 5: 3.4}
STRANGERS_BEYOND = 3.2
EPS = float(np.finfo(np.float32).eps)  # losses are computed in fp32, whatever the precision

MEASURES = {"logits_max_diff": "logits", "grad_rel_err": "gradients"}


@dataclass(frozen=True)
class Band:
    """How far the reference's seeds are from each other.

    seeds     that were compared, two or more
    train     root-mean-square distance of two seeds' training losses, windowed, by step
    final     by metric, root-mean-square distance of two seeds' losses, pooled over the latter half of the run
    strangers how many times `final` two runs may differ that have nothing but their seed in common
    """

    seeds: tuple[int, ...]
    train: Series
    final: Mapping[str, float]

    @property
    def strangers(self) -> float:
        return STRANGERS.get(len(self.seeds), STRANGERS_BEYOND)


@dataclass(frozen=True)
class ProbeEvidence:
    """The worst check at the same weights: how many times the reference's own rounding, in which measure, and where."""

    checks: int
    ratio: float
    measure: str
    step: int
    parameter: str | None
    worst: Mapping[str, float]  # loss_diff, logits_max_diff, grad_rel_err, and noise_* of each

    @property
    def agrees(self) -> bool:
        return self.ratio <= MARGIN


@dataclass(frozen=True)
class CurveEvidence:
    """The largest distance to the reference of the same seed; as a share of the seeds' distance where that is known."""

    seeds: tuple[int, ...]
    last_step: int
    largest: float
    ratio: float | None
    step: int

    @property
    def agrees(self) -> bool | None:
        return None if self.ratio is None else self.ratio < 1


@dataclass(frozen=True)
class FinalEvidence:
    """The difference of the final losses at the same seed, of the worst seed.

    rounding  what the reference's rounding adds up to over the run; None without a probe
    band      the distance between the seeds' final losses; None where it was not measured
    limit     what no two right runs differ by, from the band
    grown     whether the difference began within rounding, so that what it became is training's work
    """

    metric: str
    step: int
    difference: float
    rounding: float | None
    band: float | None
    limit: float | None
    grown: bool

    @property
    def floor(self) -> float | None:
        """What is allowed without training's amplification; None where nothing was measured to say."""
        return min((x for x in (self.rounding, self.limit) if x is not None), default=None)

    @property
    def allowed(self) -> float | None:
        """The limit for a difference that training has amplified, the floor for any other."""
        return self.limit if self.grown and self.limit is not None else self.floor

    @property
    def agrees(self) -> bool | None:
        return None if self.allowed is None else self.difference <= self.allowed


def seed_band(references: Sequence[Run]) -> Band | None:
    """How far the reference's seeds are from each other; None with fewer than two that have curves."""
    runs = [run for run in references if len(run.series("train/loss").finite())]
    if len(runs) < 2:
        return None
    train = _spread([run.series("train/loss") for run in runs])
    if not len(train):
        return None
    train = Series(train.steps, rolling_rms(train.values, window_of(len(train))))
    final = {}
    for metric in ("val/loss", "train/loss"):
        apart = _spread([_trained(run.series(metric)) for run in runs])
        if len(apart):
            final[metric] = _rms(apart.values[len(apart) // 2 :])
    return Band(tuple(run.seed for run in runs), train, final)


def _spread(curves: Sequence[Series]) -> Series:
    """Root-mean-square distance of two of the curves, at each step that two or more have."""
    steps = np.unique(np.concatenate([curve.steps for curve in curves]))
    table = np.full((len(curves), len(steps)), np.nan)
    for row, curve in zip(table, curves, strict=True):
        row[np.searchsorted(steps, curve.steps)] = curve.values
    table[~np.isfinite(table)] = np.nan
    enough = np.isfinite(table).sum(axis=0) >= 2
    # The mean square of the difference of two draws is twice their variance.
    return Series(steps[enough], np.sqrt(2 * np.nanvar(table[:, enough], axis=0, ddof=1)))


def difference(run: Run, reference: Run, metric: str = "train/loss") -> Series:
    """run - reference at the steps that both logged and where both are finite."""
    a, b = run.series(metric).finite(), reference.series(metric).finite()
    steps, in_a, in_b = np.intersect1d(a.steps, b.steps, return_indices=True)
    return Series(steps, a.values[in_a] - b.values[in_b])


def curve_evidence(pairs: Sequence[tuple[Run, Run]], band: Band | None) -> CurveEvidence | None:
    """The worst window of the worst seed; None where no pair has a step in common."""
    worst: CurveEvidence | None = None
    seeds = tuple(run.seed for run, _ in pairs)
    for pair in pairs:
        apart = difference(*pair)
        if not len(apart):
            continue
        distance = rolling_rms(apart.values, window_of(len(apart)))
        at, ratio = int(np.argmax(distance)), None
        if band:
            steps, here, there = np.intersect1d(apart.steps, band.train.steps, return_indices=True)
            if len(steps):
                shares = _shares(distance[here], band.train.values[there])
                at, ratio = int(here[np.argmax(shares)]), float(np.max(shares))
        found = CurveEvidence(seeds, int(apart.steps[-1]), float(distance[at]), ratio, int(apart.steps[at]))
        if worst is None or (found.ratio or 0, found.largest) > (worst.ratio or 0, worst.largest):
            worst = found
    return worst


def final_evidence(pairs: Sequence[tuple[Run, Run]], band: Band | None, rounding: float | None) -> FinalEvidence | None:
    """The pair whose final losses differ most; of interrupted runs, the last losses both have.

    rounding   what rounding does to the loss of one step, from the probe
    """
    metric = "val/loss" if all(len(_trained(difference(*pair, "val/loss"))) for pair in pairs) else "train/loss"
    found = []
    for pair in pairs:
        apart = _trained(difference(*pair, metric))
        if not len(apart):
            continue
        # Evaluations are of many sequences; a step's training loss is of its batch.
        last = apart.values[-1:] if metric == "val/loss" else apart.values[-window_of(len(apart)) :]
        step = int(apart.steps[-1])
        between = band.final.get(metric) if band else None
        found.append(
            FinalEvidence(
                metric=metric,
                step=step,
                difference=abs(float(last.mean())),
                rounding=None if rounding is None else rounding * step,
                band=between,
                limit=band.strangers * between if band and between is not None else None,
                grown=rounding is None or _began_within(pair, rounding),
            )
        )
    return max(found, key=lambda final: (final.agrees is False, final.difference), default=None)


def _began_within(pair: tuple[Run, Run], rounding: float) -> bool:
    """Whether the first losses of two runs differ by no more than rounding explains; true where none are early."""
    starts = [difference(*pair, metric) for metric in ("val/loss", "train/loss")]
    return all(
        abs(apart.values[0]) <= MARGIN * rounding * max(1, apart.steps[0])
        for apart in starts
        if len(apart) and apart.steps[0] <= EARLY * max(apart.steps[-1], 1)
    )


def probe_evidence(runs: Sequence[Run], reference: str) -> ProbeEvidence | None:
    """The worst of every check in the runs of one implementation; None where none ran against `reference`.

    The loss does not decide: the difference of two scalars is near zero by accident too often to be a floor.
    """
    probed = [run for run in runs if run.option("parity.reference", "naive") == reference.split(" ")[0]]
    checks: list[tuple[float, str, int, str | None]] = []
    worst: dict[str, float] = {}
    for name in ("loss_diff", *MEASURES):
        for kind in (name, f"noise_{name}"):
            values = [run.series(f"parity/{kind}").values for run in probed]
            if values and len(found := np.concatenate(values)):
                worst[kind] = float(np.max(np.nan_to_num(found, nan=np.inf, posinf=np.inf)))
    for name in MEASURES:
        noises = [run.series(f"parity/noise_{name}").finite().values for run in probed]
        if not noises or not len(pooled := np.concatenate(noises)):
            continue
        for run in probed:
            apart, noise = run.series(f"parity/{name}"), run.series(f"parity/noise_{name}").finite()
            steps, here, there = np.intersect1d(apart.steps, noise.steps, return_indices=True)
            floor = np.maximum(noise.values[there], max(float(np.median(pooled)), EPS))
            shares = np.nan_to_num(apart.values[here] / floor, nan=np.inf, posinf=np.inf)
            parameters = run.texts.get("parity/worst_parameter", {})
            checks += [
                (float(share), name, int(step), parameters.get(int(step)))
                for share, step in zip(shares, steps, strict=True)
            ]
    if not checks:
        return None
    ratio, measure, step, parameter = max(checks, key=lambda check: check[0])
    counted = sum(len(run.series("parity/loss_diff")) for run in probed)
    return ProbeEvidence(counted, ratio, measure, step, parameter, worst)


def rounding_of_a_step(runs: Sequence[Run], reference: str) -> float | None:
    """What rounding does to the reference's loss in one step: the probe's largest, and no less than one unit in the
    last place of a loss in fp32. None where no probe ran."""
    probed = [run for run in runs if run.option("parity.reference", "naive") == reference.split(" ")[0]]
    noises = np.concatenate([np.zeros(0), *(run.series("parity/noise_loss_diff").finite().values for run in probed)])
    if not len(noises):
        return None
    losses = [loss for run in runs if (loss := run.series("train/loss").finite().last()) is not None]
    return max(float(np.max(noises)), EPS * max(map(abs, losses), default=1.0))


def rolling_rms(values: Array, window: int) -> Array:
    """Root mean square over a centred window, cut off at the ends."""
    ones = np.ones(window)
    total = np.convolve(values**2, ones)[window // 2 : window // 2 + len(values)]
    count = np.convolve(np.ones(len(values)), ones)[window // 2 : window // 2 + len(values)]
    return np.sqrt(np.maximum(total, 0) / count)


def window_of(points: int) -> int:
    """An odd number of logged points: WINDOW of the run, and at least 11, because two seeds are one pair a point."""
    return max(11, int(WINDOW * points)) | 1


def _rms(values: Array) -> float:
    return float(np.sqrt(np.mean(values**2)))


def _shares(distance: Array, band: Array) -> Array:
    """distance / band, where nothing over nothing is nothing."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(distance == 0, 0.0, distance / band)


def _trained(series: Series) -> Series:
    """Without what was measured before the first update, when all seeds know nothing alike."""
    return Series(series.steps[series.steps > 0], series.values[series.steps > 0])
