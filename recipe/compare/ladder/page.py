"""The report of a ladder: the page of every report, with the law as a figure on its first screen, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from recipe.compare.answers import Answer
from recipe.compare.arena.statistics import ALPHA
from recipe.compare.drawing import Chart, Palette, height_for, label_axes, legend, styles
from recipe.compare.ladder.plan import LadderPlan
from recipe.compare.ladder.results import Rung, differences, rungs_of, slope
from recipe.compare.page import Report, Section, draw, sources_of, subtitle, write_page
from recipe.compare.runs import RunSet
from recipe.compare.tables import DASH, count, run_table, runs_csv, table
from recipe.compare.text import notes_on
from recipe.files import to_json
from recipe.wording import power_of_ten

RESULTS = "ladder.json"
NATS = "nats per token"


def write_ladder_report(run_set: RunSet, plan: LadderPlan, out: Path) -> Report:
    """Write index.html, report.md, ladder.json, runs.csv and figures/ into `out`."""
    rungs = rungs_of(plan, run_set.runs)
    (out / "figures").mkdir(parents=True, exist_ok=True)
    run, answer = run_set.runs[0], ladder_answer(plan, rungs)
    section = Section(
        "",
        f"{len(plan.arms)} arm{'s' if len(plan.arms) > 1 else ''}, depths {', '.join(map(str, plan.depths))} and "
        f"{plan.next}, on {run.option('data.name', 'data')}",
        subtitle(run_set.runs),
        answer,
        tuple(draw(chart, out) for chart in _difference_charts(plan, rungs)),
        tuple(made for made in (_size_table(plan, rungs), _rule_table(plan)) if made),
    )
    planned = {str(one.number): one for one in [*plan.runs(plan.depths), *plan.runs([plan.next])]}
    labels = {run.name: planned[run.name].arm if run.name in planned else "not in the plan" for run in run_set.runs}
    places = {run.name: f"depth {planned[run.name].depth}" if run.name in planned else "" for run in run_set.runs}
    report = Report(
        headline=answer.headline,
        tone=answer.tone,
        outcome=None,
        sections=(section,),
        notes=(*missing(plan, rungs), *notes_on(run_set, [])),
        runs=run_table(run_set.runs, labels, places, "arm"),
        sources=sources_of(run_set.runs),
        method="ladder_method.j2",
        lead=draw(_law_chart(plan, rungs), out),
    )
    write_page(report, out, runs_csv(run_set.runs, labels, places, "arm"), plan=plan)
    (out / RESULTS).write_text(to_json(as_json(plan, rungs), indent=2) + "\n", encoding="utf-8")
    return report


def ladder_answer(plan: LadderPlan, rungs: Mapping[str, Rung]) -> Answer:
    """Whether the predictions came true, and a sentence or more on each arm."""
    came = [rung.inside for rung in rungs.values()]
    known = [inside for inside in came if inside is not None]
    if not plan.predicted:
        headline, tone = f"Depth {plan.next} is not predicted yet", "open"
    elif len(known) < len(came):
        headline, tone = f"Depth {plan.next} is predicted, and not measured yet", "open"
    elif all(known):
        headline, tone = f"Depth {plan.next} came out inside the interval that was predicted", "holds"
    else:
        missed = len(known) - sum(known)
        headline, tone = f"Depth {plan.next} came out beside the prediction in {missed} of {len(known)} arms", "broken"
    bullets = [(rung.name, " ".join(_sentences(plan, rung, rungs[plan.baseline]))) for rung in rungs.values()]
    return Answer(f"{headline} ({plan.seeds} seeds)", tone, bullets)


def _sentences(plan: LadderPlan, rung: Rung, baseline: Rung) -> list[str]:
    sentences = []
    if rung.predicted:
        loss, low, high, _ = rung.predicted
        sentences.append(
            f"Predicted {loss:.4f} (95 % interval {low:.4f} to {high:.4f}) before depth {plan.next} was run."
        )
        if rung.measured:
            error = rung.measured.mean - loss
            where = "inside" if rung.inside else "outside"
            sentences.append(f"Measured {rung.measured.mean:.4f}: {error:+.4f}, {where} the interval.")
    change = None if rung is baseline else slope(rung, baseline)
    if change is not None:
        gaps = differences(rung, baseline)
        low, high = change.interval(ALPHA)
        sentences.append(
            f"Its difference to {baseline.name} is {gaps[0][1].mean:+.4f} at depth {gaps[0][0].depth} and "
            f"{gaps[-1][1].mean:+.4f} at depth {gaps[-1][0].depth}; ten times the compute change it by "
            f"{change.mean:+.4f} (95 % interval {low:+.4f} to {high:+.4f})."
        )
    return sentences or ["Its sizes are not all measured yet."]


def missing(plan: LadderPlan, rungs: Mapping[str, Rung]) -> list[str]:
    """A sentence for each size that lacks seeds."""
    sentences = []
    for rung in rungs.values():
        for depth in plan.depths:
            have = next((len(size.losses) for size in rung.sizes if size.depth == depth), 0)
            if have < plan.seeds:
                sentences.append(f"{rung.name} at depth {depth} has a finite loss for {have} of {plan.seeds} seeds.")
    return sentences


def _law_chart(plan: LadderPlan, rungs: Mapping[str, Rung]) -> Chart:
    caption = (
        "Final validation loss over compute: each seed (dots), the law through the sizes that were fitted (line), the "
        f"prediction of depth {plan.next} with its 95 % interval (bar), and its measurement (ring)."
    )
    return Chart("law", "Loss over compute", caption, partial(draw_law, rungs=rungs), height_for(list(rungs)))


def draw_law(figure: Figure, palette: Palette, rungs: Mapping[str, Rung]) -> None:
    """The sizes of each arm, its law, and the prediction."""
    axes, looks = figure.add_subplot(), styles(list(rungs), palette)
    for name, rung in rungs.items():
        look = looks[name]
        for size in rung.sizes:
            losses = list(size.losses.values())
            axes.plot([size.compute] * len(losses), losses, ls="", marker="o", ms=3, color=look.colour, zorder=3)
        last = [rung.predicted[3]] if rung.predicted else [rung.measured.compute] if rung.measured else []
        reach = [size.compute for size in rung.sizes] + last
        if rung.law and reach:
            grid = np.geomspace(min(reach), max(reach), 60)
            axes.plot(grid, rung.law(grid), color=look.colour, ls=look.line, lw=1.8, label=name, zorder=2)
        if rung.predicted:
            _, low, high, compute = rung.predicted
            axes.plot([compute, compute], [low, high], color=look.colour, lw=4, alpha=0.45, zorder=2)
        if rung.measured:
            axes.plot(
                rung.measured.compute, rung.measured.mean, marker="o", ms=8, mfc="none", mec=look.colour, mew=1.6,
                zorder=4,
            )  # fmt: skip
    _compute_axis(axes, palette, f"validation loss, {NATS}")
    legend(figure, axes, palette)


def _compute_axis(axes: Axes, palette: Palette, title: str) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: power_of_ten(value)))
    axes.xaxis.set_minor_locator(NullLocator())
    label_axes(axes, palette, title, "operations of a run")
    axes.margins(x=0.06, y=0.08)


def _difference_charts(plan: LadderPlan, rungs: Mapping[str, Rung]) -> list[Chart]:
    baseline = rungs[plan.baseline]
    sizes_of = {name: differences(rung, baseline) for name, rung in rungs.items() if rung is not baseline}
    if not any(sizes_of.values()):
        return []
    caption = "Means over the seeds with 95 % intervals (paired t); below 0 the arm is ahead of the baseline."
    draw = partial(draw_size_differences, sizes_of=sizes_of, names=list(rungs), baseline=plan.baseline)
    title = f"Difference from {plan.baseline} over size"
    return [Chart("difference", title, caption, draw, height_for(list(sizes_of)))]


def draw_size_differences(
    figure: Figure, palette: Palette, sizes_of: Mapping[str, Any], names: Sequence[str], baseline: str
) -> None:
    """The difference of each arm at each size."""
    axes, looks = figure.add_subplot(), styles(names, palette)
    axes.axhline(0, color=palette["naive"], lw=1.4, zorder=1)
    for name, sizes in sizes_of.items():
        x, means = [size.compute for size, _ in sizes], [test.mean for _, test in sizes]
        bounds = np.array([test.interval(ALPHA) for _, test in sizes]).T.reshape(2, -1)
        errors = np.abs(bounds - np.array(means))
        axes.errorbar(
            x, means, errors, color=looks[name].colour, ls=looks[name].line, marker=looks[name].marker, ms=5, lw=1.6,
            label=name,
        )  # fmt: skip
    _compute_axis(axes, palette, f"validation loss less {baseline}'s, {NATS}")
    legend(figure, axes, palette)


def _size_table(plan: LadderPlan, rungs: Mapping[str, Rung]) -> Any:
    tests = {
        (name, size.depth): test
        for name, rung in rungs.items()
        if name != plan.baseline
        for size, test in differences(rung, rungs[plan.baseline])
    }
    rows = []
    for name, rung in rungs.items():
        for size in (*rung.sizes, *([rung.measured] if rung.measured else [])):
            test, last = tests.get((name, size.depth)), size is rung.measured and rung.predicted
            half = (test.interval(ALPHA)[1] - test.mean) if test else 0.0
            deviation = f" ± {np.std(list(size.losses.values()), ddof=1):.4f}" if len(size.losses) > 1 else ""
            rows.append([
                name, str(size.depth), count(size.parameters), f"{size.compute:.3g}", str(len(size.losses)),
                f"{size.mean:.4f}{deviation}",
                f"{rung.predicted[0]:.4f} ({rung.predicted[1]:.4f} to {rung.predicted[2]:.4f})"
                if last and rung.predicted else f"{rung.law(size.compute):.4f}" if rung.law else DASH,
                f"{test.mean:+.4f} ± {half:.4f}" if test else DASH,
            ])  # fmt: skip
    columns = ["arm", "depth", "parameters", "operations", "seeds", "val loss", "law", "difference"]
    caption = "Losses with their deviation over the seeds; differences are paired by seed, with 95 % intervals."
    return table("sizes", "Sizes", columns, rows, caption) if rows else None


def _rule_table(plan: LadderPlan) -> Any:
    rows = [[size, " ".join(overrides)] for size, overrides in plan.sizes.items()]
    return table("rule", "The rule", ["arm and depth", "written before the first run"], rows)


def as_json(plan: LadderPlan, rungs: Mapping[str, Rung]) -> dict[str, Any]:
    """The results as plain values."""
    baseline, results = rungs[plan.baseline], {}
    for name, rung in rungs.items():
        change = None if rung is baseline else slope(rung, baseline)
        results[name] = {
            "sizes": [vars(size) for size in rung.sizes],
            "law": rung.law._asdict() if rung.law else None,
            "predicted": rung.predicted,
            "measured": vars(rung.measured) if rung.measured else None,
            "inside": rung.inside,
            "slope": [change.mean, *change.interval(ALPHA)] if change else None,
        }
    return {"baseline": plan.baseline, "seeds": plan.seeds, "predicted_at": plan.predicted_at, "arms": results}
