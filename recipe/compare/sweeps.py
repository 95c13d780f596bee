"""Which runs belong together: a pair (of one seed: they draw the same batches and masks, so each step can be compared),
a cell (equal but for implementation and seed), a sweep (cells of other settings).

Labels are the differences between runs, as overrides: from the settings that a run recorded, as a typed override may be
repeated, or replaced by a resumed run. The cells of a sweep over seq_len are in the order of their lengths; those of
one over anything else (optimizer.lr, score) stand side by side.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from recipe import CONF
from recipe.compare.runs import UNKNOWN, Run, Series, natural
from recipe.drawing import IMPLEMENTATIONS

# Settings in which runs may differ and still be compared step by step. Everything else has to be equal.
_FREE = ("seed", "resume", "device", "model.name", "data.cache", "hydra", "parity", "tracking", "attention", "arena")
_FREE_TRAINING = (
    "log_every", "eval_every", "checkpoint_every", "keep_last", "profile", "sample_tokens", "cpu.memory_gib",
)  # fmt: skip
_GROUPS = ("data", "score", "optimizer", "model", "schedule")  # whose names are choices of files in conf/
_OFF = ("null", "false")
# Settings that a sweep over lengths also changes, to keep the tokens of a step or of a run equal.
_WITH_LENGTH = (
    "seq_len", "training.batch_size", "training.batch_tokens", "training.steps", "training.eval_batches",
    "schedule.warmup_steps",
)  # fmt: skip
_OF_MACHINE = ("device", "devices", "training.precision")

Place = tuple[str, ...]


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


def equal_to_the_bit(pairs: Mapping[int, tuple[Run, Run]]) -> bool:
    """Whether there are pairs, and the runs of each logged the same losses at the same steps."""
    logged = [
        [(*run.series("train/loss"), *run.series("val/loss"), run.final("val/loss")) for run in pair]
        for pair in pairs.values()
    ]
    return bool(logged) and all(all(map(np.array_equal, *pair)) for pair in logged)


@dataclass(frozen=True)
class Cell:
    """Runs equal in everything but implementation and seed: their curves may be compared step by step.

    names   of each run's implementation, by the run's name
    where   the settings that distinguish the cell from the others of its sweep, as overrides: ("optimizer.lr=0.003",)
    """

    runs: tuple[Run, ...]
    names: Mapping[str, str]
    where: tuple[str, ...] = ()

    @property
    def seq_len(self) -> int:
        return self.runs[0].seq_len

    @property
    def short(self) -> str:
        """`where` without the groups of the settings, unless two share a name: "lr=0.003"."""
        pairs = [setting.partition("=") for setting in self.where]
        last = [name.split(".")[-1] for name, _, _ in pairs]
        return " ".join(
            f"{short if last.count(short) == 1 else name}={value}"
            for (name, _, value), short in zip(pairs, last, strict=True)
        )

    def label(self, run: Run) -> str:
        return self.names[run.name]

    def labels(self) -> list[str]:
        """Implementations in order: naive, tiled, sdpa, flash, flex, then the others."""
        return sorted({self.label(run) for run in self.runs}, key=label_order)

    def of(self, label: str) -> dict[int, Run]:
        """The runs of an implementation by seed; of several tries of one seed the one that came furthest."""
        return by_seed(run for run in self.runs if self.label(run) == label)


@dataclass(frozen=True)
class Sweep:
    """Cells that are read side by side, sorted by seq_len where they are `over_lengths`."""

    cells: tuple[Cell, ...]
    over_lengths: bool = False

    @property
    def runs(self) -> tuple[Run, ...]:
        return tuple(run for cell in self.cells for run in cell.runs)

    def labels(self) -> list[str]:
        return sorted({label for cell in self.cells for label in cell.labels()}, key=label_order)

    def position(self, cell: Cell) -> int:
        """The cell's length; in a sweep over something else, its place."""
        return cell.seq_len if self.over_lengths else self.cells.index(cell)


def label_order(label: str) -> tuple[int, list[tuple[int, str]]]:
    """Sorts implementations as readers expect them, and 8x8 before 16x16."""
    name, words = label.split(" ")[0], label.replace("=", " ").replace("x", " ").split()
    order = IMPLEMENTATIONS.index(name) if name in IMPLEMENTATIONS else len(IMPLEMENTATIONS)
    return order, natural(words)


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
    return {
        option: value
        for name, value in run.settings.items()
        if among(name, ("attention",)) and (option := name.partition(".")[2]) not in ("name", "dropout")
    }


