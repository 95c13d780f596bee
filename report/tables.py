"""The numbers of the report as tables of words, and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from report import numbers
from report.draw import short_length
from report.evidence import MARGIN, FinalEvidence
from report.groups import Family, flatten
from report.parity import Judgement, Outcome
from report.record import Run, number
from report.scaling import (
    TILES,
    attention_alone,
    crossovers,
    longest_that_fits,
    median_of,
    memory_unit,
    points,
    predicted_memory,
    same_tokens,
)

DASH = "-"
WORDS = {Outcome.holds: "holds", Outcome.broken: "broken", Outcome.open: "open"}
STATUS = {"out_of_memory": "out of memory"}
_NOT_IN_TABLES = ("seed", "attention.name", "tracking", "parity", "hydra", "resume", "device")


@dataclass(frozen=True)
class Table:
    """Rows of words under columns; `numeric` columns are aligned right."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: frozenset[int]
    caption: str = ""


def table(name: str, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> Table:
    """A table whose columns of numbers are found by looking."""
    numeric = {
        n
        for n in range(1, len(columns))
        if any(any(c.isdigit() for c in row[n]) for row in rows) and all(row[n][:1] in "0123456789-" for row in rows)
    }
    return Table(name, title, tuple(columns), tuple(tuple(row) for row in rows), frozenset(numeric), caption)


def judgement_table(judgements: Sequence[Judgement], reference: str) -> Table:
    """What each measurement says of each implementation."""
    several = len({j.group.seq_len for j in judgements}) > 1
    rows = []
    for j in judgements:
        curve, final = j.curve, j.final
        rows.append(
            [
                j.label,
                *([short_length(j.group.seq_len)] if several else []),
                WORDS[j.outcome],
                f"{times(j.probe.ratio)} ({j.probe.checks} checks)" if j.probe else "not probed",
                size(curve.ratio) if curve and curve.ratio is not None else "no band",
                _final(final),
                ", ".join(str(seed) for seed in j.seeds) or "none shared",
            ]
        )
    columns = [
        "implementation",
        *(["seq_len"] if several else []),
        "parity",
        f"same weights (≤ {MARGIN:g})",
        "curve (< 1)",
        "final loss (floor)",
        "seeds",
    ]
    caption = (
        f"Same weights: the worst difference of logits or gradients to {reference}, in units of {reference}'s own "
        f"rounding. Curve: the largest distance to {reference} of the same seed, as a share of the distance between "
        f"{reference}'s seeds. Final loss: the largest difference, and the floor that rounding sets."
    )
    return table("parity", "Verdict by implementation", columns, rows, caption)


def _final(final: FinalEvidence | None) -> str:
    if final is None:
        return DASH
    amplified = final.agrees and final.floor is not None and final.difference > final.floor
    return f"{size(final.difference)} ({size(final.floor)}{', amplified' if amplified else ''})"


def run_table(runs: Sequence[Run]) -> Table:
    """Every run with the settings in which it differs."""
    differing = differing_options(runs)
    rows = [
        [
            run.name,
            run.label,
            str(run.seed),
            *(show(flatten(run.config).get(name, DASH)) for name in differing),
            STATUS.get(run.status, run.status) + (f" at step {run.step:,}" if run.status != "completed" else ""),
            loss(run.final("train/loss")),
            loss(run.final("val/loss")),
            loss(run.best_val_loss()),
            count(run.median("throughput/tokens_per_s")),
            memory(run.peak()),
            duration(number(run.summary.get("wall_time_s"))),
        ]
        for run in runs
    ]
    columns = ["run", "implementation", "seed", *differing, "status", "train loss", "val loss", "best val loss"]
    return table("runs", "All runs", [*columns, "tokens/s", "peak memory", "wall time"], rows)


def differing_options(runs: Sequence[Run]) -> list[str]:
    """The settings, by dotted name, that not all runs share."""
    flat = [flatten(run.config) for run in runs if run.config]
    names = sorted({name for config in flat for name in config})
    return [
        name
        for name in names
        if len({repr(config.get(name)) for config in flat}) > 1
        and not any(name == skipped or name.startswith(f"{skipped}.") for skipped in _NOT_IN_TABLES)
    ]


def wall_table(family: Family) -> Table | None:
    """The longest length that fits, the first that does not, and what was predicted for it."""
    found = points(family)
    if not any(point.out_of_memory for label in found for point in found[label]):
        return None
    rows = []
    for label, measured in found.items():
        failed = [point.seq_len for point in measured if point.out_of_memory]
        predicted = dict(predicted_memory(family, label))
        longest = longest_that_fits(measured)
        at = next((point for point in measured if point.seq_len == longest), None)
        rows.append(
            [
                label,
                f"{longest:,}" if longest else DASH,
                memory(at.memory_gib) if at else DASH,
                f"{min(failed):,}" if failed else DASH,
                memory(predicted.get(min(failed))) if failed else DASH,
            ]
        )
    whose = " (one layer)" if attention_alone(family.runs) else ""
    columns = ["implementation", "longest that fits", f"peak memory there{whose}"]
    columns += ["out of memory at", f"predicted there{whose}"]
    return table("memory_wall", "The memory wall", columns, rows)


def crossover_table(family: Family, reference: str) -> Table | None:
    """Where each implementation overtakes the reference."""
    rows = []
    for crossing in crossovers(family, reference):
        if crossing.seq_len:
            where = f"about {crossing.seq_len:,.0f}"
        elif crossing.first:
            where = f"at {crossing.first:,} or below"
        elif crossing.last:
            where = f"not beyond {crossing.last:,}"
        else:
            where = f"not up to {crossing.longest:,}"
        rows.append([crossing.label, where, f"{crossing.speedup:.2f} times at {crossing.longest:,}"])
    columns = ["implementation", f"overtakes {reference}", f"as fast as {reference}"]
    return table("crossover", f"Where each overtakes {reference}", columns, rows) if rows else None


def block_table(family: Family, judgements: Sequence[Judgement]) -> Table | None:
    """Tile sizes of one implementation beside each other: equal to rounding, at different cost."""
    found = points(family)
    rows = []
    for group in family.groups:
        for label in group.labels():
            if not TILES.fullmatch(label):
                continue
            point = next(point for point in found[label] if point.seq_len == group.seq_len)
            probe = next((j.probe for j in judgements if j.label == label and j.group is group), None)
            rows.append(
                [
                    label,
                    f"{group.seq_len:,}",
                    loss(median_of([run.final("train/loss") for run in group.of(label).values()]), digits=6),
                    f"{times(probe.ratio)} times rounding" if probe else "not probed",
                    milliseconds(point.step_ms),
                    count(point.tokens_per_s),
                    memory(point.memory_gib),
                ]
            )
    columns = ["tiles", "seq_len", "train loss", "same weights", "step", "tokens/s", "peak memory"]
    return table("block_size", "Tile sizes", columns, rows) if len(rows) > 1 else None


def context_table(family: Family) -> Table | None:
    """Validation loss over context length, where all lengths saw equally many tokens."""
    if not same_tokens(family):
        return None
    trained = [point for found in points(family).values() for point in found if point.val_loss is not None]
    rows = [
        [point.label, f"{point.seq_len:,}", loss(point.val_loss), count(point.tokens), count(point.tokens_per_s)]
        for point in sorted(trained, key=lambda point: point.seq_len)
    ]
    columns = ["implementation", "seq_len", "val loss", "tokens", "tokens/s"]
    return table("context_length", "Validation loss over context length", columns, rows)


def ablation_table(runs: Sequence[Run], reference: str) -> Table | None:
    """What breaks, where, by how much, and what training with it came to: from `ablation` in the summaries.

    A run trained in one precision, so what it came to stands in that row alone; in a row of its own where the
    precision is none of those measured.
    """
    rows = []
    for run in runs:
        measured = run.summary.get("ablation")
        entries = [e for e in measured if isinstance(e, Mapping)] if isinstance(measured, list) else []
        if not entries:
            continue
        effect = _effect(run, runs, reference)
        for entry in entries:
            dtype = str(entry.get("dtype", DASH))
            rows.append([*_failure(entry, dtype), effect if dtype == run.precision else DASH])
        if run.precision not in [entry.get("dtype") for entry in entries]:
            rows.append([str(entries[0].get("ablate", DASH)), run.precision, *[DASH] * 4, effect])
    columns = ["left out", "dtype", "first wrong tile", "row", "output", "largest finite error", "val loss of the run"]
    caption = "Tiles are (block of queries, block of keys) in the order visited; rows are counted over the sequence."
    return table("break_it", "What the left-out line was for", columns, rows, caption) if rows else None


def _failure(entry: Mapping[str, Any], dtype: str) -> list[str]:
    """An entry of `ablation`, as far as the columns on the algorithm go."""
    tile, row = entry.get("first_bad_tile"), entry.get("first_bad_row")
    return [
        str(entry.get("ablate", DASH)),
        dtype,
        f"({tile[0]}, {tile[1]})" if isinstance(tile, Sequence) and len(tile) == 2 else "none",
        str(row) if row is not None else "none",
        "inf or NaN" if entry.get("non_finite") else "finite",
        size(number(entry.get("max_error"))),
    ]


def _effect(run: Run, runs: Sequence[Run], reference: str) -> str:
    """What training came to, beside the reference or, where that did not run, the implementation left whole."""
    step, final = run.diverged(), run.final("val/loss")
    if step is not None:
        return f"not finite at step {step:,}"
    if run.status == "failed":
        return f"failed after step {run.step:,}"
    whole = [r for r in runs if r.attention == run.attention and r.option("attention.ablate", "none") == "none"]
    for other in (*(r for r in runs if r.label == reference), *whole):
        theirs = other.final("val/loss")
        if final is not None and theirs is not None and other.seed == run.seed:
            whose = reference if other.label == reference else f"the intact {other.label}"
            return f"{final:.4f}, {final - theirs:+.4f} from {whose}'s"
    return loss(final)


def runs_csv(runs: Sequence[Run]) -> str:
    """One line a run, numbers unrounded."""
    differing = differing_options(runs)
    head = [
        "run", "implementation", "attention", "seed", "seq_len", *[n for n in differing if n != "seq_len"], "status",
        "step", "train_loss", "val_loss", "best_val_loss", "tokens_per_s", "step_ms", "mfu_full", "mfu_causal",
        "peak_allocated_gib", "peak_reserved_gib", "wall_time_s", "tokens", "parameters", "precision", "device",
        "commit", "started",
    ]  # fmt: skip
    rows = []
    for run in runs:
        flat = flatten(run.config)
        rows.append(
            [
                run.name, run.label, run.attention, run.seed, run.seq_len,
                *[show(flat.get(n)) for n in differing if n != "seq_len"], run.status, run.step,
                run.final("train/loss"), run.final("val/loss"), run.best_val_loss(),
                *[run.median(f"throughput/{m}") for m in ("tokens_per_s", "step_ms", "mfu_full", "mfu_causal")],
                *[run.peak(f"memory/{m}") for m in ("peak_allocated_gib", "peak_reserved_gib")],
                run.summary.get("wall_time_s"), run.tokens(), run.summary.get("parameters"), run.precision, run.device,
                run.commit, run.summary.get("started"),
            ]
        )  # fmt: skip
    return _csv(head, rows)


def curves_csv(runs: Sequence[Run]) -> str:
    """One line a logged value: run, implementation, seed, seq_len, step, metric, value."""
    rows = (
        [run.name, run.label, run.seed, run.seq_len, int(step), metric, float(value)]
        for run in runs
        for metric, series in sorted(run.metrics.items())
        for step, value in zip(series.steps, series.values, strict=True)
    )
    return _csv(["run", "implementation", "seed", "seq_len", "step", "metric", "value"], rows)


def _csv(head: Sequence[str], rows: Any) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    return text.getvalue()


def show(value: Any) -> str:
    """A setting as one would write it in an override; a dash where a killed run left a reference to other settings."""
    if isinstance(value, str) and "${" in value:
        return DASH
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def loss(value: float | None, digits: int = 4) -> str:
    return DASH if value is None else f"{value:.{digits}f}"


def count(value: float | None) -> str:
    return DASH if value is None else f"{value:,.0f}"


def memory(gib: float | None) -> str:
    if gib is None:
        return DASH
    unit, factor = memory_unit([gib])
    amount = factor * gib
    return f"{amount:,.0f} {unit}" if amount >= 100 else f"{amount:.3g} {unit}"


def milliseconds(value: float | None) -> str:
    return DASH if value is None else f"{value:.3g} ms"


def size(value: float | None) -> str:
    """A small number: 0.0014, 3·10⁻⁷."""
    return DASH if value is None else numbers.size(value)


def times(ratio: float) -> str:
    return f"{float(f'{ratio:.2g}'):,.0f}" if 10 <= ratio < float("inf") else f"{ratio:.2g}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return DASH
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.1f} s"
