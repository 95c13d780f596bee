"""Which runs may be compared with which: by label, step by step (a group), and over the sequence length (a family)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from report.record import UNKNOWN, Run

# Settings in which runs may differ and still be compared step by step. Everything else has to be equal.
_FREE = ("seed", "resume", "device", "model.name", "data.cache", "hydra", "parity", "tracking", "attention")
_FREE_TRAINING = (
    "log_every",
    "eval_every",
    "checkpoint_every",
    "keep_last",
    "profile",
    "memory_snapshot",
    "sample_tokens",
    "cpu_memory_gib",
)
# What a sweep over lengths changes along with seq_len, to keep the tokens of a step or of a run equal.
_WITH_LENGTH = (
    "seq_len",
    "training.batch_size",
    "training.batch_tokens",
    "training.steps",
    "training.eval_batches",
    "schedule.warmup_steps",
)


@dataclass(frozen=True)
class Group:
    """Runs equal in everything but implementation and seed: their curves may be compared step by step."""

    runs: tuple[Run, ...]

    @property
    def seq_len(self) -> int:
        return self.runs[0].seq_len

    def labels(self) -> list[str]:
        """Implementations, the reference's kin first: naive, tiled, sdpa, flash, then the others."""
        return sorted({run.label for run in self.runs}, key=label_order)

    def of(self, label: str) -> dict[int, Run]:
        """The runs of an implementation by seed; of several tries of one seed the one that came furthest."""
        best: dict[int, Run] = {}
        for run in self.runs:
            if run.label == label and (run.seed not in best or _furthest(run) > _furthest(best[run.seed])):
                best[run.seed] = run
        return dict(sorted(best.items()))


@dataclass(frozen=True)
class Family:
    """Groups that differ in the sequence length alone (and in what keeps their tokens equal), shortest first."""

    groups: tuple[Group, ...]

    @property
    def runs(self) -> tuple[Run, ...]:
        return tuple(run for group in self.groups for run in group.runs)

    def labels(self) -> list[str]:
        return sorted({run.label for run in self.runs}, key=label_order)


_ORDER = ("naive", "tiled", "sdpa", "flash")


def label_order(label: str) -> tuple[int, list[tuple[int, str]]]:
    """Sorts implementations as readers expect them, and 8x8 before 16x16."""
    name = label.split(" ")[0]
    words = label.replace("=", " ").replace("x", " ").split()
    return (
        _ORDER.index(name) if name in _ORDER else len(_ORDER),
        [(int(word), "") if word.isdigit() else (-1, word) for word in words],
    )


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"model": {"n_heads": 4}} -> {"model.n_heads": 4}"""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def comparison_key(run: Run) -> dict[str, str]:
    """The settings two runs must share for their curves to be compared; the device is one of them."""
    key = {
        name: json.dumps(value, sort_keys=True, default=str)
        for name, value in flatten(run.config).items()
        if not any(name == free or name.startswith(f"{free}.") for free in _FREE)
        and name not in {f"training.{free}" for free in _FREE_TRAINING}
    }
    return key | {
        "attention.dropout": json.dumps(run.option("attention.dropout", 0.0)),
        "training.precision": run.precision,
        "device": run.device,
    }


def group_runs(runs: Sequence[Run]) -> list[Group]:
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
        groups.setdefault(json.dumps(key, sort_keys=True), []).append(run)
    return sorted((Group(tuple(members)) for members in groups.values()), key=lambda group: group.seq_len)


def _agree(killed: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Whether the settings that a killed run did record are those of the other."""
    known = {name for name, value in killed.items() if "${" not in value} - {"device", "training.precision"}
    return all(killed[name] == other.get(name) for name in known)


def family_runs(runs: Sequence[Run]) -> list[Family]:
    """Groups side by side over the sequence length.

    A sweep may change batch and steps with the length, to keep tokens equal; where one length comes with
    several batches, only equal batches belong together.
    """
    loose: dict[str, list[Group]] = {}
    for group in group_runs(runs):
        loose.setdefault(_key_without(group, _WITH_LENGTH), []).append(group)
    families = []
    for groups in loose.values():
        if len({group.seq_len for group in groups}) == len(groups):
            families.append(Family(tuple(groups)))
            continue
        strict: dict[str, list[Group]] = {}
        for group in groups:
            strict.setdefault(_key_without(group, ("seq_len",)), []).append(group)
        families += [Family(tuple(members)) for members in strict.values()]
    return families


def differing_settings(groups: Sequence[Group]) -> dict[str, list[str]]:
    """The settings in which groups differ, each with the value of every group, in order.

    Where seq_len is one of them, what goes with it is left out.
    """
    keys = [comparison_key(group.runs[0]) for group in groups]
    names = sorted({name for key in keys for name in key})
    values = {name: [key.get(name, "default").strip('"') for key in keys] for name in names}
    differing = {name: found for name, found in values.items() if len(set(found)) > 1}
    if "seq_len" in differing:
        return {name: found for name, found in differing.items() if name == "seq_len" or name not in _WITH_LENGTH}
    return differing


def describe(groups: Sequence[Group]) -> list[str]:
    """What sets each group apart from the others, in words: "seq_len 512, model.n_layers 6"; one alone gets none."""
    differing = differing_settings(groups)
    return [", ".join(f"{name} {_readable(found[n])}" for name, found in differing.items()) for n in range(len(groups))]


def _readable(value: str) -> str:
    return f"{int(value):,}" if value.isdigit() else value


def _key_without(group: Group, names: Sequence[str]) -> str:
    key = comparison_key(group.runs[0])
    return json.dumps({name: value for name, value in key.items() if name not in names}, sort_keys=True)


def _furthest(run: Run) -> tuple[bool, int, str]:
    return run.status == "completed", run.step, str(run.summary.get("started") or "")
