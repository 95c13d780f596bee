"""docs/arena.md and docs/rankings.md: how often the arena's verdict is right, and the results of small sweeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.markdown import table
from bench.record import Row
from bench.tables.blocks import Rows, block
from recipe.wording import percent


def of_case(rows: Rows, case: str) -> Row | None:
    return next((row for row in rows if row["case"] == case), None)


@block("arena-checks", "cpu:arena", "xeon:arena")
def checks(rows: Rows, xeon: Rows) -> str:
    """Sweeps of an arm against itself, a planted effect, implementations of one score, and a sweep's time."""
    lines = []
    if row := of_case(rows, "itself"):
        for name, how in (("run", "run"), ("drawn", "drawn from their losses")):
            counts = row[name]
            wrong = counts["better"] + counts["worse"]
            lines.append([
                f"an arm against itself, {row['seeds']} seeds: {counts['sweeps']:,} sweeps, {how}",
                f"{wrong:,} *better* or *worse* ({100 * wrong / counts['sweeps']:.1f} %)", "at most 5 %",
            ])  # fmt: skip
    if row := of_case(rows, "planted"):
        for name, how in (("run", "run"), ("drawn", "drawn from their pairs")):
            counts = row[name]
            lines.append([
                f"a learning rate that is {percent(row['effect'])} worse, {row['seeds']} seeds: {counts['sweeps']:,} "
                f"sweeps, {how}", f"{counts['worse']:,} *worse* ({100 * counts['worse'] / counts['sweeps']:.1f} %)",
                "90 %",
            ])  # fmt: skip
    if row := of_case(rows, "equivalents"):
        for arm, verdict in row["arena"]["arms"].items():
            label = "a window as long as the row" if arm == "window" else f"{arm}, the same score"
            lines.append([
                f"{label}, against naive: 1 sweep of {len(row['arena']['seeds'])} seeds",
                f"*{verdict['verdict']}* ({signed(verdict['difference'])})", "*equivalent*",
            ])  # fmt: skip
    if row := of_case(xeon, "toy"):
        what = (
            f"{len(row['arms'])} arms, {len(row['arena']['seeds'])} seeds and three learning rates: {row['runs']} runs"
        )
        lines.append([f"{what} on {row['trained_on']}", f"{row['took_s'] / 60:.1f} minutes", "30 minutes"])
    return table(["", "measured", "wanted"], lines)


def signed(value: float) -> str:
    return "0" if value == 0 else f"{value:+.1g}" if abs(value) < 1e-4 else f"{value:+.4f}"


def interval(bounds: Any) -> str:
    return f"{bounds[0]:+.4f} to {bounds[1]:+.4f}"


PUBLISHED = {
    "alibi": "better than learned positions, as good as rotary ones (Press et al. 2022)",
    "sinks": "no worse (Xiao et al. 2024; gpt-oss)",
    "qk_norm": "better (Henry et al. 2020)",
    "soft_cap": "no worse (Gemma 2)",
    "relu2": "better than GELU (So et al. 2021)",
    "gate": "better (Qiu et al. 2025)",
    "value_residual": "better (Zhou et al. 2024)",
}


@block("arena-rankings", "xeon:arena")
def rankings(rows: Rows) -> str:
    """The verdicts on published changes beside the claims of their papers."""
    return judged(of_case(rows, "rankings"), PUBLISHED)


@block("arena-toy", "xeon:arena")
def toy(rows: Rows) -> str:
    """The verdicts on four scores of a model with learned positions."""
    return judged(of_case(rows, "toy"))


@block("arena-formulas", "cpu:arena")
def formulas(rows: Rows) -> str:
    """The verdicts on the scores of experiment=formulas, the lowest loss first. Their times were disturbed."""
    row = of_case(rows, "formulas")
    if row is None:
        return "Not measured yet."
    arms = sorted(row["arena"]["arms"].items(), key=lambda item: float(item[1]["difference"]))
    lines = [
        [f"`{arm}`", f"*{one['verdict']}*", signed(one["difference"]), interval(one["interval_at_level"])]
        for arm, one in arms
    ]
    return table(["arm", "verdict", "difference", "corrected interval"], lines)


