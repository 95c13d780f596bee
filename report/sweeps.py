"""Which runs belong together: a cell (equal but for implementation and seed), a sweep (cells of other settings).

A sweep over seq_len or over the number of devices has an axis; one over anything else (optimizer.lr, score) has none,
and its cells stand side by side.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from report.runs import UNKNOWN, Run, number

GIB = 2**30
# fp32 weights, their gradients, and AdamW's two moments.
STATIC_BYTES_PER_PARAMETER = 16

# Settings in which runs may differ and still be compared step by step. Everything else has to be equal.
_FREE = ("seed", "resume", "device", "model.name", "data.cache", "hydra", "parity", "tracking", "attention")
_FREE_TRAINING = (
    "log_every", "eval_every", "checkpoint_every", "keep_last", "profile", "memory_snapshot", "sample_tokens",
    "cpu_memory_gib",
)  # fmt: skip
# What a sweep over lengths or devices changes along with them, to keep the tokens of a step or of a run equal.
_BATCH = ("training.batch_size", "training.batch_tokens")
_WITH_LENGTH = ("seq_len", *_BATCH, "training.steps", "training.eval_batches", "schedule.warmup_steps")
_WITH_DEVICES = ("devices", *_BATCH, "parallel")
_DOCUMENTS = "data.documents"  # how a text is read, not which
_ORDER = ("naive", "tiled", "sdpa", "flash", "flex")


@dataclass(frozen=True)
class Cell:
    """Runs equal in everything but implementation and seed: their curves may be compared step by step.

    labels  the implementation of each run, with the options that set it apart from its namesakes: "tiled 16x16"
    where   the settings that set the cell apart from the others of its sweep, as overrides: ("optimizer.lr=0.003",)
    """

    runs: tuple[Run, ...]
    names: Mapping[str, str] = field(default_factory=dict)  # of the run -> its label
    where: tuple[str, ...] = ()

    @property
    def seq_len(self) -> int:
        return self.runs[0].seq_len

    @property
    def devices(self) -> int:
        return self.runs[0].devices

    @property
    def short(self) -> str:
        """`where` without the groups of the settings: "lr=0.003"."""
        pairs = [setting.partition("=") for setting in self.where]
        return " ".join(f"{name.split('.')[-1]}={value}" for name, _, value in pairs)

    def label(self, run: Run) -> str:
        return self.names[run.name]

    def labels(self) -> list[str]:
        """Implementations, the reference's kin first: naive, tiled, sdpa, flash, then the others."""
        return sorted({self.label(run) for run in self.runs}, key=label_order)

    def of(self, label: str) -> dict[int, Run]:
        """The runs of an implementation by seed; of several tries of one seed the one that came furthest."""
        best: dict[int, Run] = {}
        for run in self.runs:
            if self.label(run) == label and (run.seed not in best or _furthest(run) > _furthest(best[run.seed])):
                best[run.seed] = run
        return dict(sorted(best.items()))


@dataclass(frozen=True)
class Sweep:
    """Cells that are read side by side; `axis` is seq_len or devices, by which they are sorted, or None."""

    cells: tuple[Cell, ...]
    axis: str | None = None

    @property
    def runs(self) -> tuple[Run, ...]:
        return tuple(run for cell in self.cells for run in cell.runs)

    def labels(self) -> list[str]:
        return sorted({label for cell in self.cells for label in cell.labels()}, key=label_order)

    def at(self, cell: Cell) -> int:
        """Where the cell stands on the axis; without one, its place in the sweep."""
        return int(getattr(cell, self.axis)) if self.axis else self.cells.index(cell)


