"""Is an implementation the reference, up to rounding? A verdict, from what report/evidence.py measures.

    verdict = judge(find_runs([sweep]).runs)
    print(verdict.holds, verdict.sentence)

Parity holds when all three were measured and none objects; it is broken when one objects; else it is open, and the
verdict names what was not measured and is therefore not claimed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from report.evidence import (
    MEASURES,
    Band,
    CurveEvidence,
    FinalEvidence,
    ProbeEvidence,
    curve_evidence,
    final_evidence,
    probe_evidence,
    rounding_of_a_step,
    seed_band,
)
from report.groups import Group, describe, group_runs
from report.numbers import size
from report.record import Run


class Outcome(Enum):
    """What the measurements allow to say."""

    holds = "holds"
    broken = "broken"
    open = "open"


@dataclass(frozen=True)
class Judgement:
    """One implementation against the reference, in one group of comparable runs."""

    label: str
    group: Group
    outcome: Outcome
    probe: ProbeEvidence | None
    curve: CurveEvidence | None
    final: FinalEvidence | None
    objections: tuple[str, ...]  # why it is broken
    missing: tuple[str, ...]  # why it is open

    @property
    def seeds(self) -> tuple[int, ...]:
        return self.curve.seeds if self.curve else ()

    @property
    def telling(self) -> bool:
        """Whether anything was measured that could decide: a probe, or a curve beside a band."""
        return bool(self.objections or self.probe or (self.curve and self.curve.ratio is not None))


@dataclass(frozen=True)
class Verdict:
    """`holds` is True where every judgement holds, False where one is broken, else None; `sentence` says why."""

    holds: bool | None
    sentence: str
    judgements: tuple[Judgement, ...]


def judge(runs: Sequence[Run], reference: str = "naive") -> Verdict:
    """Judge every implementation among `runs` against `reference`, wherever runs may be compared.

    runs       of one or several sweeps, from report.runs.find_runs
    reference  the label of the implementation to compare with
    """
    return judge_groups(group_runs(runs), reference)


def judge_groups(groups: Sequence[Group], reference: str = "naive") -> Verdict:
    """The verdict over runs that are grouped already."""
    ran = any(group.of(reference) for group in groups)
    judgements = tuple(judgement for group in groups for judgement in judge_group(group, reference, ran))
    outcomes = {judgement.outcome for judgement in judgements}
    holds = False if Outcome.broken in outcomes else True if outcomes == {Outcome.holds} else None
    return Verdict(holds, _sentence(judgements, groups, reference), judgements)


def judge_group(group: Group, reference: str = "naive", ran: bool = False) -> list[Judgement]:
    """The implementations of one group; empty where neither a run of the reference nor a probe speaks of them.

    ran  whether the reference ran in any group
    """
    references = group.of(reference)
    if not references and rounding_of_a_step(group.runs, reference) is None:
        return []
    band = seed_band(list(references.values()))
    others = [label for label in group.labels() if label != reference]
    return [_judge(group, label, reference, references, band, ran) for label in others]


def _judge(
    group: Group, label: str, reference: str, references: Mapping[int, Run], band: Band | None, ran: bool
) -> Judgement:
    runs = group.of(label)
    pairs = [(run, references[seed]) for seed, run in runs.items() if seed in references]
    objections = [sentence for run in runs.values() if (sentence := _divergence(run, _beside(group, run, references)))]
    missing: list[str] = []

    if _draws_its_own_masks(next(iter(runs.values()))):
        missing.append(f"{label} draws dropout masks of its own (attention.rng=torch)")
        return Judgement(label, group, Outcome.open, None, None, None, (), tuple(missing))

    probe = probe_evidence(list(runs.values()), reference)
    curve = curve_evidence(pairs, band)
    final = final_evidence(pairs, band, rounding_of_a_step([*runs.values(), *references.values()], reference))

    if probe is None:
        missing.append(f"{_no_probe(list(runs.values()), reference)}, so that a difference is rounding is not claimed")
    elif not probe.agrees:
        where = f" in {probe.parameter}" if probe.parameter and probe.measure == "grad_rel_err" else ""
        objections.append(
            f"at the same weights its {MEASURES[probe.measure]}{where} are off by {times(probe.ratio)} "
            f"{reference}'s own rounding (step {probe.step})"
        )
    if not pairs or band is None:
        missing.append(_no_curve(references, bool(pairs), reference, ran))
    elif curve is None or curve.ratio is None or final is None:
        missing.append(f"it logged no loss at a step that {reference} of the same seed logged too")
    if curve and curve.agrees is False:
        objections.append(
            f"its training loss is {size(curve.largest)} from {reference}'s of the same seed at step {curve.step}, "
            f"{times(curve.ratio or 0)} the distance between seeds"
        )
    if final and final.agrees is False:
        allowed = size(final.allowed or 0.0)
        words = f"its final {_LOSSES[final.metric]} differs by {size(final.difference)} where {allowed} is allowed"
        # Without a band there is no telling how far training amplifies rounding, and an excess proves nothing.
        (objections if band else missing).append(words)
    outcome = Outcome.broken if objections else Outcome.open if missing else Outcome.holds
    return Judgement(label, group, outcome, probe, curve, final, tuple(objections), tuple(missing))


def times(ratio: float) -> str:
    """A factor in words a reader can weigh: 0.04, 3.2, 170, 25,000 times."""
    if not np.isfinite(ratio):
        return "infinitely many times"
    return f"{float(f'{ratio:.2g}'):,.0f} times" if ratio >= 10 else f"{ratio:.2g} times"


_LOSSES = {"val/loss": "validation loss", "train/loss": "training loss"}


def _no_probe(runs: Sequence[Run], reference: str) -> str:
    """Why nothing was measured at the same weights."""
    probed = {str(run.option("parity.reference", "naive")) for run in runs if len(run.series("parity/loss_diff"))}
    if probed:
        return f"the probe compared with {_words(sorted(probed))}, not {reference} (parity.reference)"
    return "no probe ran (parity.every)"


def _no_curve(references: Mapping[int, Run], paired: bool, reference: str, ran: bool) -> str:
    """Why there is no curve of the reference, or no band of its seeds, to compare with.

    paired  whether a seed is shared
    ran     whether the reference ran anywhere
    """
    if not references and ran:
        return f"no run of {reference} shares its configuration (device, settings)"
    if not references:
        return f"{reference} did not run, so there is no curve to compare with"
    if not paired:
        return f"it shares no seed with {reference}"
    if len(references) == 1:
        return f"no band could be measured from a single seed of {reference}"
    if sum(len(run.series("train/loss").finite()) > 0 for run in references.values()) < 2:
        return f"fewer than two seeds of {reference} logged losses"
    return f"no two seeds of {reference} logged a loss at the same step"


def _draws_its_own_masks(run: Run) -> bool:
    return bool(run.option("attention.dropout", 0.0)) and run.option("attention.rng", "replay") == "torch"


def _beside(group: Group, run: Run, references: Mapping[int, Run]) -> list[Run]:
    """The runs that show that a loss of `run` could have been finite: the reference's of the same seed or, where that
    did not run, those of every other implementation with nothing left out, its own first."""
    if run.seed in references:
        return [references[run.seed]]
    intact = [
        other
        for other in group.runs
        if other.seed == run.seed and other.label != run.label and other.option("attention.ablate", "none") == "none"
    ]
    return sorted(intact, key=lambda other: other.attention != run.attention)


def _divergence(run: Run, others: Sequence[Run]) -> str | None:
    """That a run came to NaN or infinity at a step that one of `others` took, and came past with a finite loss."""
    step = run.diverged()
    if step is None:
        return None
    for other in others:
        fine, theirs = other.series("train/loss").finite(), other.diverged()
        if len(fine) and fine.steps[-1] >= step and (theirs is None or theirs > step):
            ablated = other.attention == run.attention and run.option("attention.ablate", "none") != "none"
            name = f"the intact {other.label}" if ablated else other.label
            return f"its loss is not finite at step {step} with seed {run.seed}, where {name}'s is"
    return None


def _sentence(judgements: Sequence[Judgement], groups: Sequence[Group], reference: str) -> str:
    if not judgements:
        others = {label for group in groups for label in group.labels()} - {reference}
        if not others:
            return f"There is no verdict: {reference} ran alone, with nothing to compare it with."
        return f"There is no verdict: no run of {reference} shares its configuration with {_words(sorted(others))}."
    by = {outcome: [j for j in judgements if j.outcome is outcome] for outcome in Outcome}
    clauses = []
    if by[Outcome.broken]:
        worst = [f"{_named([j], judgements)}: {j.objections[0]}" for j in by[Outcome.broken]]
        clauses.append(f"Parity is broken for {'; for '.join(worst)}")
    if by[Outcome.holds]:
        names = _named(by[Outcome.holds], judgements)
        close = _how_close(by[Outcome.holds], reference)
        clauses.append(f"it holds for {names}" if clauses else f"Parity holds for {names}: {close}")
    if by[Outcome.open]:
        names = _named(by[Outcome.open], judgements)
        reasons = list(dict.fromkeys(reason for j in by[Outcome.open] for reason in j.missing))
        lead = "it is open for" if clauses else "Parity is open for"
        close = _how_close(by[Outcome.open], reference)
        clauses.append(f"{lead} {names}: {', and '.join(reasons)}{f'; as far as measured, {close}' if close else ''}")
    return f"{'; '.join(clauses)}."


def _how_close(judgements: Sequence[Judgement], reference: str) -> str:
    """The worst of each measurement over some judgements."""
    parts = []
    curves = [j.curve for j in judgements if j.curve]
    shares = [curve.ratio for curve in curves if curve.ratio is not None]
    bands = [band for j in judgements if (band := seed_band(list(j.group.of(reference).values())))]
    if shares and bands:
        seeds = {len(band.seeds) for band in bands}
        apart = float(np.median(np.concatenate([band.train.values for band in bands])))
        parts.append(
            f"at every step the training loss is closer to {reference}'s of the same seed than {reference}'s "
            f"{f'{min(seeds)} ' if len(seeds) == 1 else ''}seeds are to each other "
            f"(at most {size(max(shares))} of their distance, which is {size(apart)} in the median)"
        )
    elif curves:
        largest = max(curve.largest for curve in curves)
        parts.append(f"the training loss is never further than {size(largest)} from {reference}'s of the same seed")
    finals = [j.final for j in judgements if j.final]
    if finals:
        worst = max(finals, key=lambda final: final.difference / (final.floor or 1.0))
        parts.append(f"the final {_LOSSES[worst.metric]} differs by at most {_explained(worst, reference)}")
    probes = [j.probe.ratio for j in judgements if j.probe]
    if probes:
        parts.append(f"at the same weights the difference is {times(max(probes))} {reference}'s own rounding")
    return _words(parts)


def _explained(final: FinalEvidence, reference: str) -> str:
    """A difference of final losses, and what it is to be measured by."""
    amount, between = size(final.difference), size(final.band or 0.0)
    if final.floor is None:
        return amount
    if final.rounding is None:
        return f"{amount}, where two seeds of {reference} differ by {between}"
    if final.difference <= final.floor:
        return f"{amount}, within the floor of {size(final.floor)} that {reference}'s own rounding sets"
    if final.agrees:
        return f"{amount}, which is rounding that training has amplified (two seeds differ by {between})"
    return f"{amount}, beyond the floor of {size(final.floor)} that {reference}'s own rounding sets"


def _named(found: Sequence[Judgement], judgements: Sequence[Judgement]) -> str:
    """The labels of some judgements; of which groups, where all the judgements have a label in several."""
    groups = list({id(j.group): j.group for j in judgements}.values())
    places = dict(zip(map(id, groups), describe(groups), strict=True))
    noun = "lengths" if all(place.startswith("seq_len") and "," not in place[12:] for place in places.values()) else ""
    together: dict[str, list[str]] = {}
    for label in dict.fromkeys(j.label for j in found):
        here, everywhere = ([j for j in some if j.label == label] for some in (found, judgements))
        if len(everywhere) == 1:
            where = ""
        elif len(here) == 1:
            where = f" at {places[id(here[0].group)]}"
        else:
            counted = "all" if len(here) == len(everywhere) else f"{len(here)} of"
            where = f" at {counted} {len(everywhere)} {noun or 'configurations'}"
        together.setdefault(where, []).append(label)
    return _words([f"{_words(labels)}{where}" for where, labels in together.items()])


def _words(parts: Sequence[str]) -> str:
    """One, two and three; with a comma before the last where the parts have commas or brackets of their own."""
    joint = ", and " if any("(" in part or "," in part for part in parts) else " and "
    return joint.join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else "".join(parts)
