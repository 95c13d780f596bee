"""Run folders, found and read.

A run folder is read as it was left: a run that is still going, was killed in the middle of a line or never
wrote its summary is data too. What had to be read around is kept as a note, one sentence each.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from errors import UserError
from report.record import UNKNOWN, Run, Series

_SKIPPED_FOLDERS = {"checkpoints", "wandb", "report", ".hydra", ".submitit"}


class ReportError(UserError):
    """Nothing to report on; the message says what was looked for."""


@dataclass(frozen=True)
class RunSet:
    """Everything found under the given folders, and what there is to say about how it was found."""

    runs: tuple[Run, ...]
    notes: tuple[str, ...]


def find_runs(folders: Sequence[Path]) -> RunSet:
    """All runs in and below `folders`, in order of their names.

    Raises ReportError where a folder does not exist, or where none holds a run.
    """
    runs: list[Run] = []
    notes: list[str] = []
    for folder in folders:
        if not folder.is_dir():
            raise ReportError(f"{folder} is not a folder; give run folders, or the folder of a sweep.")
        found = sorted(_run_folders(folder), key=lambda path: [_natural(part) for part in path.parts])
        if not found:
            notes.append(f"{folder} holds no run and was left out.")
        notes += _missing_jobs(folder, len(found))
        for path in found:
            name = path.relative_to(folder).as_posix() if path != folder else path.name
            runs.append(read_run(path, name if len(folders) == 1 or path == folder else f"{folder.name}/{name}"))
    if not runs:
        named = ", ".join(str(folder) for folder in folders)
        raise ReportError(
            f"no runs found in {named}; a run folder holds metrics.jsonl, as train.py writes it below outputs/ "
            "or multirun/."
        )
    unique = {run.folder.resolve(): run for run in runs}
    labelled = label_runs(unique.values())
    return RunSet(tuple(labelled), (*notes, *_provenance_notes(labelled)))


def _run_folders(folder: Path) -> Iterable[Path]:
    if any((folder / name).is_file() for name in ("metrics.jsonl", "summary.json", ".hydra/overrides.yaml")):
        yield folder
        return
    for child in folder.iterdir():
        if child.is_dir() and not child.is_symlink() and child.name not in _SKIPPED_FOLDERS:
            yield from _run_folders(child)


def _missing_jobs(folder: Path, found: int) -> list[str]:
    """Whether a sweep, which notes its jobs in sweep.json when it starts, has got to all of them."""
    try:
        jobs = len(json.loads((folder / "sweep.json").read_text(encoding="utf-8"))["jobs"])
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [f"{folder.name} is a sweep of {jobs} jobs, of which {found} have a run folder."] if found < jobs else []


def read_run(folder: Path, name: str | None = None) -> Run:
    """One run folder. Files that are missing, cut off or damaged are read around, and noted."""
    name = name or folder.name
    called = _called(name)
    notes: list[str] = []
    summary = _read_summary(folder / "summary.json", called, notes)
    config = summary.get("config")
    if not isinstance(config, Mapping):
        config = _read_yaml(folder / ".hydra" / "config.yaml", dict, called, notes)
    overrides = summary.get("overrides")
    if not isinstance(overrides, list):
        overrides = _read_yaml(folder / ".hydra" / "overrides.yaml", list, called, notes)
    metrics, texts = _read_metrics(folder / "metrics.jsonl", called, notes)
    run = Run(
        folder=folder,
        name=name,
        label="",
        status=str(summary.get("status") or "unfinished"),
        config=config,
        metrics=metrics,
        texts=texts,
        overrides=tuple(str(override) for override in overrides),
        summary=summary,
    )
    notes += _smaller_probe(run, called)
    # A run that did not fit may well have ended before it logged anything.
    lines = folder / "metrics.jsonl"
    if not run.out_of_memory and not (lines.is_file() and lines.stat().st_size):
        notes.append(f"{called}: metrics.jsonl is {'empty' if lines.is_file() else 'missing'}, so it has no curve.")
    return replace(run, label=run.attention, notes=(*notes, *_ending(run, called)))


def _smaller_probe(run: Run, called: str) -> list[str]:
    """Whether the probe compared less than a micro-batch, in a sentence."""
    compared = run.recorded("parity").get("tokens")
    if isinstance(compared, str):  # as older runs wrote it: 8x128
        compared = [int(number) for number in compared.split("x")]
    if compared is None or math.prod(compared) >= run.sequences * run.seq_len:
        return []
    return [
        f"{called}: the probe compared {compared[0]} x {compared[1]} of {run.sequences} x {run.seq_len} tokens, "
        "because the reference's scores of all did not fit the memory."
    ]


def _ending(run: Run, called: str) -> list[str]:
    """How a run ended that did not complete, in a sentence."""
    if run.status == "unfinished":
        return [f"{called} wrote no summary: it is still running, or was killed after step {run.step}."]
    if run.status == "interrupted":
        return [f"{called} was interrupted after {run.step} of {run.summary.get('steps', '?')} steps."]
    if run.status != "failed":
        return []
    ablation, step = run.option("attention.ablate", "none"), run.diverged()
    if ablation != "none" and step is not None:  # the advice in train.py's message is for runs that should have trained
        return [f"{called} was not finite at step {step}, which is the result of attention.ablate={ablation}."]
    message = str(run.summary.get("message") or "").strip().rstrip(".")
    return [f"{called} failed after step {run.step}{f': {message}' if message else ''}."]


def _called(name: str) -> str:
    """A run's name in a sentence, where a number alone would read as a count."""
    return f"run {name}" if name.isdigit() else name


