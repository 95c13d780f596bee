"""The report of an arena: the page of every report, with the answer as a figure on its first screen, and as JSON.

In words: the headline, warnings, and the command that continues.
"""

import math
import shlex
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from recipe.compare.arena_results import Arena, compare_arms, race
from recipe.compare.arena_tables import (
    cost_table,
    lr_table,
    plan_table,
    probe_table,
    race_table,
    size_table,
    verdict_table,
)
from recipe.compare.costs import median_of
from recipe.compare.figures import loss_charts
from recipe.compare.headline import Headline, notes_on
from recipe.compare.page import Report, Section, draw, subtitle, write_page
from recipe.compare.probes import probe_charts
from recipe.compare.runs import RunSet
from recipe.compare.statistics import ALPHA, Paired, Verdict, outlier
from recipe.compare.tables import DASH, EQUAL, apart, signed
from recipe.drawing import COLOURS, Chart, label_axes, styles
from recipe.files import to_json
from recipe.run.plan import Plan
from recipe.wording import duration, listed, percent

RESULTS = "arena.json"
ROW = 0.46  # inches of an arm
# The word between an arm and the baseline.
LINKS = {Verdict.better: " than", Verdict.worse: " than", Verdict.equivalent: " to", Verdict.undecided: " against"}


def write_arena_report(run_set: RunSet, plan: Plan, folder: Path, out: Path) -> Report:
    """Write index.html, arena.json, runs.csv and figures/ into `out`.

    folder  of the sweep, which the command that goes on names
    """
    runs, arena = run_set.runs, compare_arms(plan, run_set.runs)
    found, command = arena_headline(arena), go_on(arena, folder)
    said = (
        one.verdict.value + (f", {apart(one.equal, one.test.mean, one.interval)}" if one.test else "")
        for one in arena.comparisons
    )
    curves = {name: list(arm.runs.values()) for name, arm in arena.arms.items() if arm.runs}
    lead, *drawings = (draw(chart, out) for chart in (forest(arena), *loss_charts(curves), *probe_charts(curves)))
    makers = (verdict_table, size_table, race_table, cost_table, probe_table, lr_table, plan_table)
    section = Section(
        "",
        f"{len(plan.arms)} arms, {runs[0].option('model.name', 'model')} on {runs[0].option('data.name', 'data')}",
        subtitle(runs),
        found,
        tuple(drawings),
        tuple(filter(None, (table_of(arena) for table_of in makers))),
    )
    report = Report(
        found,
        (section,),
        (*skewed(arena), *added_too_often(plan), *notes_on(run_set, [])),
        runs,
        {run.name: str(run.option("arena.arm", DASH)) for run in runs},
        {run.name: f"optimizer.lr={run.option('optimizer.lr')}" for run in runs},
        "arm",
        "arena_method.j2",
        lead,
        tuple(zip(plan.others, said, strict=True)),
        (command,) if command else (),
    )
    write_page(report, out, margin=percent(plan.margin), looks=plan.planned_looks, alpha=percent(ALPHA))
    (out / RESULTS).write_text(to_json(as_json(arena), indent=2) + "\n", encoding="utf-8")
    return report


def as_json(arena: Arena) -> dict[str, Any]:
    """The results as plain values."""
    return {
        "baseline": arena.plan.baseline,
        "seeds": list(arena.plan.seeds),
        "margin": arena.plan.margin,
        "losses": {name: arm.losses for name, arm in arena.arms.items()},
        "learning_rates": {name: arm.tried for name, arm in arena.arms.items()},
        "arms": {
            one.arm.name: {
                "verdict": one.verdict.value,
                **_differences(one.test),
                "interval_at_level": one.interval,
                "p": one.p,
                "p_sign_flip": one.p_sign_flip,
                "margin": one.margin,
                "differences": one.differences,
                "diverged": one.diverged,
                "at_equal_time": _differences(one.at_equal("throughput/step_ms")),
                "at_equal_flops": _differences(one.at_equal("flops_per_token")),
                "race": race(one.arm, one.baseline)._asdict(),
            }
            for one in arena.comparisons
        },
    }


def _differences(test: Paired | None) -> dict[str, Any]:
    return {"difference": test and test.mean, "interval": test and test.interval(ALPHA)}


def arena_headline(arena: Arena) -> Headline:
    """The verdicts in a sentence."""
    clauses: list[str] = []
    for verdict, link in LINKS.items():
        names = [comparison.arm.name for comparison in arena.comparisons if comparison.verdict is verdict]
        if names:
            baseline = "" if clauses else f"{link} {arena.plan.baseline}"
            clauses.append(f"{listed(names)} {'is' if len(names) == 1 else 'are'} {verdict.value}{baseline}")
    decided = any(comparison.verdict is not Verdict.undecided for comparison in arena.comparisons)
    solved = [arm.name for arm in arena.arms.values() if arena.solved(arm)]
    if len(solved) == len(arena.arms):
        clauses = [f"{'both' if len(solved) == 2 else 'all arms'} solve {arena.task}"]
    return Headline(f"{'; '.join(clauses)} ({len(arena.plan.seeds)} seeds)", "none" if decided else "open")


