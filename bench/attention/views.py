"""The tables of bench.attention's rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.markdown import both, pivot
from bench.record import Row
from recipe.wording import short_length


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """The end of a result's name -> its table: flash beside the fastest peer, each one's speed, and its costs."""
    ordered = sorted(rows, key=lambda row: (row["head_size"], row["variant"], row["dropout"], row["length"]))
    columns = [short_length(length) for length in sorted({row["length"] for row in rows})]
    flash = [row for row in ordered if row["name"] == "flash"]

    def length(row: Row) -> str:
        return short_length(row["length"])

    def candidate(row: Row) -> str:
        return f"{problem(row)}, {row['label']}"

    return {
        "": pivot(flash, problem, length, beside_fastest, corner="TFLOP/s (times the fastest peer)", columns=columns),
        "-peers": pivot(ordered, candidate, length, speed, corner="TFLOP/s, forward/backward", columns=columns),
        "-costs": pivot(ordered, candidate, length, cost, corner="MiB above the inputs (error)", columns=columns),
    }


def problem(row: Row) -> str:
    """The head size, mask and dropout of a row: head size 64, full, dropout 0.1."""
    mask = [] if row["variant"] == "causal" else [row["variant"]]
    dropout = [f"dropout {row['dropout']:g}"] if row["dropout"] else []
    return ", ".join([f"head size {row['head_size']}", *mask, *dropout])


def speed(row: Row) -> str:
    """TFLOP/s of both passes: two digits, or all before the point; or the reason why there are none."""
    if row["status"] != "measured":
        return str(row["status"])
    values = (row[direction]["tflops"] for direction in ("forward", "backward"))
    return "/".join(f"{value:.0f}" if value >= 10 else f"{value:.2g}" for value in values)


def beside_fastest(row: Row) -> str:
    """The speed, and its ratio to that of the fastest peer of the same measurement."""
    if "of_fastest_peer" in row.get("backward", {}):
        return f"{speed(row)} ({both(row, 'of_fastest_peer', 2)})"
    return speed(row)


def cost(row: Row) -> str:
    """Memory, and the largest error among output and gradients."""
    if row["status"] != "measured":
        return str(row["status"])
    memory = "?" if row["extra_bytes"] is None else f"{row['extra_bytes'] / 2**20:,.0f}"
    return f"{memory} ({max(row['error'].values()):.0e})" if row["error"] else memory


def reasons(rows: Sequence[Row]) -> Iterator[str]:
    """Each reason for cells without a measurement once."""
    for label, message in dict.fromkeys((row["label"], row["message"]) for row in rows if "message" in row):
        yield f"{label}: {message}"
