"""Training steps on one GPU and on several: README, docs/speed.md, docs/several-gpus.md."""

from __future__ import annotations

from bench.markdown import pivot, table
from bench.record import Row
from bench.tables.blocks import Rows, block, figure
from bench.tables.labels import percent, thousands
from bench.train_step.views import NANOGPT, beside, chart, length
from recipe.drawing import Chart

BF16 = ["training.residual_in_fp32=false"]
DOCUMENTS = ["data.documents=mask"]


def cell(row: Row) -> str:
    """Thousand tokens/s (GiB), or why there are none."""
    if row["status"] != "completed":
        return str(row["status"]).replace("_", " ")
    return f"{thousands(row['tokens_per_s'])} ({row['peak_allocated_gib']:.1f})"


def shape(row: Row) -> str:
    """8 x 4,096"""
    batch, tokens = row["shape"].split("x")
    return f"{batch} x {int(tokens):,}"


def other_keys(row: Row) -> str:
    """How a step's further overrides change the visible keys; empty for causal attention."""
    extra = row.get("extra", [])
    if extra == DOCUMENTS:
        return ", documents masked"
    return ", window of 1,024 in every other layer" if "score=window" in extra else ""


def steps(ours: Rows, theirs: Rows, corner: str, bf16: bool) -> str:
    """Rows beside nanoGPT's: a line for each shape, a column for each implementation."""
    measured = [name for name in ("sdpa", "naive") if any(row["attention"] == name for row in ours)]
    names = [NANOGPT, "flash", *(["flash, residual in bf16"] if bf16 else []), *measured]
    rows = [row for row in beside(ours, theirs) if row.get("recompute", "none") == "none"]
    rows = [row for row in rows if bf16 or row.get("extra") != BF16]
    rows.sort(key=lambda row: (length(row), -row["dropout"], other_keys(row)))
    return pivot(
        rows,
        lambda row: shape(row) + other_keys(row),
        lambda row: "flash, residual in bf16" if row.get("extra") == BF16 else row["attention"],
        cell,
        corner=corner,
        columns=names,
    )


@block("train-step-short", "train-step", "nanogpt")
def short(ours: Rows, theirs: Rows) -> str:
    """README's: three lengths with dropout."""
    shown = {"32x1024", "8x4096", "2x16384"}
    rows = [row for row in ours if row["dropout"] and row["shape"] in shown]
    return steps(rows, theirs, "`python -m bench.train_step`", bf16=False)


@block("train-step-h100", "h100:train-step", "h100:nanogpt")
@block("train-step", "train-step", "nanogpt")
def without_dropout(ours: Rows, theirs: Rows) -> str:
    """All lengths without dropout."""
    rows = [row for row in ours if not row["dropout"]]
    return steps(rows, theirs, "batch x seq_len", bf16=True)


@block("train-step-h100-dropout", "h100:train-step", "h100:nanogpt")
@block("train-step-dropout", "train-step", "nanogpt")
def with_dropout(ours: Rows, theirs: Rows) -> str:
    """All lengths with dropout 0.1."""
    return steps([row for row in ours if row["dropout"]], theirs, "batch x seq_len, dropout 0.1", bf16=True)


@block("train-step-sizes", "h100:train-step-sizes")
def sizes(rows: Rows) -> str:
    """GPT-2's larger models: the share of the peak for dense bf16 products, causal attention counted once."""
    lines = (
        [f"`{' '.join(row['extra'])}`", shape(row), thousands(row["tokens_per_s"]), percent(row["mfu_causal"], 1),
         f"{row['peak_allocated_gib']:.1f}"]
        for row in sorted(rows, key=lambda row: (length(row), row["tokens_per_s"]), reverse=True)
    )  # fmt: skip
    return table(["", "batch x seq_len", "thousand tokens/s", "MFU", "GiB"], lines)


@block("recompute", "h100:train-step")
def recompute(rows: Rows) -> str:
    """The time that training.recompute costs and the memory that it saves."""
    order = ["none", "attention", "around_attention", "block"]
    shown = [row for row in rows if (row["shape"], row["dropout"], row["extra"]) == ("32x1024", 0.0, [])]
    shown = sorted((row for row in shown if row["attention"] == "flash"), key=lambda row: order.index(row["recompute"]))
    lines = (
        [f"`{row['recompute']}`", thousands(row["tokens_per_s"]), f"{row['peak_allocated_gib']:.1f}"] for row in shown
    )
    return table(["`training.recompute=`", "thousand tokens/s", "GiB"], lines)


@figure("train-step", "train-step", "nanogpt")
def step_figure(ours: Rows, theirs: Rows) -> Chart:
    """Tokens/s and memory over the length with dropout 0.1."""
    return chart([row for row in ours if row["extra"] != BF16], theirs, 0.1)


SEVERAL = {
    ("speed", "exact"): "GPT-2 124M, 32 x 1,024 tokens per GPU, dropout 0.1",
    ("speed", "any order"): "the same with `parallel.exact=false`",
    ("xl", "exact"): "GPT-2 XL, 16 x 1,024 tokens per GPU, `parallel.data=shard`",
    ("xl", "any order"): "the same with `parallel.exact=false`",
    ("xl", "exact, kept gathered"): "the same with `parallel.reshard_after_forward=false`",
}
SEQUENCES = {"quarter": 2, "half": 2, "million": 4}  # and the GPUs that share each


def speeds(rows: Rows) -> dict[tuple[str, str, int], float]:
    """(kind, name, GPUs) -> tokens/s, without times that include compiling."""
    return {(row["kind"], row["name"], row["gpus"]): row["tokens_per_s"] for row in rows if not row["compiles"]}


