"""The numbers of an arena as tables."""

import math
import statistics

from recipe.compare.arena_results import Arena, ArmRuns, differences_by_size, race, slope
from recipe.compare.costs import attention_alone, median_of
from recipe.compare.statistics import ALPHA, POWER, Paired, paired_if_several
from recipe.compare.tables import COUNT, DASH, EQUAL, LOSS, Table, bounds, memory, shown, signed, speed, table
from recipe.wording import percent

PROBE = "probe/"


def verdict_table(arena: Arena) -> Table:
    """Each arm: its verdict, its loss, its difference to the baseline, and two tests of it."""
    rows = [[arena.baseline.name, "baseline", *_of_arm(arena.baseline), *[DASH] * 6]]
    for comparison in arena.comparisons:
        test = comparison.test
        loss, share = arena.baseline.loss or 0.0, ""
        if test and loss > abs(test.mean) > 0:
            share = f" ({100 * test.mean / loss:+.2f} %)"
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
                shown(comparison.p_sign_flip, "{:.2g}"),
                str(comparison.more or DASH),
            ]
        )
    judged = "wrong answers" if arena.task else "val loss"
    columns = [
        "arm", "verdict", "seeds", "learning rate", judged, "difference", "95 % interval", "judged by", "p (t)",
        "p (signs)", "seeds to add",
    ]  # fmt: skip
    caption = (
        "Means with their deviation over the seeds; differences are paired by seed. The verdict follows "
        'from the interval under "judged by", which is wider where there are several arms (Holm) or planned looks. '
        f"p-values are for one arm and one look. Seeds to add find {percent(arena.plan.margin)} with a power of "
        f"{percent(POWER)}."
    )
    return table("arms", "Verdicts", columns, rows, caption)


def _of_arm(arm: ArmRuns) -> list[str]:
    finite = [value for value in arm.losses.values() if math.isfinite(value)]
    spread = f" ± {statistics.stdev(finite):.4f}" if len(finite) > 1 else ""
    diverged = len(arm.losses) - len(finite)
    seeds = f"{len(arm.losses)}" + (f", {diverged} diverged" if diverged else "")
    return [seeds, shown(arm.lr, "{:g}"), shown(arm.loss, LOSS) + spread]


def cost_table(arena: Arena) -> Table:
    """The cost of each arm, and its difference to the baseline at equal time and operations."""
    rows, by_arm = [], {comparison.arm.name: comparison for comparison in arena.comparisons}
    for name, arm in arena.arms.items():
        runs, one = list(arm.runs.values()), by_arm.get(name)
        rows.append(
            [
                name,
                shown(median_of(run.median("parameters") for run in runs), COUNT),
                speed(runs),
                memory(median_of(run.peak() for run in runs)),
                shown(median_of(run.median("flops_per_token") for run in runs), "{:.3g}"),
                *(bounds_of(one.at_equal(of) if one else None) for of in ("throughput/step_ms", "flops_per_token")),
            ]
        )
    layer = " (one layer)" if attention_alone(list(arena.runs.values())) else ""
    columns = [
        "arm", "parameters", "tokens/s", f"memory{layer}", "FLOPs a token", "at equal time", "at equal FLOPs",
    ]  # fmt: skip
    caption = (
        "Differences in loss with their 95 % intervals, of the same runs read where arm and baseline have cost as "
        "much: the one that costs more is read before its end, where its learning rate has not come down."
    )
    return table("costs", "Equal what?", columns, rows, caption)


def race_table(arena: Arena) -> Table:
    """How often each arm reaches the baseline's final loss, and for how much less."""
    rows = []
    for name, arm in arena.arms.items():
        reached, pairs, less = race(arm, arena.baseline)
        rows.append([name, f"{reached} of {pairs}", *(shown(ratio, "{:.2f}") for ratio in less or (None, None))])
    columns = ["arm", "seeds that reach it", "times fewer tokens", "times faster"]
    caption = (
        "Seed by seed: the baseline's final validation loss is the target, and an arm's curve is read where it first "
        "reaches it. There is no ratio unless all seeds do. Time is that of the steps, without evaluations and "
        "compilation. training.target_loss ends a run there."
    )
    return table("race", "To the baseline's loss", columns, rows, caption)


def lr_table(arena: Arena) -> Table | None:
    """The mean loss of each learning rate that was tried."""
    rows = []
    for arm in arena.arms.values():
        for lr, losses in arm.tried.items():
            edge = ", at the edge" if lr in (min(arm.tried), max(arm.tried)) else ""
            mean = shown(statistics.fmean(losses) if losses else None, LOSS)
            rows.append([arm.name, f"{lr:g}", str(len(losses)), mean, f"chosen{edge}" if lr == arm.lr else DASH])
    columns = ["arm", "learning rate", "seeds", "val loss", "choice"]
    caption = "Tried on seeds on which no arm is judged. At the edge: a wider arena.lr may find a better one."
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
            test = None if arm is arena.baseline else paired_if_several(differences)
            mean = f"{statistics.fmean(ours.values()):.4g}"
            rows.append([name.removeprefix(PROBE), arm.name, mean, bounds_of(test)])
    caption = (
        "Tasks: the accuracy at the end of the run, and at 2, 4 and 8 times the trained length. in_context_score: the "
        "loss at the end of the window less that after a tenth of it. Differences are paired by seed, with 95 % "
        "intervals of one arm."
    )
    return table("probes", "Probes", ["probe", "arm", "mean", "difference"], rows, caption) if rows else None


def _finals(arm: ArmRuns, metric: str) -> dict[int, float]:
    """The last value of each seed whose run completed."""
    values = {seed: run.series(metric).finite().last() for seed, run in arm.runs.items() if run.status == "completed"}
    return {seed: value for seed, value in values.items() if value is not None}


def bounds_of(test: Paired | None) -> str:
    """A difference with half of its 95 % interval: "-0.1018 ± 0.0070"."""
    if test is None:
        return DASH
    half = test.interval(ALPHA)[1] - test.mean
    return f"{signed(test.mean)} ± {half:.4f}" if half or test.mean else "0"


def size_table(arena: Arena) -> Table | None:
    """The difference of each arm to the baseline at each size, and its slope; None in an arena without sizes."""
    rows = []
    for arm in arena.plan.others if arena.plan.sizes else ():
        sizes = differences_by_size(arena, arm)
        for one in sizes:
            gaps = list(one.differences.values())
            test = paired_if_several(gaps)
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
    rows = [
        *[[f"arm {arm}", " ".join(overrides) or "(no overrides)"] for arm, overrides in plan.arms.items()],
        ["all arms", " ".join(plan.common)],
        ["looks", f"{'; '.join(looks)}, of {plan.planned_looks} planned"],
        ["margin", f"{percent(plan.margin)} of the baseline's loss"],
    ]
    return table("plan", "The plan", ["", "written before the first run"], rows)
