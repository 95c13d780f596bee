"""The headline of a sweep: the verdict on its implementations, the lowest loss, or the lengths that were reached.

And notes on its runs: where they lie, how they ended, which commit and machine they ran on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from data.errors import first_few
from recipe.compare.costs import Ranked, crossovers, points, ranking, same_tokens
from recipe.compare.labels import places
from recipe.compare.runs import UNKNOWN, Run, RunSet
from recipe.compare.sweeps import Sweep
from recipe.compare.tables import over_seeds, to_lowest
from recipe.compare.verdict import Outcome, Verdict, outcome_of
from recipe.wording import listed

VERBS = {Outcome.broken: "is broken for", Outcome.open: "is open for", Outcome.holds: "holds for"}


class Headline(NamedTuple):
    """A sentence, and its tone: holds, broken, open or none."""

    text: str
    tone: str


def headline(sweep: Sweep, verdicts: Sequence[Verdict], reference: str) -> Headline:
    """What was found in a sweep.

    verdicts  on its implementations
    """
    # In a sweep over lengths, running out of memory is an answer, not a failure.
    if not any(run.trained or (run.out_of_memory and sweep.axis == "seq_len") for run in sweep.runs):
        return _no_result(sweep)
    if left_out := {str(run.option("attention.ablate")) for run in sweep.runs if run.ablated}:
        return Headline(f"Trained without a line of the online softmax: {listed(sorted(left_out))}", "none")
    decisive = [verdict for verdict in verdicts if verdict.decisive]
    if decisive or (verdicts and len(sweep.cells) == 1):
        parity = parity_headline(decisive or verdicts)
        lowest = None if all(run.claims_parity for run in sweep.runs) else _lowest(ranking(sweep))
        return parity if lowest is None else parity._replace(text=f"{parity.text}. {lowest.text}")
    if sweep.axis == "devices":
        return Headline("Throughput over devices", "none")
    if sweep.axis == "seq_len" and not same_tokens(sweep):
        return Headline(_lengths(sweep, reference), "none")
    return _lowest(ranking(sweep)) or _no_result(sweep)


def parity_headline(verdicts: Sequence[Verdict]) -> Headline:
    """The verdicts in a sentence, the worst first."""
    outcome = outcome_of(verdicts) or Outcome.open
    of_label: dict[str, set[Outcome]] = {}
    for verdict in verdicts:
        of_label.setdefault(verdict.label, set()).add(verdict.outcome)
    names: dict[Outcome, list[str]] = {}
    for verdict in verdicts:
        mixed = len(of_label[verdict.label]) > 1
        name = f"{verdict.label} ({verdict.cell.short})" if mixed else verdict.label
        if name not in names.setdefault(verdict.outcome, []):
            names[verdict.outcome].append(name)
    clauses = [f"{verb} {first_few(names[its])}" for its, verb in VERBS.items() if its in names]
    return Headline(f"Parity {' and '.join(clauses)}", outcome.value)


def _lengths(sweep: Sweep, reference: str) -> str:
    """The longest sequence that fits, where one did not, else the length from which on the reference is overtaken."""
    fits = {label: max((p.position for p in its if p.trained), default=0) for label, its in points(sweep).items()}
    if any(run.out_of_memory for run in sweep.runs):
        best = max(fits.values())
        names = listed([label for label, longest in fits.items() if longest == best])
        return f"The longest sequence that fits: {best:,} tokens, with {names}" if best else "Nothing fits the memory"
    found = crossovers(sweep, reference)
    ahead = [crossing for crossing in found if crossing.first]
    if ahead:
        soonest = min(ahead, key=lambda crossing: crossing.seq_len or 0)
        where = f"at about {soonest.seq_len:,.0f}" if soonest.seq_len else f"from the first length, {soonest.first:,}"
        return f"{soonest.label} overtakes {reference} {where} tokens"
    if found:
        return f"Nothing overtakes {reference} for good up to {max(fits.values()):,} tokens"
    return "Speed and memory over the sequence length"


def _lowest(ranked: Sequence[Ranked]) -> Headline | None:
    """The setting or implementation with the lowest loss, where its intervals show it; None without losses."""
    if not ranked:
        return None
    first, *rest = ranked
    others = [one for one in rest if one.point.cell is not first.point.cell] or rest
    loss = first.point.loss
    seeds = min(one.seeds for one in (first, *others))
    of_seeds = f" ({seeds} seeds)" if seeds > 1 else " (one seed each)" if others else " (one seed)"
    if not others:
        return Headline(f"{first.name}: {first.kind} loss {over_seeds(loss)}{of_seeds}", "none")
    if all(one.equal for one in others):
        equal = listed([first.name, *(one.name for one in others)])
        return Headline(f"{equal} are equal bit for bit{of_seeds}", "none")
    second = others[0]
    by = f"; {second.name} {to_lowest(second)}" if len(others) == 1 and second.interval else ""
    if all(one.higher for one in others):
        return Headline(f"The lowest {first.kind} loss: {first.name}{of_seeds}{by}", "none")
    near = first_few([first.name, *(one.name for one in others if not one.higher)])
    return Headline(f"The lowest {first.kind} loss is undecided: {near}{of_seeds}{by}", "open")


def _no_result(sweep: Sweep) -> Headline:
    ends = sorted({run.status.replace("_", " ") for run in sweep.runs})
    return Headline(f"No run has completed with a loss ({listed(ends)})", "broken")


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
        settings = [setting for place in places([sweep.runs for sweep in sweeps]) for setting in place]
        names = dict.fromkeys(setting.partition("=")[0] for setting in settings)
        differences = first_few(list(names)) or "settings that change how they train"
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
