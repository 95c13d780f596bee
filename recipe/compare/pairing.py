"""Pairs of runs with the same seed: they draw the same batches and masks, so each step can be compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from recipe.compare.runs import Run, Series


def by_seed(runs: Iterable[Run]) -> dict[int, Run]:
    """Runs by their seed; of several tries of one seed the one that came furthest."""
    ordered = sorted(runs, key=lambda run: (run.status == "completed", run.step, str(run.summary.get("started"))))
    return dict(sorted({run.seed: run for run in ordered}.items()))


def pairs_of(runs: Mapping[int, Run], references: Mapping[int, Run]) -> dict[int, tuple[Run, Run]]:
    """Each run with the reference of its seed, by the seeds that both have."""
    return {seed: (run, references[seed]) for seed, run in runs.items() if seed in references}


def difference(run: Run, reference: Run, metric: str = "train/loss") -> Series:
    """run - reference at the steps that both logged and where both are finite."""
    a, b = run.series(metric).finite(), reference.series(metric).finite()
    steps, in_a, in_b = np.intersect1d(a.steps, b.steps, return_indices=True)
    return Series(steps, a.values[in_a] - b.values[in_b])


def equal_to_the_bit(run: Run, reference: Run) -> bool:
    """Whether two runs logged the same losses at the same steps."""
    return all(
        bool(len(run.series(metric).steps) == len(reference.series(metric).steps))
        and all(map(np.array_equal, run.series(metric), reference.series(metric)))
        for metric in ("train/loss", "val/loss")
    ) and run.final("val/loss") == reference.final("val/loss")
