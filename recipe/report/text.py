"""The report in words: a sweep's answer, the verdict on each implementation, and notes on the runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from data.errors import first_few
from recipe.parity import PARITY_MARGIN
from recipe.report.costs import Point, attention_alone, crossovers, points, ranked, same_tokens
from recipe.report.parity import MEASURES, Final, Gap, Outcome, Verdict, outcome_of
from recipe.report.runs import UNKNOWN, Run, RunSet, number
from recipe.report.sweeps import Sweep, settings_apart
from recipe.wording import listed, percent, size, times

LOSSES = {"val/loss": "validation loss", "train/loss": "training loss"}
Bullets = Sequence[tuple[str, str]]  # what each is about, and a sentence or more
Table = Mapping[str, list[Point]]


class Answer(NamedTuple):
    """The answer of a sweep: a headline, its tone (holds, broken, open, none), and the bullets below it."""

    headline: str
    tone: str
    bullets: Bullets


def answer(sweep: Sweep, verdicts: Sequence[Verdict], reference: str) -> Answer:
    """The answer to the question that a sweep asks."""
    table = points(sweep)
    decisive = [verdict for verdict in verdicts if verdict.decisive]
    # Over lengths, running out of memory is the answer: where the memory ends.
    if not any(run.trained or (run.out_of_memory and sweep.axis == "seq_len") for run in sweep.runs):
        return _failures(sweep)
    if any(run.ablated for run in sweep.runs):
        return _ablations(sweep, reference)
    if sweep.axis == "devices":
        found = _scaling(table)
    elif sweep.axis == "seq_len":
        found = _over_lengths(sweep, table, reference)
    else:
        found = _ranking(sweep, [] if len(sweep.cells) > 1 else _costs(sweep, table, reference))
    if decisive or (verdicts and len(sweep.cells) == 1):
        headline, outcome, bullets = parity_answer(decisive or verdicts, reference)
        found = Answer(headline, outcome, [*bullets, *found.bullets])
    merged: dict[str, list[str]] = {}
    for subject, sentences in found.bullets:
        merged.setdefault(subject, []).append(sentences)
    return Answer(found.headline, found.tone, [(subject, " ".join(said)) for subject, said in merged.items()])


def parity_answer(verdicts: Sequence[Verdict], reference: str) -> Answer:
    """The verdict in a sentence, and for each implementation what was measured where it was worst."""
    outcome = outcome_of(verdicts) or Outcome.open
    verbs = {Outcome.broken: "is broken for", Outcome.open: "is open for", Outcome.holds: "holds for"}
    groups: dict[tuple[str, Outcome], list[Verdict]] = {}
    for verdict in verdicts:
        groups.setdefault((verdict.label, verdict.outcome), []).append(verdict)
    names, bullets = dict[Outcome, list[str]](), []
    for (label, its), found in sorted(groups.items(), key=lambda group: group[0][1] is not Outcome.broken):
        mixed = any(other == label and o is not its for other, o in groups)
        name = f"{label} ({first_few([verdict.cell.short for verdict in found])})" if mixed else label
        names.setdefault(its, []).append(name)
        worst = max(found, key=lambda v: (v.probe.ratio if v.probe else 0.0, v.curve.largest if v.curve else 0.0))
        bullets.append((name, " ".join(verdict_sentences(worst, reference))))
    clauses = [f"{verbs[o]} {listed(names[o])}" for o in (outcome, *verbs) if o in names]
    return Answer(f"Parity {' and '.join(dict.fromkeys(clauses))}", outcome.value, bullets)


def verdict_sentences(verdict: Verdict, reference: str) -> list[str]:
    """The verdict on one implementation in sentences: measurements, evidence against it, and what is missing."""
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


def _over_lengths(sweep: Sweep, table: Table, reference: str) -> Answer:
    """The answer of a sweep over lengths: the memory wall, the best context, or the length from which one is faster."""
    found = [_wall(sweep, table), *([_context(table)] if same_tokens(sweep) else []), _crossings(sweep, reference)]
    answers = [part for part in found if part]
    headline = answers[0].headline if answers else "Speed and memory over the sequence length"
    return Answer(headline, "none", [bullet for part in answers for bullet in part.bullets])


def _wall(sweep: Sweep, table: Table) -> Answer | None:
    bullets = []
    fits = {label: max((p.at for p in found if p.trained), default=0) for label, found in table.items()}
    for label, found in table.items():
        failed = min((point.at for point in found if point.out_of_memory), default=None)
        fit = f"It fits up to {fits[label]:,} tokens" if fits[label] else "It fits at no length that was tried"
        bullets.append((label, f"{fit}{f' and runs out of memory at {failed:,}' if failed else ''}."))
    if not any(point.out_of_memory for found in table.values() for point in found):
        return None
    limits = {limit for run in sweep.runs if (limit := number(run.option("training.cpu_memory_gib")))}
    if limits and attention_alone(sweep.runs):
        gib = " or ".join(f"{limit:g}" for limit in sorted(limits))
        words = f"Stands for a GPU's memory: {gib} GiB for the whole run. The memory shown is one attention layer's."
        bullets.append(("training.cpu_memory_gib", words))
    best = max(fits.values())
    names = listed([label for label, longest in fits.items() if longest == best])
    headline = f"The longest sequence that fits: {best:,} tokens, with {names}" if best else "Nothing fits the memory"
    return Answer(headline, "none", bullets)


def _crossings(sweep: Sweep, reference: str) -> Answer | None:
    bullets: list[tuple[str, str]] = []
    if not (found := crossovers(sweep, reference)):
        return None
    for crossing in found:
        if crossing.seq_len:
            where = f"It overtakes {reference} at about {crossing.seq_len:,.0f} tokens"
        elif crossing.first:
            where = f"It is faster than {reference} from the shortest length on, {crossing.first:,} tokens,"
        else:
            where = f"It does not overtake {reference} for good"
        times = f"{crossing.speedup:.2g}"
        speed = "about as fast" if times == "1" else f"{times} times as fast"
        bullets.append((crossing.label, f"{where} and is {speed} at {crossing.longest:,}."))
    ahead = [crossing for crossing in found if crossing.first]
    if not ahead:
        longest = max(crossing.longest for crossing in found)
        return Answer(f"Nothing overtakes {reference} for good up to {longest:,} tokens", "none", bullets)
    soonest = min(ahead, key=lambda crossing: crossing.seq_len or 0)
    at = f"at about {soonest.seq_len:,.0f} tokens" if soonest.seq_len else f"at {soonest.first:,} tokens or fewer"
    return Answer(f"{soonest.label} overtakes {reference} {at}", "none", bullets)


def _context(table: Table) -> Answer:
    """The best context, by the implementation with the longest; others have the same losses or a broken parity."""
    known = {label: [point for point in found if point.val_loss is not None] for label, found in table.items()}
    label, found = max(known.items(), key=lambda item: len(item[1]))
    best = min(found, key=lambda point: point.val_loss or math.inf)
    losses = [f"{point.val_loss:.4f} with {point.at:,}" for point in (found[0], found[-1])]
    bullets = [(label, f"Validation loss {losses[0]} tokens of context, {losses[1]}.")]
    return Answer(f"The lowest validation loss: {best.at:,} tokens of context", "none", bullets)


def _scaling(table: Table) -> Answer:
    bullets, best = [], (0.0, "Throughput over devices")
    for label, found in table.items():
        known = [(point.at, point.tokens_per_s) for point in found if point.tokens_per_s]
        if len(known) > 1:
            (few, slow), (many, fast) = known[0], known[-1]
            words = f"{many} devices train {fast / slow:.2g} times as fast as {few}"
            bullets.append((label, f"{words}, {percent(fast / slow * few / many)} of proportional."))
            best = max(best, (fast / slow, words))
    return Answer(best[1], "none", bullets)


def _ranking(sweep: Sweep, costs: Bullets) -> Answer:
    """The setting or implementation with the lowest loss, and the next; `costs` instead where there is one setting."""
    found = [point for point in ranked(sweep) if point.loss is not None]
    if not found:
        return _failures(sweep)
    kind = "training" if found[0].val_loss is None else "validation"
    names = [", ".join(point.cell.where) or point.label for point in found]
    if len(sweep.cells) == 1:
        return Answer(f"{names[0]}: {kind} loss {found[0].loss:.4f}", "none", costs)
    bullets = [(names[0], f"{kind.capitalize()} loss {found[0].loss:.4f}.")]
    if n := next((n for n, point in enumerate(found) if point.cell is not found[0].cell), 0):
        bullets.append((names[n], f"Next, {(found[n].loss or 0.0) - (found[0].loss or 0.0):.4f} higher."))
    return Answer(f"The lowest {kind} loss: {names[0]}", "none", bullets)


def _costs(sweep: Sweep, table: Table, reference: str) -> Bullets:
    """The speed and memory of each implementation relative to the reference."""
    theirs = next((found[0] for label, found in table.items() if label == reference), None)
    subject = "its attention takes" if attention_alone(sweep.runs) else "takes"
    bullets = []
    for label, (ours,) in table.items():
        if theirs and label != reference and ours.tokens_per_s and theirs.tokens_per_s:
            gain = f"{ours.tokens_per_s / theirs.tokens_per_s:.2g}"
            words = f"It trains {'' if gain == '1' else f'{gain} times '}as fast as {reference}"
            if ours.memory_gib and theirs.memory_gib:
                words += f" and {subject} {percent(ours.memory_gib / theirs.memory_gib)} of the memory"
            bullets.append((label, f"{words}."))
    return bullets


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


def notes_on(found: RunSet, sweeps: Sequence[Sweep]) -> list[str]:
    """Notes on the runs: where they lie, how they ended, which commit and machine they ran on."""
    runs, notes = found.runs, list(found.notes)
    if len(sweeps) > 1:
        names = [s.partition("=")[0] for s in settings_apart([sweep.cells[0].runs[0] for sweep in sweeps])[0]]
        notes.insert(0, f"The runs differ in {listed(names)}, so they are not all compared with each other.")
    for what, named in {
        "ran out of memory, which is a result too": [run.called for run in runs if run.out_of_memory],
        "came from a tree with uncommitted changes": [run.called for run in runs if run.commit.endswith("+")],
    }.items():
        if named:
            notes.append(f"{len(named)} run{'s' if len(named) > 1 else ''} {what} ({first_few(named)}).")
    for what, values in {
        "commits": {run.commit.rstrip("+") for run in runs},
        "torch versions": {str(run.recorded("versions").get("torch") or "") for run in runs},
        "devices": {run.device for run in runs} - {UNKNOWN},
    }.items():
        if len(known := sorted(values - {""})) > 1:
            notes.append(f"The runs come from different {what}: {', '.join(known)}.")
    for run in runs:
        notes += [f"{run.called}: {note}" for note in run.notes]
        probed, whole = run.recorded("parity").get("tokens"), (run.sequences, run.seq_len)
        if isinstance(probed, list) and math.prod(probed) < math.prod(whole):  # older runs wrote text
            notes.append(
                f"{run.called}: the probe compared {probed[0]} x {probed[1]} of {whole[0]} x {whole[1]} tokens, "
                "because the reference's scores of all did not fit the memory."
            )
        notes += [sentence] if (sentence := ending(run)) else []
    return notes