def skewed(arena: Arena) -> list[str]:
    """A warning for each arm with a seed that ends far from the others, which its interval does not expect. None where
    all of it lies inside the margin."""
    lines = []
    for comparison in arena.comparisons:
        gaps = {seed: gap for seed, gap in comparison.differences.items() if math.isfinite(gap)}
        far = outlier(list(gaps.values()), comparison.margin, comparison.level)
        if far is not None:
            seed, gap = list(gaps.items())[far]
            lines.append(
                f"{comparison.arm.name} differs with seed {seed} by {signed(gap)}, far from its other seeds: the "
                f"intervals assume no rare large deviations, so more than {percent(ALPHA)} of such verdicts may be "
                "false. Add seeds, and read p (signs)."
            )
    return lines


def added_too_often(plan: Plan) -> list[str]:
    """A warning where seeds were added more often than planned."""
    if len(plan.looks) <= plan.planned_looks:
        return []
    return [
        f"Seeds were added {len(plan.looks) - 1} times, and the plan had {plan.planned_looks} looks "
        f"(arena.rules.looks), so false verdicts are no longer limited to {percent(ALPHA)}."
    ]


def go_on(arena: Arena, folder: Path) -> tuple[str, str] | None:
    """The next step and its command: the runs that are missing, or the seeds that would decide; else None."""
    plan = arena.plan
    missing = any(comparison.missing for comparison in arena.comparisons)
    more = 0 if missing else max((comparison.more or 0 for comparison in arena.comparisons), default=0)
    if not missing and not more:
        return None
    set_anew = ["hydra.sweep.dir=", "arena.seeds=", "resume="]
    total, further = len(plan.seeds) + more, [f"hydra.sweep.dir={folder}"]
    if missing:
        title = "Run the missing runs"
    elif len(plan.looks) < plan.planned_looks:
        title = f"Add {more} seeds{_time(arena, more)}"
    else:
        title = (
            f"The planned looks are used up; start anew with {total} other seeds{_time(arena, total)}, looked at once"
        )
        set_anew += ["arena.first_seed=", "arena.looks=", "arena.rules."]
        further = [f"arena.rules.first_seed={plan.seeds.stop}", "arena.rules.looks=1"]
    again = [line for line in plan.arguments if not line.startswith(tuple(set_anew))]
    return title, f"python train.py {shlex.join([*again, f'arena.seeds={total}', *further])}"


def _time(arena: Arena, seeds: int) -> str:
    """How long all arms take with some seeds, one run after another; empty where no run recorded its time."""
    taken = [median_of(run.median("wall_time_s") for run in arm.runs.values()) for arm in arena.arms.values()]
    if None in taken:
        return ""
    return f" (about {duration(seeds * sum(filter(None, taken)))} of runs, one after another)"


def forest(arena: Arena) -> Chart:
    """The answer as a figure: the difference of each arm, with its interval."""
    baseline = arena.plan.baseline
    caption = (
        f"Final {_unit(arena)[0]} of each arm less {baseline}'s of the same seed: the mean, its 95 % interval (thick), "
        f"the interval that the verdict follows from (thin), and each seed (dots). Shaded: the margin."
    )
    return Chart(
        "forest",
        f"Difference from {baseline}",
        caption,
        partial(draw_forest, arena=arena),
        1.15 + ROW * len(arena.comparisons),
    )


def _unit(arena: Arena) -> tuple[str, str]:
    """What is judged, and its unit."""
    return ("wrong answers", "share") if arena.task else ("validation loss", "nats per token")


def draw_forest(figure: Figure, arena: Arena) -> None:
    """A row for each arm, the first on top."""
    axes, looks, comparisons = figure.add_subplot(), styles(list(arena.arms)), arena.comparisons
    for row, comparison in enumerate(comparisons):
        colour = looks[comparison.arm.name].colour
        finite = [value for value in comparison.differences.values() if math.isfinite(value)]
        axes.plot(finite, [row + 0.22] * len(finite), ls="", marker="o", ms=2.6, color=colour, alpha=0.6, zorder=2)
        test = comparison.test
        if test is None or comparison.interval is None:
            continue
        axes.plot(comparison.interval, [row, row], color=colour, lw=1.3, zorder=3)
        axes.plot(test.interval(ALPHA), [row, row], color=colour, lw=3.6, zorder=3)
        axes.plot(test.mean, row, marker="D", ms=6.5, color=colour, mec=COLOURS["surface"], mew=1, zorder=4)
        words = EQUAL if comparison.equal else f"{signed(test.mean)}  {comparison.verdict.value}"
        if comparison.diverged:
            words += f", {len(comparison.diverged)} diverged"
        axes.annotate(
            words, (test.mean, row), xytext=(0, 9), textcoords="offset points",
            ha="center", color=COLOURS["ink"], fontsize=8.5, zorder=5,
            bbox={"facecolor": COLOURS["surface"], "edgecolor": "none", "pad": 0.5},
        )  # fmt: skip
    label_axes(axes, "lower is better", f"{_unit(arena)[0]} less {arena.plan.baseline}'s, {_unit(arena)[1]}")
    margin = comparisons[0].margin
    axes.axvspan(-margin, margin, color=COLOURS["band"], lw=0, zorder=0)
    axes.axvline(0, color=COLOURS["naive"], lw=1.4, zorder=1)
    axes.set_yticks(range(len(comparisons)), [comparison.arm.name for comparison in comparisons])
    axes.set_ylim(len(comparisons) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.06)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+g}" if value else "0"))