def of_one(rates: dict[tuple[str, str, int], float], kind: str, name: str, gpus: int) -> float | None:
    """The speed on several GPUs as a multiple of one GPU's; None where either was not measured."""
    together = rates.get((kind, name, gpus))
    one = rates.get((kind, "alone", gpus)) or rates.get((kind, name, 1))
    return together / one if together and one else None


def rounded(speed: float) -> str:
    """Tokens/s in four digits: 1,085,000."""
    return f"{float(f'{speed:.4g}'):,.0f}"


@block("two-gpus", "several-gpus")
def two_gpus(rows: Rows) -> str:
    """README's sentence."""
    times = of_one(speeds(rows), "speed", "exact", 2)
    assert times is not None
    return f"Two H200s train GPT-2 (124M) {times:.2f} times as fast as one."


@block("several-gpus", "several-gpus", "h100:several-gpus")
def several(h200: Rows, h100: Rows) -> str:
    """Tokens/s on two and four GPUs, and as multiples of one."""
    groups = {"two H200s": (h200, 2), "four H200s": (h200, 4), "four H100s": (h100, 4)}
    lines = []
    for case, label in SEVERAL.items():
        line = [label]
        for rows, gpus in groups.values():
            times = of_one(speeds(rows), *case, gpus)
            line += ["", ""] if times is None else [rounded(speeds(rows)[*case, gpus]), f"{times:.2f}"]
        lines.append(line)
    return table(["tokens/s", *(head for name in groups for head in (name, "times one"))], lines)


@block("shared-sequences", "several-gpus")
def shared(rows: Rows) -> str:
    """One sequence of GPT-2 124M on several H200s and on one."""
    lines = []
    for kind, gpus in SEQUENCES.items():
        of = {row["gpus"]: row for row in rows if row["kind"] == kind}
        row, one = of[gpus], of.get(1)
        line = [f"{row['seq_len']:,}", str(gpus), rounded(row["tokens_per_s"]), f"{row['peak_allocated_gib']:.1f}"]
        if one is not None:
            line += [f"{row['tokens_per_s'] / one['tokens_per_s']:.2f}", f"{one['peak_allocated_gib']:.1f}"]
        lines.append(line + [""] * (6 - len(line)))
    return table(["tokens", "GPUs", "tokens/s", "GiB per GPU", "times one", "GiB on one"], lines)


@block("longest", "several-gpus")
def longest(rows: Rows) -> str:
    """The longest sequences that several H200s have trained: one step, whose time includes compiling."""
    names = {"four": "GPT-2 124M", "xl-long": "GPT-2 XL, `parallel.data=shard`, the residual stream in bf16"}
    lines = [
        [
            names[row["kind"]],
            str(row["gpus"]),
            f"{row['seq_len']:,}",
            f"{row['step_ms'] / 1e3:.0f} s",
            f"{row['peak_allocated_gib']:.1f} GiB",
        ]
        for row in sorted((row for row in rows if row["kind"] in names), key=lambda row: (row["kind"], row["gpus"]))
    ]
    return table(["", "H200s", "tokens of the sequence", "first step, with compiling", "per GPU"], lines)


@block("same-bits", "several-gpus", "h100:several-gpus")
def same_bits(two: Rows, four: Rows) -> str:
    """Whether 50 steps give the same losses, norms and weights as on one GPU."""
    names = {
        ("bits", "replicate"): "`parallel.data=replicate`, compiled",
        ("bits", "shard"): "`parallel.data=shard`, compiled",
        ("eager", "replicate"): "`parallel.data=replicate`, not compiled",
        ("eager", "shard"): "`parallel.data=shard`, not compiled",
        ("muon", "replicate"): "`parallel.data=replicate`, not compiled, `optimizer=muon`",
        ("muon", "shard"): "`parallel.data=shard`, not compiled, `optimizer=muon`",
    }
    cells: dict[tuple[str, str], list[str]] = {case: [] for case in names}
    for rows, gpus in ((two, 2), (four, 4)):
        digests = {(row["kind"], row["name"], row["gpus"]): row.get("digest") for row in rows}
        for case, line in cells.items():
            one, several = digests.get((*case, 1)), digests.get((*case, gpus))
            line.append({True: "yes", False: "no"}[several == one] if one and several else "")
    lines = [[names[case], *line] for case, line in cells.items()]
    return table(["the bits of one GPU on", "two H200s", "four H100s"], lines)


@block("recipe-on-two", "train-step-two-gpus", "long-context")
def recipe_on_two(steps: Rows, sequences: Rows) -> str:
    """train.py itself on two GPUs, with data and logging."""
    lines = []
    speed = {row.get("gpus", 1): row["tokens_per_s"] for row in steps}
    lines.append(["GPT-2 124M, 32 x 1,024 tokens per GPU, dropout 0.1", *columns_of(speed)])
    lines.append(["`experiment=long_context`, 524,288 tokens", *columns_of(long_speeds(sequences))])
    return table(["`train.py`, tokens/s", "one H200", "two", "times one"], lines)


def columns_of(speed: dict[int, float]) -> list[str]:
    """Tokens/s on one and on two GPUs, and their ratio."""
    shown = [f"{float(f'{speed[gpus]:.3g}'):,.0f}" for gpus in (1, 2)]
    return [*shown, f"{speed[2] / speed[1]:.2f}"]


def long_speeds(rows: Rows) -> dict[int, float]:
    """GPUs -> tokens/s of the second step of experiment=long_context."""
    return {row["case"]["gpus"]: 524_288 / second_step(row) for row in rows}


def second_step(row: Row) -> float:
    """The seconds of the second of two steps: the first compiles."""
    times = dict(row["elapsed_s"])
    return float(times[2] - times[1])