@dataclass(frozen=True)
class Point:
    """One implementation in one cell: medians over its seeds, None where not measured."""

    label: str
    cell: Cell
    at: int
    runs: tuple[Run, ...]
    out_of_memory: bool
    tokens_per_s: float | None
    step_ms: float | None
    mfu: float | None
    memory_gib: float | None
    train_loss: float | None
    val_loss: float | None
    tokens: float | None
    trained: bool  # at least one run took a step; one killed before that shows nothing

    @property
    def loss(self) -> float | None:
        """The final validation loss, else the training loss; None where there is no finite one."""
        loss = self.train_loss if self.val_loss is None else self.val_loss
        return loss if self.trained and loss is not None and math.isfinite(loss) else None


@dataclass(frozen=True)
class Crossover:
    """Where an implementation overtakes the reference for good: from there on it is as fast or faster.

    seq_len  interpolated between the measured lengths around it; None where there is none
    first    the measured length from which on it is as fast or faster; None where it is slower at the longest
    speedup  over the reference at the longest length that both were measured at
    longest  that length
    """

    label: str
    seq_len: float | None
    first: int | None
    speedup: float
    longest: int


def label_order(label: str) -> tuple[int, list[tuple[int, str]]]:
    """Sorts implementations as readers expect them, and 8x8 before 16x16."""
    name = label.split(" ")[0]
    words = label.replace("=", " ").replace("x", " ").split()
    return (
        _ORDER.index(name) if name in _ORDER else len(_ORDER),
        [(int(word), "") if word.isdigit() else (-1, word) for word in words],
    )


def labels_of(runs: Sequence[Run]) -> dict[str, str]:
    """Each run's implementation, with the attention options in which its namesakes differ, by the run's name."""
    labels = {}
    for run in runs:
        options = _attention_options(run)
        others = [_attention_options(other) for other in runs if other.attention == run.attention]
        differing = [key for key in options if any(key in other and other[key] != options[key] for other in others)]
        words = []
        if {"block_q", "block_k"} & set(differing):
            words.append(f"{options['block_q']}x{options['block_k']}")
        for key in differing:
            if key == "ablate":
                words += [str(options[key])] if run.ablated else []
            elif key not in ("block_q", "block_k"):
                words.append(f"{key}={options[key]}")
        labels[run.name] = " ".join([run.attention, *words])
    return labels


def _attention_options(run: Run) -> dict[str, Any]:
    options = {key.removeprefix("attention."): value for key, value in run.settings.items() if "attention." in key}
    return {key: value for key, value in options.items() if key not in ("name", "dropout")}


def comparison_key(run: Run) -> dict[str, str]:
    """The settings two runs must share for their curves to be compared; the devices are among them."""
    settings = {name: value for name, value in run.settings.items() if not _free(name)}
    settings |= {"training.precision": run.precision, "device": run.device, "devices": run.devices}
    return {name: json.dumps(value, sort_keys=True, default=str) for name, value in sorted(settings.items())}


def _free(name: str) -> bool:
    if name == "attention.dropout":
        return False
    return name.removeprefix("training.") in _FREE_TRAINING or _among(name, _FREE)


def _among(name: str, groups: Iterable[str]) -> bool:
    return any(name == group or name.startswith(f"{group}.") for group in groups)


def cells_of(runs: Sequence[Run]) -> list[Cell]:
    """Runs that may be compared step by step, in order of their sequence length.

    A run that was killed recorded neither device nor precision, and its settings as composed, with references in
    them unresolved; it belongs to the runs it shares the rest with, if those agree among themselves.
    """
    groups: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.device == UNKNOWN):
        key = comparison_key(run)
        if run.device == UNKNOWN:
            alike = [members for members in groups.values() if _agree(key, comparison_key(members[0]))]
            if len(alike) == 1:
                alike[0].append(run)
                continue
        groups.setdefault(json.dumps(key), []).append(run)
    labels = labels_of(runs)
    cells = [Cell(tuple(members), labels) for members in groups.values()]
    return sorted(cells, key=lambda cell: cell.seq_len)


