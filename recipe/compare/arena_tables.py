"""The numbers of an arena as tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from recipe.compare.arena_results import Arena, ArmRuns, Comparison, differences_by_size, race, slope
from recipe.compare.costs import attention_alone, median_of
from recipe.compare.statistics import ALPHA, POWER, Paired, paired
from recipe.compare.tables import DASH, EQUAL, Table, bounds, count, loss, memory, signed, table
from recipe.wording import percent

PROBE = "probe/"


def verdict_table(arena: Arena) -> Table:
    """Each arm: its verdict, its loss, its difference to the baseline, and two tests of it."""
    rows = [[arena.baseline.name, "baseline", *_of_arm(arena.baseline), *[DASH] * 6]]
    for comparison in arena.comparisons:
        test = comparison.test
        share = "" if not comparison.share else f" ({100 * comparison.share:+.2f} %)"
        missing = f", {len(comparison.missing)} missing" if comparison.missing else ""
        seeds, rate, mean = _of_arm(comparison.arm)
        rows.append(
            [
                comparison.arm.name,
                comparison.verdict.value,
                f"{seeds}{missing}",
                rate,
                mean,
                EQUAL if comparison.equal else f"{signed(test.mean)}{share}" if test else DASH,
                bounds(test.interval(ALPHA) if test else None),
                bounds(comparison.interval),
                f"{comparison.p:.2g}" if test else DASH,
                DASH if comparison.p_sign_flip is None else f"{comparison.p_sign_flip:.2g}",
                str(comparison.more or DASH),
            ]
        )
    columns = ["arm", "verdict", "seeds", "learning rate", arena.quantity, "difference", "95 % interval", "judged by"]
    columns += ["p (t)", "p (signs)", "seeds to add"]
    caption = (
        "Means with their deviation over the seeds; differences are paired by seed. The verdict follows "
        'from the interval under "judged by", which is wider where there are several arms (Holm) or planned looks. '
        f"p-values are for one arm and one look. Seeds to add find {percent(arena.plan.margin)} with a power of "
        f"{percent(POWER)}."
    )
    return table("arms", "Verdicts", columns, rows, caption)


def apart(comparison: Comparison) -> str:
    """The difference of an arm with the interval that decides, in a few words."""
    if comparison.equal:
        return EQUAL
    if comparison.test is None:
        return "fewer than two pairs of seeds have a finite result"
    return f"{signed(comparison.test.mean)} ({bounds(comparison.interval)})"


def _of_arm(arm: ArmRuns) -> list[str]:
    finite = [value for value in arm.losses.values() if math.isfinite(value)]
    spread = f" ± {statistics.stdev(finite):.4f}" if len(finite) > 1 else ""
    seeds = f"{len(arm.losses)}" + (f", {len(arm.diverged)} diverged" if arm.diverged else "")
    return [seeds, DASH if arm.lr is None else f"{arm.lr:g}", loss(arm.loss) + spread]


def cost_table(arena: Arena) -> Table:
    """The cost of each arm, and its difference to the baseline at equal tokens, time and operations."""
    rows = []
    by_arm = {comparison.arm.name: comparison for comparison in arena.comparisons}
    for name, arm in arena.arms.items():
        one = by_arm.get(name)
        rows.append(
            [
                name,
                count(arm.recorded("parameters")),
                _speed(arm),
                _milliseconds(arm.recorded("attention_ms")),
                memory(median_of(run.peak() for run in arm.runs.values())),
                DASH if not (flops := arm.recorded("flops_per_token")) else f"{flops:.3g}",
                DASH if one is None or one.test is None else plus_minus(one.test.mean, one.test.interval(ALPHA)),
                DASH if one is None or one.time is None else plus_minus(*one.time),
                DASH if one is None or one.flops is None else plus_minus(*one.flops),
            ]
        )
    layer = " (one layer)" if attention_alone(list(arena.runs.values())) else ""
    columns = ["arm", "parameters", "tokens/s", "attention alone, a step", f"memory{layer}", "FLOPs a token"]
    columns += ["at equal tokens", "at equal time", "at equal FLOPs"]
    caption = (
        "Differences in loss with their 95 % intervals, of the same runs read where arm and baseline have cost as "
        "much: the one that costs more is read before its end, where its learning rate has not come down."
    )
    return table("costs", "Equal what?", columns, rows, caption)


def race_table(arena: Arena) -> Table:
    """The cost with which each arm reaches the baseline's final loss."""
    rows = []
    for name, arm in arena.arms.items():
        times = race(arm, arena.baseline)
        if times is None:
            rows.append([name, "0", *[DASH] * 4])
            continue
        fewer, faster = (f"{ratio:.2f}" for ratio in times.less) if times.less else (DASH, DASH)
        rows.append(
            [name, f"{times.reached} of {times.pairs}", count(times.tokens), fewer, f"{times.seconds:.1f} s", faster]
        )
    columns = ["arm", "seeds that reach it", "tokens", "times fewer tokens", "time of training", "times faster"]
    caption = (
        "Seed by seed: the baseline's final validation loss is the target, and an arm's curve is read where it first "
        "reaches it, on straight lines between evaluations. Tokens and times are means over the seeds that reach it; "
        "there is no ratio unless all do. Time is that of the steps, without evaluations and compilation. "
        "training.target_loss ends a run there."
    )
    return table("race", "To the baseline's loss", columns, rows, caption)


