"""Notes on runs: where they lie, how they ended, which commit and machine they ran on."""

from __future__ import annotations

import math
from collections.abc import Sequence

from data.errors import first_few
from recipe.compare.labels import places
from recipe.compare.runs import UNKNOWN, Run, RunSet
from recipe.compare.sweeps import Sweep


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