def _agree(killed: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Whether the settings that a killed run did record are those of the other."""
    known = {n for n, value in killed.items() if "${" not in value} - {"device", "devices", "training.precision"}
    return all(killed[name] == other.get(name) for name in known)


def sweeps_of(runs: Sequence[Run]) -> list[Sweep]:
    """Cells side by side: over the sequence length where one was swept, else over whatever differs.

    A sweep may change batch and steps with the length, to keep tokens equal; where one length comes with several
    batches, only equal batches belong together. Runs on other data or another kind of device have their own sweep.
    """
    sweeps: list[Sweep] = []
    rest: list[Cell] = []
    for cells in _partition(cells_of(runs), lambda name: name not in _WITH_LENGTH):
        one_batch = len({cell.seq_len for cell in cells}) == len(cells)
        for found in [cells] if one_batch else _partition(cells, lambda name: name != "seq_len"):
            if len(found) > 1:
                sweeps.append(Sweep(_placed(found), "seq_len"))
            else:
                rest += found
    for found in _partition(rest, lambda name: name == "device" or (_among(name, ("data",)) and name != _DOCUMENTS)):
        names = {setting.partition("=")[0] for setting in settings_apart([cell.runs[0] for cell in found])[0]}
        if "devices" in names and all(_among(name, _WITH_DEVICES) for name in names):
            sweeps.append(Sweep(tuple(sorted(_placed(found), key=lambda cell: cell.devices)), "devices"))
        else:
            sweeps.append(Sweep(_placed(found)))
    return sweeps


def _partition(cells: Sequence[Cell], shared: Callable[[str], bool]) -> list[list[Cell]]:
    """Cells that agree in the settings whose names are `shared`."""
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        key = {name: value for name, value in comparison_key(cell.runs[0]).items() if shared(name)}
        found.setdefault(json.dumps(key), []).append(cell)
    return list(found.values())


def settings_apart(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """What sets each of the runs apart from the others: ("seq_len=512", "optimizer.lr=0.1")."""
    keys = [comparison_key(run) for run in runs]
    names = [name for name in sorted({n for key in keys for n in key}) if len({key.get(name) for key in keys}) > 1]
    return [tuple(f"{name}={key.get(name, 'default').strip(chr(34))}" for name in names) for key in keys]


def _placed(cells: Sequence[Cell]) -> tuple[Cell, ...]:
    """The cells, each knowing what sets it apart: the overrides where they tell, else the settings."""
    typed = [_overrides(cell) for cell in cells]
    shared = set.intersection(*map(set, typed))
    where = [tuple(override for override in overrides if override not in shared) for overrides in typed]
    if not all(where) or len(set(where)) < len(cells):
        where = settings_apart([cell.runs[0] for cell in cells])
    return tuple(replace(cell, where=found) for cell, found in zip(cells, where, strict=True))


def _overrides(cell: Cell) -> list[str]:
    """What was typed for every run of the cell, as far as it decides with which it may be compared."""
    found = [override for override in cell.runs[0].overrides if not _free(override.partition("=")[0].lstrip("+~"))]
    return [override for override in found if all(override in run.overrides for run in cell.runs)]


def points(sweep: Sweep) -> dict[str, list[Point]]:
    """The measurements of each label, cell by cell."""
    table: dict[str, list[Point]] = {label: [] for label in sweep.labels()}
    for cell in sweep.cells:
        for label in cell.labels():
            table[label].append(_point(label, cell, sweep.at(cell)))
    return table


def _point(label: str, cell: Cell, at: int) -> Point:
    runs = tuple(cell.of(label).values())
    done = [run for run in runs if not run.out_of_memory]
    return Point(
        label=label,
        cell=cell,
        at=at,
        runs=runs,
        out_of_memory=not done,
        tokens_per_s=median_of(run.median("throughput/tokens_per_s") for run in done),
        step_ms=median_of(run.median("throughput/step_ms") for run in done),
        mfu=median_of(run.median("throughput/mfu_causal") for run in done),
        memory_gib=median_of(run.peak() for run in done),
        train_loss=median_of(run.final("train/loss") for run in done),
        val_loss=median_of(run.final("val/loss") for run in done),
        tokens=median_of(number(run.summary.get("tokens")) for run in done),
        trained=any(run.trained for run in runs),
    )


def ranked(sweep: Sweep) -> list[Point]:
    """Every implementation in every cell, the lowest loss first."""
    every = [point for found in points(sweep).values() for point in found]
    return sorted(every, key=lambda point: (point.loss is None, point.loss))


def median_of(values: Iterable[float | None]) -> float | None:
    """The median of what is known; None where nothing is."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def attention_alone(runs: Iterable[Run]) -> bool:
    """Whether memory is that of one attention layer, as measured on a CPU."""
    return any(run.summary.get("memory_source") == "attention" for run in runs)


def predicted_memory(sweep: Sweep, label: str) -> list[tuple[int, float]]:
    """(seq_len, GiB) at every length, from the two shortest that were measured.

    tiles    constant + a * T
    scores   constant + a * T + b * T^2, of naive and SDPA's math backend: the constant is 16 bytes a parameter, or
             nothing where the attention alone was measured

    Empty where no more than two were measured, or where the sequences of a micro-batch change with the length.
    """
    measured = [point for point in points(sweep)[label] if point.memory_gib is not None]
    if len(measured) < 3 or sweep.axis != "seq_len" or len({run.sequences for run in sweep.runs}) > 1:
        return []
    run = measured[0].runs[0]
    (T0, gib0), (T1, gib1) = ((point.at, point.memory_gib or 0.0) for point in measured[:2])
    if run.attention == "naive" or (run.attention == "sdpa" and run.option("attention.backend") == "math"):
        parameters = 0.0 if attention_alone([run]) else number(run.summary.get("parameters")) or 0.0
        constant = min(STATIC_BYTES_PER_PARAMETER * parameters / GIB, gib0)
        b = max(0.0, ((gib1 - constant) / T1 - (gib0 - constant) / T0) / (T1 - T0))
        a = (gib0 - constant) / T0 - b * T0
    else:
        a = (gib1 - gib0) / (T1 - T0)
        b, constant = 0.0, gib0 - a * T0
    return [(cell.seq_len, constant + a * cell.seq_len + b * cell.seq_len**2) for cell in sweep.cells]


def crossovers(sweep: Sweep, reference: str = "naive") -> list[Crossover]:
    """Where each implementation overtakes `reference` in step time; those that share no length with it are left out."""
    times = {
        label: {point.at: point.step_ms for point in found if point.step_ms} for label, found in points(sweep).items()
    }
    theirs = times.get(reference, {})
    found = []
    for label, ours in times.items():
        shared = sorted(ours.keys() & theirs.keys())
        if label == reference or not shared:
            continue
        gains = [math.log(theirs[T] / ours[T]) for T in shared]
        lasting = next((n for n in range(len(gains)) if min(gains[n:]) >= 0), None)
        at = None
        if lasting:  # straight lines in the logarithms of time and length
            (T0, T1), (g0, g1) = map(math.log, shared[lasting - 1 : lasting + 1]), gains[lasting - 1 : lasting + 1]
            at = math.exp(T0 + (T1 - T0) * -g0 / (g1 - g0))
        first = None if lasting is None else shared[lasting]
        found.append(Crossover(label, at, first, math.exp(gains[-1]), shared[-1]))
    return found


def same_tokens(sweep: Sweep) -> bool:
    """Whether runs of several lengths were trained on equally many tokens, so that their losses compare contexts."""
    trained = [point for found in points(sweep).values() for point in found if point.val_loss is not None]
    totals = [point.tokens or 0.0 for point in trained]
    return sweep.axis == "seq_len" and len({p.at for p in trained}) > 1 and 0 < max(totals) <= 1.02 * min(totals)


def _furthest(run: Run) -> tuple[bool, int, str]:
    return run.status == "completed", run.step, str(run.summary.get("started") or "")