def _read_summary(path: Path, name: str, notes: list[str]) -> Mapping[str, Any]:
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        summary = None
    if isinstance(summary, Mapping):
        return summary
    notes.append(f"{name}: summary.json cannot be read and was passed over.")
    return {}


def _read_yaml(path: Path, kind: type, name: str, notes: list[str]) -> Any:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return kind()
    except (OSError, ValueError, yaml.YAMLError):
        content = None
    if isinstance(content, kind):
        return content
    notes.append(f"{name}: {path.parent.name}/{path.name} cannot be read and was passed over.")
    return kind()


def _read_metrics(path: Path, name: str, notes: list[str]) -> tuple[dict[str, Series], dict[str, dict[int, str]]]:
    values: dict[str, dict[int, float]] = {}
    texts: dict[str, dict[int, str]] = {}
    damaged: list[int] = []
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}, {}
    for n, line in enumerate(lines):
        try:
            record = json.loads(line)
            step = int(record["step"])
        except (ValueError, TypeError, KeyError):
            damaged += [n] if line.strip() else []
            continue
        # A run that was resumed logs some steps again: the later line is the one its weights came from.
        for metric, logged in record.items():
            if metric == "step":
                continue
            if (value := _float(logged)) is not None:
                values.setdefault(metric, {})[step] = value
            elif isinstance(logged, str):
                texts.setdefault(metric, {})[step] = logged
    if damaged == [len(lines) - 1]:
        notes.append(f"{name}: the last line of metrics.jsonl is cut off and was left out.")
    elif damaged:
        plural = "s" if len(damaged) > 1 else ""
        notes.append(
            f"{name}: {len(damaged)} damaged line{plural} of metrics.jsonl left out (first: line {damaged[0] + 1})."
        )
    series = {metric: sorted(points.items()) for metric, points in values.items()}
    return {
        metric: Series(np.array([s for s, _ in points], np.int64), np.array([v for _, v in points]))
        for metric, points in series.items()
    }, texts


def _float(value: Any) -> float | None:
    """A number, also one that strict JSON spells as a word: nan, inf, -inf."""
    if isinstance(value, int | float) or value in ("nan", "inf", "-inf"):
        return float(value)
    return None


def label_runs(runs: Iterable[Run]) -> list[Run]:
    """The same runs, each labelled by its implementation and by the attention options in which its namesakes differ."""
    runs = list(runs)
    labelled = []
    for run in runs:
        options = _variant(run)
        others = [_variant(other) for other in runs if other.attention == run.attention]
        differing = [key for key in options if any(other.get(key) != options[key] for other in others)]
        words = []
        if {"block_q", "block_k"} & set(differing):
            words.append(f"{options['block_q']}x{options['block_k']}")
        for key in differing:
            if key == "ablate":
                words += [str(options[key])] if options[key] != "none" else []
            elif key not in ("block_q", "block_k"):
                words.append(f"{key}={options[key]}")
        labelled.append(replace(run, label=" ".join([run.attention, *words])))
    return labelled


def _variant(run: Run) -> dict[str, Any]:
    options = {**(run.option("attention") or {})}
    return {
        "block_q": 64,
        "block_k": 64,
        "ablate": "none",
        **{key: value for key, value in options.items() if key not in ("name", "dropout")},
    }


def _provenance_notes(runs: Sequence[Run]) -> list[str]:
    notes = []
    if full := [_called(run.name) for run in runs if run.out_of_memory]:
        notes.append(f"{_count(full, 'run')} ran out of memory, which is a result too ({listing(full)}).")
    if dirty := [_called(run.name) for run in runs if run.commit.endswith("+")]:
        notes.append(f"{_count(dirty, 'run')} came from a tree with uncommitted changes ({listing(dirty)}).")
    for what, found in {
        "commits": {run.commit.rstrip("+") for run in runs},
        "torch versions": {str(run.recorded("versions").get("torch") or "") for run in runs},
        "devices": {run.device for run in runs} - {UNKNOWN},
    }.items():
        if len(known := sorted(found - {""})) > 1:
            notes.append(f"The runs come from different {what}: {', '.join(known)}.")
    return notes


def listing(names: Sequence[str], limit: int = 4) -> str:
    """The first few names, and how many more there are."""
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")


def _count(items: Sequence[Any], noun: str) -> str:
    return f"{len(items)} {noun}{'s' if len(items) != 1 else ''}"


def _natural(part: str) -> tuple[int, str]:
    return (int(part), "") if part.isdigit() else (-1, part)