def judged(row: Row | None, published: Mapping[str, str] | None = None) -> str:
    """The verdict on each arm of a sweep, and the claim of its paper."""
    if row is None:
        return "Not measured yet."
    lines = [
        [
            f"`{arm}`", *([published.get(arm, "")] if published else []), f"*{one['verdict']}*",
            signed(one["difference"]), interval(one["interval_at_level"]), interval(one["at_equal_time"]["interval"]),
        ]
        for arm, one in row["arena"]["arms"].items()
    ]  # fmt: skip
    heads = ["arm", *(["published"] if published else []), "verdict", "difference"]
    return table([*heads, "corrected interval", "95 % interval at equal time"], lines)


@block("arena-parts", "cpu:arena")
def parts(rows: Rows) -> str:
    """The loss with each part of the model, and the tokens and the time until it reaches the baseline's loss."""
    row = of_case(rows, "parts")
    if row is None:
        return "Not measured yet."
    lines = []
    for arm, one in row["arena"]["arms"].items():
        low, high = one["interval"]
        less = ["not reached", ""]
        if race := one["race"]:
            reached = f" ({race['reached']} of {len(one['differences'])} seeds)"
            less = [f"{factor:.1f}{reached}" for factor, reached in zip(race["less"], (reached, ""), strict=True)]
        cells = [f"{one['difference']:+.2f}", f"{low:+.2f} to {high:+.2f}", *less, f"*{one['verdict']}*"]
        lines.append([f"`{arm}`", *cells])
    heads = ["difference in loss", "95 % interval", "times fewer tokens", "times less time", "verdict"]
    return table(["arm", *heads], lines)


def by_length(values: Mapping[str, float], task: str) -> list[str]:
    """A probe's accuracy at the trained length and at 2, 4 and 8 times that; empty where it was not measured."""
    names = [f"probe/{task}", *(f"probe/{task}_x{n}" for n in (2, 4, 8))]
    return [f"{100 * values[name]:.0f} %" if name in values else "" for name in names]


@block("arena-mqar", "xeon:arena")
def mqar(rows: Rows) -> str:
    """The accuracy of each arm on associative recall."""
    return recalled(rows, "mqar")


@block("arena-counting", "cpu:arena")
def counting(rows: Rows) -> str:
    """The accuracy of each arm on counting."""
    return recalled(rows, "counting")


@block("arena-needle", "cpu:arena")
def needle(rows: Rows) -> str:
    """The accuracy of each arm on the needle."""
    return recalled(rows, "needle")


def recalled(rows: Rows, task: str) -> str:
    """The accuracy of each arm on a task, at the trained length and at 2, 4 and 8 times that."""
    row = of_case(rows, f"recall-{task}")
    if row is None:
        return "Not measured yet."
    probes: Mapping[str, Mapping[str, float]] = row["probes"]
    trained = next((int(word.split("=")[1]) for word in row["overrides"] if word.startswith("seq_len=")), 64)
    lines = [[f"`{arm}`", *by_length(values, task)] for arm, values in probes.items()]
    lengths = [f"{trained:,} tokens, as trained", *(f"{n * trained:,}" for n in (2, 4, 8))]
    return table([f"`{task}`: right answers", *lengths], lines)


@block("arena-needle-far", "cpu:arena")
def needle_far(rows: Rows) -> str:
    """The accuracy of each arm on the needle in the longest texts, by distance."""
    row = of_case(rows, "recall-needle")
    if row is None:
        return "Not measured yet."
    maps = {arm: tasks["needle"] for arm, tasks in row["maps"].items()}
    longest = max(one["lengths"][-1] for one in maps.values())
    far = [n for n, low in enumerate(next(iter(maps.values()))["distances"]) if longest // 32 <= low < longest]
    lines = [[f"`{arm}`", *(f"{100 * one['accuracy'][-1][n]:.0f} %" for n in far)] for arm, one in maps.items()]
    ranges = [f"{longest >> k:,} to {(longest >> k - 1) - 1:,}" for k in range(len(far), 0, -1)]
    return table([f"of {longest:,} tokens, the needle is back by", *ranges], lines)
