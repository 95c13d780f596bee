"""The headline of a sweep: the verdict on its implementations, the lowest loss, or the lengths that were reached.

And notes on its runs: which commit and machine they ran on, and why they failed.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from data.errors import first_few
from recipe.compare.costs import Ranked, crossovers, points, ranking, same_tokens
from recipe.compare.runs import UNKNOWN, RunSet
from recipe.compare.sweeps import Sweep, places
from recipe.compare.tables import apart, over_seeds
from recipe.compare.verdict import Outcome, Verdict
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
    if not any(run.trained or (run.out_of_memory and sweep.over_lengths) for run in sweep.runs):
        return _no_result(sweep)
    if left_out := {str(run.option("attention.ablate")) for run in sweep.runs if run.ablated}:
        return Headline(f"Trained without a line of the online softmax: {listed(sorted(left_out))}", "none")
    decisive = [verdict for verdict in verdicts if verdict.agreements]
    if decisive or (verdicts and len(sweep.cells) == 1):
        parity = parity_headline(decisive or verdicts)
        lowest = None if all(run.claims_parity for run in sweep.runs) else _lowest(ranking(sweep))
        return parity if lowest is None else parity._replace(text=f"{parity.text}. {lowest.text}")
    if sweep.over_lengths and not same_tokens(sweep):
        return Headline(_lengths(sweep, reference), "none")
    return _lowest(ranking(sweep)) or _no_result(sweep)


def parity_headline(verdicts: Sequence[Verdict]) -> Headline:
    """The verdicts in a sentence, the worst first."""
    names: dict[Outcome, list[str]] = {}
    for verdict in verdicts:
        mixed = len({one.outcome for one in verdicts if one.label == verdict.label}) > 1
        name = f"{verdict.label} ({verdict.cell.short})" if mixed else verdict.label
        if name not in names.setdefault(verdict.outcome, []):
            names[verdict.outcome].append(name)
    clauses = [f"{verb} {first_few(names[its])}" for its, verb in VERBS.items() if its in names]
    return Headline(f"Parity {' and '.join(clauses)}", min(names, key=[*VERBS].index).value)


def _lengths(sweep: Sweep, reference: str) -> str:
    """The longest sequence that fits, where one did not, else the length from which on the reference is overtaken."""
    fits = {
        label: max((p.position for p in its if any(run.trained for run in p.runs)), default=0)
        for label, its in points(sweep).items()
    }
    if any(run.out_of_memory for run in sweep.runs):
        best = max(fits.values())
        names = listed([label for label, longest in fits.items() if longest == best])
        return f"The longest sequence that fits: {best:,} tokens, with {names}" if best else "Nothing fits the memory"
    found = crossovers(sweep, reference)
    if ahead := {label: length for label, length in found.items() if length}:
        soonest = min(ahead, key=ahead.__getitem__)
        return f"{soonest} is faster than {reference} from {ahead[soonest]:,} tokens on"
    if found:
        return f"Nothing overtakes {reference} for good up to {max(fits.values()):,} tokens"
    return "Speed and memory over the sequence length"


def _lowest(ranked: Sequence[Ranked]) -> Headline | None:
    """The setting or implementation with the lowest loss, where its intervals show it; None without losses."""
    if not ranked:
        return None
    first, *rest = ranked
    others = [one for one in rest if one.point.cell is not first.point.cell] or rest
    kind = {"val/loss": "validation", "train/loss": "training"}[first.point.metric]
    seeds = min(one.seeds for one in (first, *others))
    of_seeds = f" ({seeds} seeds)" if seeds > 1 else " (one seed)"
    if not others:
        return Headline(f"{first.name}: {kind} loss {over_seeds(first.point.loss)}{of_seeds}", "none")
    if all(one.equal for one in others):
        return Headline(f"{listed([one.name for one in (first, *others)])} are equal bit for bit{of_seeds}", "none")
    second, by = others[0], ""
    if len(others) == 1 and second.interval:
        by = f"; {second.name} {apart(second.equal, second.difference, second.interval)}"
    if all(one.higher for one in others):
        return Headline(f"The lowest {kind} loss: {first.name}{of_seeds}{by}", "none")
    near = first_few([first.name, *(one.name for one in others if not one.higher)])
    return Headline(f"The lowest {kind} loss is undecided: {near}{of_seeds}{by}", "open")


def _no_result(sweep: Sweep) -> Headline:
    ends = sorted({run.status.replace("_", " ") for run in sweep.runs})
    return Headline(f"No run has completed with a loss ({listed(ends)})", "broken")


def notes_on(run_set: RunSet, sweeps: Sequence[Sweep]) -> list[str]:
    """Notes on the runs: in what they differ, which commit and machine they ran on, and why they failed."""
    runs, notes = run_set.runs, list(run_set.notes)
    if len(sweeps) > 1:
        settings = [setting for place in places([sweep.runs for sweep in sweeps]) for setting in place]
        names = dict.fromkeys(setting.partition("=")[0] for setting in settings)
        notes.insert(
            0,
            f"The runs differ in {first_few(list(names)) or 'settings that change how they train'}, so they are not "
            "all compared with each other.",
        )
    if changed := [run.called for run in runs if run.commit.endswith("+")]:
        notes.append(f"Runs from a tree with uncommitted changes: {first_few(changed)}.")
    for origin, values in {
        "commits": {run.commit.rstrip("+") for run in runs},
        "uncommitted changes": {str(run.recorded("git").get("changes") or "") for run in runs},
        "torch versions": {str(run.recorded("versions").get("torch") or "") for run in runs},
        "devices": {run.device for run in runs} - {UNKNOWN},
    }.items():
        if len(known := sorted(values - {""})) > 1:
            notes.append(f"The runs come from different {origin}: {', '.join(known)}.")
    for run in runs:
        notes += [f"{run.called}: {note}" for note in run.notes]
        probed = run.recorded("parity").get("tokens")
        if isinstance(probed, list) and math.prod(probed) < run.sequences * run.seq_len:  # older runs wrote text
            notes.append(
                f"{run.called}: the probe compared {probed[0]} x {probed[1]} of {run.sequences} x {run.seq_len} tokens."
            )
        # train.py's advice is for runs that should have trained
        if run.status == "failed" and run.summary.get("message") and not run.ablated:
            notes.append(f"{run.called} failed: {run.summary['message']}".rstrip(" .") + ".")
    return notes