def plus_minus(mean: float, interval: tuple[float, float]) -> str:
    """A difference with half of its interval: "-0.1018 ± 0.0070"."""
    half = interval[1] - mean
    return f"{signed(mean)} ± {half:.4f}" if half or mean else "0"


def _speed(arm: ArmRuns) -> str:
    speeds = arm.over_seeds("throughput/tokens_per_s")
    if not speeds:
        return DASH
    spread = f" ± {count(statistics.stdev(speeds))}" if len(speeds) > 1 else ""
    return f"{count(statistics.median(speeds))}{spread}"


def _milliseconds(value: float | None) -> str:
    return DASH if value is None else f"{value:.3g} ms"


def lr_table(arena: Arena) -> Table | None:
    """The mean loss of each learning rate that was tried."""
    rows = []
    for arm in arena.arms.values():
        for tried in arm.tried:
            chosen = "chosen" if tried.lr == arm.lr else DASH
            mean = DASH if not tried.losses else "diverged" if math.isinf(tried.mean) else f"{tried.mean:.4f}"
            rows.append([arm.name, f"{tried.lr:g}", str(len(tried.losses)), mean, chosen])
    columns = ["arm", "learning rate", "seeds", "val loss", "choice"]
    caption = "Tried on separate seeds, on which no arm is judged."
    return table("lr-sweep", "Learning rates", columns, rows, caption) if rows else None


def probe_table(arena: Arena) -> Table | None:
    """The probes at the end of the runs: means over the seeds, and paired differences."""
    names = sorted({name for run in arena.runs.values() for name in run.metrics if name.startswith(PROBE)})
    rows = []
    for name in names:
        theirs = _finals(arena.baseline, name)
        for arm in arena.arms.values():
            ours = _finals(arm, name)
            if not ours:
                continue
            differences = [value - theirs[seed] for seed, value in ours.items() if seed in theirs]
            test = paired(differences) if len(differences) > 1 and arm is not arena.baseline else None
            mean = f"{statistics.fmean(ours.values()):.4g}"
            rows.append([name.removeprefix(PROBE), arm.name, mean, bounds_of(test)])
    caption = (
        "Tasks: the accuracy at the end of the run, and at 2, 4 and 8 times the trained length. in_context_score: the "
        "loss at the end of the window less that after a tenth of it. Differences are paired by seed, with 95 % "
        "intervals of one arm."
    )
    columns = ["probe", "arm", "mean", "difference"]
    return table("probes", "Probes", columns, rows, caption) if rows else None


def _finals(arm: ArmRuns, metric: str) -> dict[int, float]:
    """The last value of each seed whose run completed."""
    values = {seed: run.series(metric).finite().last() for seed, run in arm.runs.items() if run.status == "completed"}
    return {seed: value for seed, value in values.items() if value is not None}


def bounds_of(test: Paired | None) -> str:
    return DASH if test is None else plus_minus(test.mean, test.interval(ALPHA))


def size_table(arena: Arena) -> Table | None:
    """The difference of each arm to the baseline at each size, and its slope; None in an arena without sizes."""
    rows = []
    for arm in arena.plan.others if arena.plan.sizes else ():
        sizes = differences_by_size(arena, arm)
        for one in sizes:
            gaps = list(one.differences.values())
            test = paired(gaps) if len(gaps) > 1 else None
            rows.append([arm, f"{one.size} layers", f"{one.operations:.3g}", str(len(gaps)), bounds_of(test)])
        change = slope(sizes)
        seeds = DASH if change is None else str(change.n)
        rows.append([arm, "slope", "times ten", seeds, bounds_of(change)])
    columns = ["arm", "size", "operations of a run", "seeds", "difference"]
    caption = (
        "Differences in the final validation loss, paired by seed, with 95 % intervals of one arm. The slope is the "
        "change of the difference with ten times the operations: a line for each seed. Verdicts are about the largest."
    )
    return table("sizes", "Does it hold when the model grows?", columns, rows, caption) if rows else None


def plan_table(arena: Arena) -> Table:
    """The plan as it was written before the first run."""
    plan = arena.plan
    looks = [f"{look.seeds} seeds ({look.planned[:16].replace('T', ' ')} UTC)" for look in plan.looks]
    rates: Sequence[str] = [f"{arm}: {', '.join(f'{lr:g}' for lr in rates)}" for arm, rates in plan.lr.items() if rates]
    rows = [
        ["baseline", plan.baseline],
        *[[f"arm {arm}", " ".join(overrides) or "(no overrides)"] for arm, overrides in plan.arms.items()],
        ["all arms", " ".join(plan.common)],
        ["learning rates", "; ".join(rates) or "each arm's"],
        ["seeds of that sweep", str(plan.lr_seeds) if plan.lr_runs() else DASH],
        ["looks", "; ".join(looks)],
        ["planned looks", str(plan.planned_looks)],
        ["margin", f"{percent(plan.margin)} of the baseline's loss"],
        ["commit", (plan.commit or DASH)[:7]],
    ]
    return table("plan", "The plan", ["", "written before the first run"], rows)
