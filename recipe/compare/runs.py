"""Finding and reading run folders.

A run that is still going, was killed in the middle of a line or never wrote its summary is read too. Each file that
cannot be read becomes a note of one sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data.untrusted import UntrustedError
from recipe.errors import UserError
from recipe.files import flatten, number, recorded_number
from recipe.run.metrics import DAMAGED, read_metrics
from recipe.run.removed import config_as_today
from recipe.run.run_folder import CONFIG, OVERRIDES, SUMMARY, last_line, read_config_values, read_summary

UNKNOWN = "unknown device"
_SKIPPED_FOLDERS = {"checkpoints", "wandb", "report", ".hydra", ".submitit"}


class ReportError(UserError):
    """There is nothing to report on; the message says where runs were expected."""


class Series(NamedTuple):
    """One metric over the steps at which it was logged, in order: (n,) int64 and (n,) float64."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]

    def last(self) -> float | None:
        """The last value, or None where nothing was logged."""
        return float(self.values[-1]) if len(self.values) else None

    def finite(self) -> Series:
        """The series without NaN and infinite values."""
        keep = np.isfinite(self.values)
        return Series(self.steps[keep], self.values[keep])


@dataclass(frozen=True)
class Run:
    """The content of one run folder.

    name     the folder's path below the sweep
    status   completed, interrupted, failed, out_of_memory; unfinished where no summary was written
    config   nested, as composed
    records  the lines of metrics.jsonl, by step
    notes    a sentence on each file or line that could not be read
    """

    folder: Path
    name: str
    status: str
    config: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any]
    notes: tuple[str, ...]

    @property
    def called(self) -> str:
        """The name for use in a sentence: "run 3", because a bare number would read as a count."""
        return f"run {self.name}" if self.name.isdigit() else self.name

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The configuration by dotted names, without options that went and change nothing."""
        return flatten(config_as_today(dict(self.config)))

    def option(self, name: str, default: Any = None) -> Any:
        """A setting by its dotted name: `run.option("training.steps")`."""
        return self.settings.get(name, default)

    @cached_property
    def metrics(self) -> dict[str, Series]:
        """Every logged number over the steps."""
        points: dict[str, list[tuple[int, float]]] = {}
        for record in self.records:
            for metric, logged in record.items():
                if metric != "step" and (value := recorded_number(logged)) is not None:
                    points.setdefault(metric, []).append((int(record["step"]), value))
        return {
            name: Series(np.array([s for s, _ in values], np.int64), np.array([v for _, v in values]))
            for name, values in points.items()
        }

    def series(self, metric: str) -> Series:
        """A metric over steps; empty where it was never logged."""
        return self.metrics.get(metric, Series(np.zeros(0, np.int64), np.zeros(0)))

    def recorded(self, part: str) -> Mapping[str, Any]:
        """A mapping within the summary, such as `versions`; empty where it is missing or damaged."""
        value = self.summary.get(part)
        return value if isinstance(value, Mapping) else {}

    @property
    def attention(self) -> str:
        return str(self.option("attention.name", self.summary.get("attention", "unknown")))

    @property
    def ablated(self) -> bool:
        """Whether a line of the online softmax was left out on purpose."""
        return self.option("attention.ablate", "none") != "none"

    @property
    def claims_parity(self) -> bool:
        """Whether its attention claims to be softmax attention, as that of older versions does."""
        return self.summary.get("attention_exact") is not False

    @property
    def seed(self) -> int:
        return int(number(self.option("seed")) or 0)

    @property
    def seq_len(self) -> int:
        return int(number(self.option("seq_len")) or 0)

    @property
    def sequences(self) -> int:
        """Sequences that a device takes at once."""
        return int(number(self.option("training.batch_size")) or 1)

    @property
    def step(self) -> int:
        """Updates done."""
        logged = int(self.records[-1]["step"]) if self.records else 0
        return int(number(self.summary.get("step")) or logged)

    @property
    def precision(self) -> str:
        return str(self.summary.get("precision") or self.option("training.precision", "auto"))

    @property
    def device(self) -> str:
        """The device in words; UNKNOWN without a summary."""
        device = self.recorded("device")
        return str(device.get("name") or device.get("type") or UNKNOWN)

    @property
    def devices(self) -> int:
        """Number of devices it trained on."""
        return int(number(self.recorded("device").get("count")) or 1)

    @property
    def commit(self) -> str:
        """The abbreviated commit, with `+` if the tree had uncommitted changes; empty if unknown."""
        git = self.recorded("git")
        commit = str(git.get("commit") or "")[:7]
        return f"{commit}+" if commit and git.get("dirty") else commit

    @property
    def out_of_memory(self) -> bool:
        return self.status == "out_of_memory"

    @property
    def trained(self) -> bool:
        """Whether it took a step; a run without one has nothing to show."""
        return not self.out_of_memory and (self.status == "completed" or self.step > 0)

    def median(self, metric: str) -> float | None:
        """The run's median of a throughput metric: the summary's, else over the latter half of what was logged. Or a
        number that the summary holds by this name, such as `tokens`."""
        values = self.series(metric).finite().values
        recorded = number({**self.summary, **self.recorded("median")}.get(metric))
        return float(np.median(values[len(values) // 2 :])) if recorded is None and len(values) else recorded

    def peak(self, metric: str = "memory/peak_allocated_gib") -> float | None:
        """The run's peak of a memory metric, GiB."""
        values = self.series(metric).finite().values
        recorded = number(self.recorded("peak").get(metric))
        return float(values.max()) if recorded is None and len(values) else recorded

    def final(self, metric: str) -> float | None:
        """The last value of `train/loss` or `val/loss`."""
        value = number(self.summary.get(metric.replace("/", "_")))
        return self.series(metric).last() if value is None else value

    def diverged(self) -> int | None:
        """The first step whose loss or gradient is known not to be finite; None where all are finite."""
        losses = map(self.series, ("train/loss", "val/loss"))
        steps = [int(step) for s in losses for step in s.steps[~np.isfinite(s.values)]]
        stopped = number(self.summary.get("non_finite_step"))
        return min(steps if stopped is None else [*steps, int(stopped)], default=None)


