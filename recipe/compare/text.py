"""The report in words: a sweep's answer, the verdict on each implementation, and notes on the runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from data.errors import first_few
from recipe.compare.answers import Answer, costs, over_lengths, ranking, scaling
from recipe.compare.costs import points
from recipe.compare.labels import names_apart
from recipe.compare.parity import MEASURES
from recipe.compare.runs import UNKNOWN, Run, RunSet
from recipe.compare.sweeps import Sweep
from recipe.compare.verdict import Final, Gap, Outcome, Verdict, outcome_of
from recipe.training.parity import PARITY_MARGIN
from recipe.wording import listed, percent, size, times

LOSSES = {"val/loss": "validation loss", "train/loss": "training loss"}


def answer(sweep: Sweep, verdicts: Sequence[Verdict], reference: str) -> Answer:
    """The answer to the question that a sweep asks."""
    table = points(sweep)
    decisive = [verdict for verdict in verdicts if verdict.decisive]
    # In a sweep over lengths, running out of memory is an answer, not a failure.
    if not any(run.trained or (run.out_of_memory and sweep.axis == "seq_len") for run in sweep.runs):
        return _failures(sweep)
    if any(run.ablated for run in sweep.runs):
        return _ablations(sweep, reference)
    if sweep.axis == "devices":
        body = scaling(table)
    elif sweep.axis == "seq_len":
        body = over_lengths(sweep, table, reference)
    else:
        costs_of_axis = [] if len(sweep.cells) > 1 else costs(sweep, table, reference)
        body = ranking(sweep, costs_of_axis) or _failures(sweep)
    if decisive or (verdicts and len(sweep.cells) == 1):
        headline, outcome, bullets = parity_answer(decisive or verdicts, reference)
        body = Answer(headline, outcome, [*bullets, *body.bullets])
    merged: dict[str, list[str]] = {}
    for subject, sentences in body.bullets:
        merged.setdefault(subject, []).append(sentences)
    return Answer(body.headline, body.tone, [(subject, " ".join(parts)) for subject, parts in merged.items()])


def parity_answer(verdicts: Sequence[Verdict], reference: str) -> Answer:
    """The verdict in a sentence, and the worst measurements of each implementation."""
    outcome = outcome_of(verdicts) or Outcome.open
    verbs = {Outcome.broken: "is broken for", Outcome.open: "is open for", Outcome.holds: "holds for"}
    groups: dict[tuple[str, Outcome], list[Verdict]] = {}
    for verdict in verdicts:
        groups.setdefault((verdict.label, verdict.outcome), []).append(verdict)
    names, bullets = dict[Outcome, list[str]](), []
    for (label, its), of_outcome in sorted(groups.items(), key=lambda group: group[0][1] is not Outcome.broken):
        mixed = any(other == label and o is not its for other, o in groups)
        name = f"{label} ({first_few([verdict.cell.short for verdict in of_outcome])})" if mixed else label
        names.setdefault(its, []).append(name)
        worst = max(of_outcome, key=lambda v: (v.probe.ratio if v.probe else 0.0, v.curve.largest if v.curve else 0.0))
        bullets.append((name, " ".join(verdict_sentences(worst, reference))))
    clauses = [f"{verbs[o]} {listed(names[o])}" for o in (outcome, *verbs) if o in names]
    return Answer(f"Parity {' and '.join(dict.fromkeys(clauses))}", outcome.value, bullets)


def verdict_sentences(verdict: Verdict, reference: str) -> list[str]:
    """The verdict on one implementation in sentences: measurements, evidence against it, and missing measurements."""
    text = []
    probe, curve, final = verdict.probe, verdict.curve, verdict.final
    if lost := verdict.not_finite:
        text.append(f"Its loss is not finite at step {lost.step:,} with seed {lost.seed}, where {lost.other}'s is.")
    if probe and probe.agrees:
        text.append(f"At the same weights it differs by {times(probe.ratio)} {reference}'s rounding.")
    elif probe:
        where = f" of {probe.parameter}" if probe.parameter and probe.measure == "grad_rel_err" else ""
        text.append(
            f"At the same weights its {MEASURES[probe.measure]}{where} differ by {times(probe.ratio)} {reference}'s "
            f"rounding at step {probe.step:,}. Up to {PARITY_MARGIN:g} times is accepted."
        )
    if verdict.alone:
        text += verdict.alone.sentences()
    if curve and curve.largest == 0 and (not final or final.difference == 0):
        text.append(f"Its losses equal {reference}'s to the last bit.")
    else:
        if curve and curve.ratio is None:
            text.append(f"Its training loss stays within {size(curve.largest)} of {reference}'s of the same seed.")
        elif curve and curve.agrees:
            text.append(f"Its training loss stays inside the spread between seeds ({percent(curve.ratio)} of it).")
        elif curve:
            text.append(
                f"Its training loss is {size(curve.largest)} from {reference}'s at step {curve.step:,}, "
                f"{times(curve.ratio or 0.0)} the spread between seeds."
            )
        text += _final_sentences(final, curve is not None and curve.agrees is True) if final else []
    gaps = {
        Gap.own_masks: "it draws other dropout masks (attention.rng=torch)",
        Gap.no_probe: f"no probe compared it with {reference} (parity.every, parity.reference)",
        Gap.no_reference: f"no run of {reference} has its settings",
        Gap.single_seed: f"{reference} ran with one seed, which shows no spread between seeds",
        Gap.no_shared_losses: f"too few losses share a seed and a step with {reference}'s",
    }
    return [*text, f"Not measured: {listed([gaps[gap] for gap in verdict.gaps])}."] if verdict.gaps else text


def _final_sentences(final: Final, inside: bool) -> list[str]:
    sentence = f"Its final {LOSSES[final.metric]} differs by {size(final.difference)}"
    if final.floor is None:
        return [f"{sentence}."]
    if final.difference <= final.floor:
        return [f"{sentence}, where rounding adds up to {size(final.floor)}."]
    sentence += f", above the {size(final.floor)} that rounding adds up to."
    if not final.amplified:
        return [sentence, "The losses differ by more than rounding from the first steps on."]
    end = " and at the end the runs differ by no more than seeds do" if inside else ""
    return [sentence, f"Training amplified the rounding: the first losses agree{end}."]


def _failures(sweep: Sweep) -> Answer:
    reasons: dict[str, list[str]] = {}
    for run in sweep.runs:
        silent = "It was interrupted" if run.status == "interrupted" else "It left no summary"
        message = str(run.summary.get("message") or silent).strip().rstrip(".")
        reasons.setdefault(f"{message}.", []).append(run.called)
    every = {1: "The run", 2: "Both runs"}.get(len(sweep.runs), f"All {len(sweep.runs)} runs")
    headline = "No run has completed with a loss"
    for status, words in {"failed": "failed", "out_of_memory": "ran out of memory"}.items():
        if all(run.status == status for run in sweep.runs):
            headline = f"{every} {words}"
    return Answer(headline, "broken", [(first_few(names), reason) for reason, names in reasons.items()])


def _ablations(sweep: Sweep, reference: str) -> Answer:
    """The result of training without a line of the online softmax."""
    effects: dict[str, list[str]] = {}
    for run in sweep.runs:
        if run.ablated:
            effect = training_effect(run, sweep.runs, reference)
            effects.setdefault(str(run.option("attention.ablate")), []).append(f"In {run.precision}, {effect}.")
    ends = [f"{ablate} {'overflows' if 'finite' in ' '.join(its) else 'trains on'}" for ablate, its in effects.items()]
    return Answer(listed(ends), "none", [(ablate, " ".join(its)) for ablate, its in effects.items()])


def training_effect(run: Run, runs: Sequence[Run], reference: str) -> str:
    """The result of a run, compared with the reference of the same settings or, without one, the intact algorithm."""
    step, final = run.diverged(), run.final("val/loss")
    if step is not None:
        return f"the loss is not finite at step {step:,}"
    if run.status == "failed" or final is None:
        return f"it ended at step {run.step:,} ({run.status})"
    for name in (reference, run.attention):
        for other in runs:
            theirs = other.final("val/loss")
            alike = (other.attention, other.seed, other.precision) == (name, run.seed, run.precision)
            if alike and not other.ablated and theirs is not None:
                whose = reference if name == reference else f"the intact {name}"
                return f"the validation loss is {final:.4f}, {final - theirs:+.4f} from {whose}'s"
    return f"the validation loss is {final:.4f}"


def ending(run: Run) -> str | None:
    """The end of a run that did not complete, in a sentence."""
    if run.status == "unfinished":
        return f"{run.called} wrote no summary: it is still running, or was killed after step {run.step:,}."
    if run.status == "interrupted":
        return f"{run.called} was interrupted after {run.step:,} of {run.summary.get('steps', '?')} steps."
    if run.status != "failed":
        return None
    if run.ablated and (step := run.diverged()) is not None:  # train.py's advice is for runs that should have trained
        cause = f"attention.ablate={run.option('attention.ablate')}"
        return f"{run.called} was not finite at step {step:,}, which is the result of {cause}."
    message = f": {run.summary['message']}".rstrip(" .") if run.summary.get("message") else ""
    return f"{run.called} failed after step {run.step:,}{message}."


def notes_on(run_set: RunSet, sweeps: Sequence[Sweep]) -> list[str]:
    """Notes on the runs: where they lie, how they ended, which commit and machine they ran on."""
    runs, notes = run_set.runs, list(run_set.notes)
    if len(sweeps) > 1:
        names = names_apart([[cell.runs for cell in sweep.cells] for sweep in sweeps])
        differences = first_few(names) or "settings that change how they train"
        notes.insert(0, f"The runs differ in {differences}, so they are not all compared with each other.")
    for outcome, named in {
        "ran out of memory, which is a result too": [run.called for run in runs if run.out_of_memory],
        "came from a tree with uncommitted changes": [run.called for run in runs if run.commit.endswith("+")],
    }.items():
        if named:
            notes.append(f"{len(named)} run{'s' if len(named) > 1 else ''} {outcome} ({first_few(named)}).")
    for origin, values in {
        "commits": {run.commit.rstrip("+") for run in runs},
        "uncommitted changes": {run.changes for run in runs},
        "torch versions": {str(run.recorded("versions").get("torch") or "") for run in runs},
        "devices": {run.device for run in runs} - {UNKNOWN},
    }.items():
        if len(known := sorted(values - {""})) > 1:
            notes.append(f"The runs come from different {origin}: {', '.join(known)}.")
    for run in runs:
        notes += [f"{run.called}: {note}" for note in run.notes]
        probed, whole = run.recorded("parity").get("tokens"), (run.sequences, run.seq_len)
        if isinstance(probed, list) and math.prod(probed) < math.prod(whole):  # older runs wrote text
            notes.append(
                f"{run.called}: the probe compared {probed[0]} x {probed[1]} of {whole[0]} x {whole[1]} tokens, "
                "because the reference's scores of all did not fit in memory."
            )
        notes += [sentence] if (sentence := ending(run)) else []
    return notes
