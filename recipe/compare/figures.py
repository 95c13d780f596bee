"""Figures of runs: losses over steps and their differences, costs over the sequence length or the devices."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from recipe.compare.costs import Point, attention_alone, crossovers, points, same_tokens
from recipe.compare.parity import rounding_of_a_step, seed_spread
from recipe.compare.plots import Curves, Value, draw_difference, draw_losses, draw_over_axis, draw_probe
from recipe.compare.probes import probe_charts
from recipe.compare.sweeps import Cell, Sweep
from recipe.compare.verdict import Outcome, Verdict
from recipe.drawing import Chart, height_for
from recipe.training.parity import PARITY_MARGIN
from recipe.wording import memory_unit

MOST_CELLS = 2  # of a sweep, whose parity is drawn


def charts(sweep: Sweep, verdicts: Sequence[Verdict], reference: str = "naive", prefix: str = "") -> list[Chart]:
    """The figures of a sweep.

    verdicts  of its cells
    prefix    of the files' names, where several sweeps stand on a page
    """
    judged = [verdict for verdict in verdicts if verdict.decisive]
    worst = sorted(judged, key=lambda v: (v.outcome is not Outcome.broken, -(v.probe.ratio if v.probe else 0.0)))
    cells = list({id(verdict.cell): verdict.cell for verdict in worst}.values())[:MOST_CELLS]
    names = [(label, cell) for cell in sweep.cells for label in cell.labels()]
    curves = {_name(label, cell, sweep): list(cell.of(label).values()) for label, cell in names}
    result = loss_charts(curves, coincide=len(sweep.cells) == 1)
    result += probe_charts(curves)
    for n, cell in enumerate(cells):
        where = f", {cell.short}" if len(sweep.cells) > 1 else ""
        result += _parity_charts(
            [v for v in judged if v.cell is cell], cell, reference, where, f"-{n + 1}" if n else ""
        )
    first = ["memory"] if any(run.out_of_memory for run in sweep.runs) else []
    order = ["loss", "difference", "recall", "position", "probe", *first]
    order += ["crossover", "context", "memory", "throughput"]
    result += _axis_charts(sweep, reference) if sweep.axis else []
    result.sort(key=lambda chart: order.index(chart.name.split("-")[0]))
    return [Chart(prefix + c.name, c.title, c.caption, c.draw, c.height) for c in result]


def _name(label: str, cell: Cell, sweep: Sweep) -> str:
    """A curve's name: the implementation, the setting, or both where a sweep has several of both."""
    if len(sweep.cells) == 1:
        return label
    return f"{label} {cell.short}" if len(sweep.labels()) > 1 else cell.short


def loss_charts(curves: Curves, coincide: bool = False) -> list[Chart]:
    """The training loss over steps of any runs, by name; nothing where no run has two losses.

    coincide  whether the curves should be equal
    """
    shown = {  # a curve needs two points
        label: runs
        for label, runs in curves.items()
        if any(len(run.series("train/loss").finite().steps) > 1 for run in runs)
    }
    seeds = max((len(runs) for runs in curves.values()), default=0)
    caption = f"{seeds} seeds each. " if seeds > 1 else ""
    if len(shown) > 1 and coincide:
        caption += f"{next(iter(shown))} is the wide line below the others. "
    if any(len(run.series("val/loss").steps) > 1 for runs in shown.values() for run in runs):
        caption += "Marks are the validation loss."
    draw = partial(draw_losses, curves=shown, coincide=coincide)
    return [Chart("loss", "Training loss", caption, draw, height_for(list(shown)))] if shown else []


def _parity_charts(judged: Sequence[Verdict], cell: Cell, reference: str, where: str, suffix: str) -> list[Chart]:
    labels, result = [verdict.label for verdict in judged], []
    if any(verdict.curve for verdict in judged):
        caption = f"Training loss against {reference}'s of the same seed, by step (thin) and over a tenth of the run."
        if seed_spread(list(cell.of(reference).values())) is not None:
            caption += f" Grey: the distance of {reference}'s seeds from each other."
        if rounding_of_a_step(cell.runs, reference):
            caption += " Dotted: what rounding adds up to."
        draw = partial(draw_difference, cell=cell, reference=reference)
        height = height_for([*labels, "spread between seeds", "rounding"])
        result.append(Chart(f"difference{suffix}", f"Distance from {reference}{where}", caption, draw, height))
    if any(verdict.probe for verdict in judged):
        caption = (
            f"Gradients (lines) and logits (dots) against {reference}'s on the same weights, batch and masks, worst "
            f"seed. Rounding alone gives about 1. Up to {PARITY_MARGIN:g} is accepted (shaded)."
        )
        draw = partial(draw_probe, cell=cell, reference=reference)
        result.append(Chart(f"probe{suffix}", f"At the same weights{where}", caption, draw, height_for(labels)))
    return result


def _axis_charts(sweep: Sweep, reference: str) -> list[Chart]:
    table, result = points(sweep), []

    def add(name: str, title: str, caption: str, unit: str, value: Value, **more: Any) -> None:
        dots = {label: [(p.position, y) for p in its if (y := value(p)) is not None] for label, its in table.items()}
        if any(dots.values()):
            draw = partial(draw_over_axis, sweep=sweep, dots=dots, unit=unit, **more)
            result.append(Chart(name, title, caption, draw, height_for(list(table))))

    alone = attention_alone(sweep.runs)
    unit, factor = memory_unit([point.memory_gib for its in table.values() for point in its])
    caption = "Of the attention's tensors, not of the process." if alone else "Of the device's allocator."
    title = "Memory of one attention layer" if alone else "Peak memory"
    add("memory", title, caption, unit, lambda p: p.memory_gib and factor * p.memory_gib)
    caption = "Median over the run."
    add("throughput", "Throughput", caption, "tokens per second", lambda p: p.tokens_per_s)
    if sweep.axis == "seq_len" and crossovers(sweep, reference):
        theirs = {point.position: point.step_ms for point in table[reference]}
        caption = f"Step time of {reference} over that of each implementation. A ring marks where one overtakes."
        rings = [crossing.seq_len for crossing in crossovers(sweep, reference) if crossing.seq_len]

        def gain(point: Point) -> float | None:
            other = theirs.get(point.position) if point.label != reference else None
            return other / point.step_ms if other and point.step_ms else None

        add("crossover", f"Speed relative to {reference}", caption, f"times as fast as {reference}", gain, rings=rings)
    if same_tokens(sweep):
        spans = {run.option("training.eval_span") for run in sweep.runs if run.final("val/loss") is not None}
        shared = len(spans) == 1 and None not in spans
        text = "the same text" if shared else "other text at each length (training.eval_span)"
        caption = f"Final loss of runs that saw equally many tokens, evaluated on {text}."
        add(
            "context",
            "Validation loss",
            caption,
            "validation loss, nats per token",
            lambda p: p.val_loss and p.val_loss.mean,
            log=False,
        )
    return result