class RunSet(NamedTuple):
    """The runs in and below some folders, and notes on the search."""

    runs: tuple[Run, ...]
    notes: tuple[str, ...]


def find_runs(folders: Sequence[Path]) -> RunSet:
    """All runs in and below `folders`, in order of their names.

    Raises ReportError where a folder does not exist, or where none holds a run.
    """
    runs: dict[Path, Run] = {}
    notes: list[str] = []
    for folder in folders:
        if not folder.is_dir():
            raise ReportError(f"{folder} is not a folder; give run folders, or the folder of a sweep.")
        folders_of_runs = sorted(_run_folders(folder, notes), key=lambda path: natural(path.parts))
        if not folders_of_runs:
            notes.append(f"{folder} holds no run and was left out.")
        for path in folders_of_runs:
            name = path.relative_to(folder).as_posix() if path != folder else path.name
            full_name = name if len(folders) == 1 or path == folder else f"{folder.name}/{name}"
            runs.setdefault(path.resolve(), read_run(path, full_name))
    if not runs:
        raise ReportError(
            f"no runs found in {', '.join(map(str, folders))}; a run folder holds metrics.jsonl, as train.py writes it "
            "below outputs/ or multirun/."
        )
    return RunSet(tuple(runs.values()), tuple(notes))


def read_run(folder: Path, name: str | None = None) -> Run:
    """One run folder. Files that are missing, truncated or damaged are skipped, and noted."""
    notes: list[str] = []
    summary = _read(folder, SUMMARY, read_summary, notes)
    if not summary and (said := last_line(folder)).startswith("error: "):  # before it could write a summary
        summary = {"status": "failed", "message": said.removeprefix("error: ")}
    config = summary.get("config")
    if not isinstance(config, Mapping):
        config = _read(folder, CONFIG, read_config_values, notes)
    metrics, damaged = folder / "metrics.jsonl", dict[int, bytes]()
    try:
        records = read_metrics(metrics, damaged)
    except (OSError, UntrustedError) as error:
        records = []
        notes.append(f"metrics.jsonl {_reason(error)} and is left out.")
    if damaged:
        notes.append(f"{len(damaged)} of the lines of metrics.jsonl cannot be read, the first is line {min(damaged)}.")
    if (folder / DAMAGED).exists():
        notes.append(f"metrics.jsonl had lines that could not be read when the run was resumed; they are in {DAMAGED}.")
    status = str(summary.get("status") or "unfinished")
    return Run(folder, name or folder.name, status, config, records, summary, tuple(notes))


def _run_folders(top: Path, notes: list[str]) -> Iterable[Path]:
    """The run folders in and below a folder, with a note on each folder that cannot be read."""
    waiting = [top]
    while waiting:
        folder = waiting.pop()
        try:
            if any((folder / name).is_file() for name in ("metrics.jsonl", SUMMARY, OVERRIDES)):
                yield folder
            else:
                waiting += [
                    child
                    for child in folder.iterdir()
                    if child.name not in _SKIPPED_FOLDERS and child.is_dir() and not child.is_symlink()
                ]
        except OSError as error:
            notes.append(f"{folder} {_reason(error)} and was left out.")


def _read(folder: Path, name: str, read: Callable[[Path], dict[str, Any]], notes: list[str]) -> dict[str, Any]:
    """The content of a run's file; nothing where it cannot be read, with a note unless there is no file."""
    try:
        return read(folder)
    except FileNotFoundError:
        pass
    except (OSError, UntrustedError) as error:
        notes.append(f"{Path(name).name} {_reason(error)} and is left out.")
    return {}


def _reason(error: OSError | UntrustedError) -> str:
    """Why a file is left out, as the rest of a sentence that begins with its name."""
    return f"cannot be read ({error.strerror if isinstance(error, OSError) else f'it {error}'})"


def natural(parts: Iterable[str]) -> list[tuple[int, str]]:
    """Sorts 2 before 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]