def cells_of(runs: Sequence[Run]) -> list[Cell]:
    """Runs that may be compared step by step, in order of their sequence length.

    A run that was killed recorded neither device nor precision. It belongs to the runs with the same other settings, if
    these agree with each other.
    """
    groups: dict[str, dict[tuple[str, ...], list[Run]]] = {}  # by the settings, then by the machine
    for run in sorted(runs, key=lambda run: run.device == UNKNOWN):
        key = comparison_key(run)
        machine = tuple(key.pop(name) for name in _OF_MACHINE)
        alike = groups.setdefault(json.dumps(key), {})
        if run.device == UNKNOWN and len(alike) == 1:
            machine = next(iter(alike))
        alike.setdefault(machine, []).append(run)
    labels = labels_of(runs)
    cells = [Cell(tuple(members), labels) for alike in groups.values() for members in alike.values()]
    return sorted(cells, key=lambda cell: cell.seq_len)


def sweeps_of(runs: Sequence[Run]) -> list[Sweep]:
    """Cells side by side: over the sequence length where one was swept, else over whatever differs.

    A sweep may change batch and steps with the length, to keep tokens equal; where one length comes with several
    batches, only equal batches belong together. Runs on other data or another kind of device have their own sweep.
    """
    sweeps: list[Sweep] = []
    rest: list[Cell] = []
    for cells in _partition(cells_of(runs), lambda name: name not in _WITH_LENGTH):
        one_batch = len({cell.seq_len for cell in cells}) == len(cells)
        for group in [cells] if one_batch else _partition(cells, lambda name: name != "seq_len"):
            if len(group) > 1:
                placed = tuple(replace(cell, where=(f"seq_len={cell.seq_len}",)) for cell in group)
                sweeps.append(Sweep(placed, over_lengths=True))
            else:
                rest += group
    for group in _partition(rest, lambda name: among(name, ("data", "device")) and name != "data.documents"):
        settings = places([cell.runs for cell in group])
        sweeps.append(Sweep(tuple(replace(cell, where=where) for cell, where in zip(group, settings, strict=True))))
    return sweeps


def _partition(cells: Sequence[Cell], shared: Callable[[str], bool]) -> list[list[Cell]]:
    """Cells that agree in the settings whose names are `shared`."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        key = {name: value for name, value in comparison_key(cell.runs[0]).items() if shared(name)}
        groups.setdefault(json.dumps(key), []).append(cell)
    return list(groups.values())


def comparison_key(run: Run) -> dict[str, str]:
    """The settings two runs must share for their curves to be compared; the devices are among them."""
    settings = {name: value for name, value in run.settings.items() if not free(name)}
    settings |= {"training.precision": run.precision, "device": run.device, "devices": run.devices}
    return {name: json.dumps(value, sort_keys=True, default=str) for name, value in sorted(settings.items())}


def free(name: str) -> bool:
    """Whether runs that differ in this setting may be compared step by step."""
    if name == "attention.dropout":
        return False
    return name.removeprefix("training.") in _FREE_TRAINING or among(name, _FREE)


def among(name: str, groups: Iterable[str]) -> bool:
    """Whether a dotted name is one of `groups` or lies in one."""
    return any(name == group or name.startswith(f"{group}.") for group in groups)


def places(members: Sequence[Sequence[Run]]) -> list[Place]:
    """The settings in which groups of runs differ from each other: [("seq_len=512",), ("seq_len=1024",)].

    members  the runs of each group; a setting that varies within one is not named

    The choice of a file in conf/, such as score=window, stands for the settings of its group that are the same
    wherever that choice is.
    """
    names = {name for runs in members for run in runs for name in comparison_key(run)}
    keys = [_shared(runs, names) for runs in members]
    shared = set.intersection(*map(set, keys))
    differing = sorted(name for name in shared if len({key[name] for key in keys}) > 1)
    choices = [name for name in differing if name in _GROUPS]
    settings = [name for name in differing if name not in choices and not _follows(name, keys, choices)]
    if "score" in choices:  # score=causal says that there is no window
        alike = {name for name in shared - {*differing} if among(name, ("score",)) and keys[0][name] not in _OFF}
        settings = sorted({*settings, *alike})
    return [tuple("=".join((name, key[name].strip('"'))) for name in (*choices, *settings)) for key in keys]


def _shared(runs: Sequence[Run], names: Iterable[str]) -> dict[str, str]:
    """The settings in which runs agree, with the files of conf/ that all name: {"score": "window"}.

    Runs that were killed before they recorded a device count only where there are no others.
    """
    keys = [comparison_key(run) for run in runs if run.device != UNKNOWN] or [comparison_key(runs[0])]
    result = {name: keys[0].get(name, "default") for name in names if len({key.get(name) for key in keys}) == 1}
    for group in _GROUPS:
        chosen = {str(run.option(f"{group}.name")) for run in runs}
        if len(chosen) == 1 and chosen <= {path.stem for path in (CONF / group).glob("*.yaml")}:
            result[group] = chosen.pop()
    return result


def _follows(name: str, keys: Sequence[Mapping[str, str]], choices: Sequence[str]) -> bool:
    """Whether a setting is the same wherever the choice of its group is."""
    group = name.partition(".")[0]
    pairs = {(key.get(group), key[name]) for key in keys}
    return group in choices and len(pairs) == len({choice for choice, _ in pairs})
