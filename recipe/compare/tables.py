"""The numbers of the report as tables of words, and as CSV."""

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from recipe.compare.costs import (
    SPEED,
    Loss,
    Point,
    all_points,
    attention_alone,
    by_loss,
    median_of,
    ranking,
    speed_of,
)
from recipe.compare.parity import MEASURES
from recipe.compare.runs import Run, number
from recipe.compare.sweeps import Sweep
from recipe.compare.verdict import Verdict
from recipe.training.parity import PARITY_MARGIN
from recipe.wording import duration, percent, size, times

DASH = "-"
EQUAL = "equal bit for bit"
LOSS, COUNT = "{:.4f}", "{:,.0f}"  # the forms of numbers
CORPUS = "val/loss/"  # and a name: of several corpora
Names = Mapping[str, str]
Interval = tuple[float, float]


class Table(NamedTuple):
    """Rows of words under columns; `numeric` columns are aligned right."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: frozenset[int]
    caption: str = ""


def table(name: str, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> Table:
    """A table without empty columns. A column whose cells look like numbers is numeric."""
    given = list(rows)
    shown = [n for n in range(len(columns)) if any(row[n] != DASH for row in given)]
    cells = tuple(tuple(row[n] for n in shown) for row in given)
    numeric = frozenset(
        n
        for n in range(1, len(shown))
        if any(any(map(str.isdigit, row[n])) for row in cells) and all(row[n][:1] in "0123456789-+" for row in cells)
    )
    return Table(name, title, tuple(columns[n] for n in shown), cells, numeric, caption)


def cell_table(sweep: Sweep) -> Table | None:
    """The measurements of each implementation under each setting: by length, or the lowest loss first."""
    gaps = {
        (one.point.cell.where, one.point.label): apart(one.equal, one.difference, one.interval)
        for one in ranking(sweep)[1:]
    }
    rows = [
        [
            f"{point.position:,}" if sweep.over_lengths else ", ".join(point.cell.where) or DASH,
            point.label if len(sweep.labels()) > 1 or len(sweep.cells) == 1 else DASH,
            _state(point),
            str(len(point.runs)),
            over_seeds(point.loss_of("train/loss")),
            over_seeds(point.loss_of("val/loss")),
            gaps.get((point.cell.where, point.label), DASH),
            speed(point.measured),
            shown(point.median("throughput/step_ms"), "{:.3g} ms"),
            shown(point.median("throughput/mfu_causal"), "{:.3g} %", 100),
            memory(point.memory_gib),
        ]
        for point in (all_points if sweep.over_lengths else by_loss)(sweep)
    ]
    first = "seq_len" if sweep.over_lengths else "settings"
    columns = [
        first, "implementation", "outcome", "seeds", "train loss", "val loss", "to the lowest", "tokens/s", "step",
        "MFU (causal)", f"memory{' (one layer)' if attention_alone(sweep.runs) else ''}",
    ]  # fmt: skip
    order = f"{'setting' if len(sweep.cells) > 1 else 'implementation'}, lowest loss first"
    title = f"By {first if sweep.over_lengths else order}"
    caption = (
        "Losses: means over seeds ± standard deviation of one. To the lowest: paired by seed, with an interval that "
        "holds for all pairs of rows together. Costs: medians; tokens/s ± half the range of most steps."
    )
    return table("cells", title, columns, rows, caption) if len(rows) > 1 else None


def apart(equal: bool, difference: float, interval: Interval | None) -> str:
    """A difference with its interval."""
    return EQUAL if equal else signed(difference) + (f" ({bounds(interval)})" if interval else "")


def parity_table(verdicts: Sequence[Verdict], reference: str) -> Table | None:
    """The verdict on each implementation and the measurements that it follows from; None without verdicts."""
    rows = []
    for verdict in verdicts:
        alone, probe, curve, final = verdict.alone, verdict.probe, verdict.curve, verdict.final
        equal = curve is not None and curve.largest == 0 and (final is None or final.difference == 0)
        share = None if curve is None else curve.ratio
        rows.append(
            [
                ", ".join(verdict.cell.where) or DASH,
                verdict.label,
                verdict.outcome.value,
                f"{max(alone.errors.values()):.2g}" if alone and alone.errors else DASH,
                DASH if probe is None else times(probe.ratio).removesuffix(" times"),
                EQUAL if equal else DASH if share is None else percent(share),
                DASH if final is None or equal else size(final.difference),
                size(final.floor if final else None),
                "; ".join(_faults(verdict)) or DASH,
                "; ".join([*(gap.value for gap in verdict.gaps), *(alone.unseen if alone else ())]) or DASH,
            ]
        )
    columns = [
        "settings", "implementation", "parity", "attention alone", "same weights", "curve", "final losses",
        "rounding adds up to", "where", "not measured",
    ]  # fmt: skip
    caption = (
        f"Attention alone: its error, as a share of what rounding explains. Same weights: the difference from "
        f"{reference}, in units of the rounding; up to {PARITY_MARGIN:g} is accepted. Curve: the distance of the "
        "training losses, as a share of the distance between seeds. Final losses further apart than rounding adds up "
        "to are accepted where the first ones agree: training amplified it."
    )
    return table("parity", f"Compared with {reference}", columns, rows, caption) if rows else None


def _faults(verdict: Verdict) -> list[str]:
    """Where an implementation differs by more than is accepted."""
    lost, alone, probe, curve = verdict.not_finite, verdict.alone, verdict.probe, verdict.curve
    faults = []
    if lost:
        faults.append(f"not finite at step {lost.step:,} with seed {lost.seed}, where {lost.other} is")
    if alone and alone.agrees is False:
        faults.append(f"attention alone: step {alone.step:,}, {alone.where}")
    if probe and not probe.agrees:
        of = f" of {probe.parameter}" if probe.parameter and probe.measure == "grad_rel_err" else ""
        faults.append(f"same weights: step {probe.step:,}, {MEASURES[probe.measure]}{of}")
    if curve and curve.agrees is False:
        faults.append(f"curve: step {curve.step:,}")
    return faults


def _state(point: Point) -> str:
    """How the runs of a point ended, if not all completed."""
    if not point.measured:
        return "out of memory"
    if stopped := [step for run in point.runs if (step := run.diverged()) is not None]:
        return f"not finite at step {min(stopped):,}"
    return next((run.status for run in point.runs if run.status != "completed"), DASH)


def ablation_table(runs: Sequence[Run]) -> Table | None:
    """The errors without a line of the online softmax, their place and size: `ablation` of the summaries."""
    entries = [
        entry
        for run in runs
        if isinstance(recorded := run.summary.get("ablation"), list)
        for entry in recorded
        if isinstance(entry, Mapping)
    ]
    rows = []
    for entry in entries:
        tile, row = entry.get("first_bad_tile"), entry.get("first_bad_row")
        rows.append(
            (
                str(entry.get("ablate", DASH)),
                str(entry.get("dtype", DASH)),
                "none" if tile is None else str(tuple(tile)) if isinstance(tile, list) else DASH,
                "none" if row is None else str(row),
                "inf or NaN" if entry.get("non_finite") else "finite",
                shown(number(entry.get("max_error")), "{:.2g}"),
            )
        )
    columns = ["left out", "dtype", "first wrong tile", "row", "output", "largest finite error"]
    caption = "Tiles are (block of queries, block of keys) in the order visited; rows are counted over the sequence."
    return table("ablation", "Where the output goes wrong", columns, dict.fromkeys(rows), caption) if rows else None


def run_table(runs: Sequence[Run], labels: Names, places: Names, subject: str = "implementation") -> Table:
    """Every run.

    labels, places  the implementation, and the settings that distinguish a run, by the run's name
    subject         the heading of the labels
    """
    corpora = dict.fromkeys(name for run in runs for name in run.metrics if name.startswith(CORPUS))
    rows = [
        [
            run.name,
            labels[run.name],
            places[run.name] or DASH,
            str(run.seed),
            run.status.replace("_", " ") + (f" at step {run.step:,}" if run.status != "completed" else ""),
            shown(run.final("train/loss"), LOSS),
            shown(run.final("val/loss"), LOSS),
            *(shown(run.final(name), LOSS) for name in corpora),
            shown(run.median(SPEED), COUNT),
            memory(run.peak()),
            DASH if (took := number(run.summary.get("wall_time_s"))) is None else duration(took),
        ]
        for run in runs
    ]
    columns = [
        "run", subject, "settings", "seed", "status", "train loss", "val loss",
        *(name.replace(CORPUS, "val loss of ") for name in corpora), "tokens/s", "memory", "wall time",
    ]  # fmt: skip
    return table("runs", "All runs", columns, rows)


def runs_csv(runs: Sequence[Run], labels: Names, places: Names, subject: str = "implementation") -> str:
    """One line a run, numbers unrounded."""
    recorded = ("attention_path", "best_val_loss", "wall_time_s", "tokens", "parameters", "started")
    rows: list[dict[str, Any]] = [
        {
            "run": run.name,
            subject: labels[run.name],
            "settings": places[run.name],
            "seed": run.seed,
            "seq_len": run.seq_len,
            "status": run.status,
            "step": run.step,
            "devices": run.devices,
            "train_loss": run.final("train/loss"),
            "val_loss": run.final("val/loss"),
        }
        | {name: run.median(f"throughput/{name}") for name in ("tokens_per_s", "step_ms", "mfu_full", "mfu_causal")}
        | {name: run.peak(f"memory/{name}") for name in ("peak_allocated_gib", "peak_reserved_gib")}
        | {"device": run.device, "precision": run.precision, "commit": run.commit}
        | {name: run.summary.get(name) for name in recorded}
        for run in runs
    ]
    text = io.StringIO()
    lines = [[*rows[0]], *([*row.values()] for row in rows)]
    csv.writer(text, lineterminator="\n").writerows(map(_inert, line) for line in lines)
    return text.getvalue()


def _inert(cell: Any) -> Any:
    """A cell that no spreadsheet takes for a formula: text that begins like one is quoted."""
    return f"'{cell}" if isinstance(cell, str) and re.match(r"[=@\t\r]|[+-](?!(e[+-]|[\d. ±])*$)", cell) else cell


def signed(value: float) -> str:
    """A difference: +0.0123, -3e-07, or 0 where nothing differs."""
    text = f"{value:+.4f}"
    return text if float(text) else f"{value:+.0e}" if value else "0"


def bounds(interval: Interval | None) -> str:
    """An interval: -0.0123 to +0.0045."""
    return DASH if interval is None else f"{signed(interval[0])} to {signed(interval[1])}"


def over_seeds(value: Loss | None) -> str:
    """A loss with the spread between seeds."""
    if value is None:
        return DASH
    return shown(value.mean, LOSS) + ("" if value.deviation is None else f" ± {value.deviation:.2g}")


def speed(runs: Sequence[Run]) -> str:
    """Tokens per second with the spread between steps."""
    ends = speed_of(runs)
    if ends is None or ends.low == ends.high:
        return shown(median_of(run.median(SPEED) for run in runs), COUNT)
    return f"{ends.median:,.0f} ± {percent((ends.high - ends.low) / 2 / ends.median)}"


def shown(value: float | None, form: str, factor: float = 1.0) -> str:
    """A number in a form such as "{:.4f}", or a dash."""
    return DASH if value is None else form.format(factor * value)


def memory(gib: float | None) -> str:
    return shown(gib, "{:.3g} MiB", 1024) if gib is not None and gib < 0.5 else shown(gib, "{:.3g} GiB")
