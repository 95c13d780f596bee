"""Attention alone: README, docs/speed.md, docs/kernels.md and docs/results.md."""

from __future__ import annotations

from bench.attention.bytes_moved import chart as bytes_chart
from bench.attention.bytes_moved import gigabytes
from bench.attention.views import chart_of
from bench.attention.views import length_of as length
from bench.markdown import both, pivot, table
from bench.record import Row
from bench.tables.blocks import Rows, block, figure
from bench.tables.labels import PEERS, VARIANTS, percent, problem
from recipe.drawing import Chart

PEAK_TFLOPS = 989  # of an H200's tensor cores in bf16
LENGTHS = ("1k", "4k", "16k")  # the columns of tables of speeds


def by_length(rows: Rows) -> list[Row]:
    """Rows by head size, mask, dropout and length, in the order of their tables."""
    order = list(VARIANTS)
    return sorted(rows, key=lambda r: (r["head_size"], order.index(r["variant"]), r["dropout"], r["length"]))


def beside_fastest(row: Row) -> str:
    """TFLOP/s of both passes, and their ratio to the fastest peer of the same run."""
    return f"{both(row, 'tflops')} ({both(row, 'of_fastest_peer', 2)})"


@block("attention-causal", "attention")
def causal(rows: Rows) -> str:
    """README's table: causal flash, beside the fastest of its peers."""
    shown = [row for row in rows if row["name"] == "flash" and row["variant"] == "causal"]
    return pivot(
        by_length(shown), problem, length, beside_fastest, corner="`python -m bench.attention`", columns=LENGTHS
    )


@block("attention", "attention")
def speeds(rows: Rows) -> str:
    """Flash, causal and full, beside the fastest of its peers."""
    shown = [row for row in rows if row["name"] == "flash"]
    return pivot(by_length(shown), problem, length, beside_fastest, columns=LENGTHS)


@block("attention-peers", "attention")
def peers(rows: Rows) -> str:
    """Flash beside its fastest peers, without dropout."""
    order = list(PEERS)
    shown = [row for row in rows if row["name"] in order and not row["dropout"] and "backward" in row]
    shown.sort(key=lambda row: (row["head_size"], row["variant"], order.index(row["name"]), row["length"]))
    return pivot(
        shown, lambda row: problem(row, PEERS[row["name"]]), length, lambda row: both(row, "tflops"), columns=LENGTHS
    )


@block("kernel-paths", "kernel-paths")
def paths(rows: Rows) -> str:
    """Causal attention by each path of attention=flash."""
    shown = [
        row | {"path": path} for row in by_length(rows) if row["variant"] == "causal" for path in ("hopper", "plain")
    ]
    return pivot(
        shown,
        lambda row: problem(row, f"`{row['path']}`"),
        length,
        lambda row: both(row[row["path"]], "tflops"),
        corner="`attention.path=`",
    )


@block("kernel-paths-ratios", "kernel-paths")
def path_ratios(rows: Rows) -> str:
    """The speed of the Hopper kernels as a multiple of the plain kernels', for scores other than causal."""

    def ratio(row: Row) -> str:
        return "/".join(f"{row['plain'][way]['ms'] / row['hopper'][way]['ms']:.2f}" for way in ("forward", "backward"))

    shown = by_length([row for row in rows if row["variant"] != "causal"])
    columns = ["128", "256", "512", "1k", "2k", "16k"]
    return pivot(shown, problem, length, ratio, columns=columns)


@block("attention-variants", "attention-variants")
def variants(rows: Rows) -> str:
    """The cost of each score and layout at 16,384 tokens, and its speed as a multiple of FlexAttention's."""
    by_case = {
        (row["name"], row["head_size"], row["variant"], row["dropout"]): row for row in rows if "backward" in row
    }
    lines = []
    for variant in ("causal", "alibi", "sinks", "soft_cap", "window", "documents"):
        line = [VARIANTS[variant]]
        for head_size in (64, 128):
            ours, flex = (by_case[name, head_size, variant, 0.0] for name in ("flash", "flex"))
            ratios = (flex[way]["ms"] / ours[way]["ms"] for way in ("forward", "backward"))
            line += [both(ours, "ms", 2), "/".join(f"{ratio:.2f}" for ratio in ratios)]
            line.append(both(by_case["flash", head_size, variant, 0.1], "ms", 2))
        lines.append(line)
    heads = [
        heading
        for head_size in (64, 128)
        for heading in (f"head size {head_size}", "times as fast as flex", "with dropout 0.1")
    ]
    return table(["", *heads], lines)


@block("attention-share-of-peak", "attention")
def share_of_peak(rows: Rows) -> str:
    """Flash's share of the peak, causal."""
    shown = [row for row in rows if row["name"] == "flash" and row["variant"] == "causal" and not row["dropout"]]

    def share(row: Row) -> str:
        return "/".join(f"{100 * row[way]['tflops'] / PEAK_TFLOPS:.0f}" for way in ("forward", "backward"))

    corner = f"causal, bf16: forward/backward, % of {PEAK_TFLOPS} TFLOP/s"
    return pivot(by_length(shown), problem, length, share, corner=corner, columns=LENGTHS)


def beside_naive(rows: Rows) -> list[Row]:
    """Naive and flash from 1,024 to 16,384 tokens, at head size 64, causal, without dropout."""
    return sorted(
        (
            row
            for row in rows
            if row["name"] in ("naive", "flash")
            and (row["head_size"], row["variant"], row["dropout"]) == (64, "causal", 0.0)
            and 1024 <= row["length"] <= 16384
        ),
        key=lambda row: (row["name"] == "flash", row["length"]),
    )


@block("attention-memory", "attention")
def memory(rows: Rows) -> str:
    """Memory of a forward and backward pass over the length."""

    def mib(row: Row) -> str:
        return f"{row['extra_bytes'] / 2**20:,.0f}" if row["status"] == "measured" else str(row["status"])

    corner = "MiB above the inputs, forward and backward, 16,384 tokens per batch"
    return pivot(beside_naive(rows), lambda row: str(row["name"]), length, mib, corner=corner)


@block("bytes", "bytes")
def bytes_moved(rows: Rows) -> str:
    """Bytes moved by a forward and backward pass, beside FlashAttention's figure 2."""
    names = {"naive": "ours, naive", "flash": "ours, flash (plain Triton)", "sdpa-flash": "torch's FlashAttention-2"}
    lines = [["paper, standard, A100", "66.6", "40.3", "41.7"], ["paper, FlashAttention", "75.2", "4.4", "7.3"]]
    for name, label in names.items():
        passes = [row for row in rows if row["name"] == name and not row.get("block_q")]
        sums = [sum(row["gflop"] for row in passes), sum(map(gigabytes, passes)), sum(row["ms"] for row in passes)]
        lines.append([label, f"{sums[0]:,.0f}", f"{sums[1]:.3g}", f"{sums[2]:.3g}"])
    return table(["forward + backward", "GFLOP", "GB moved", "ms"], lines)


@block("bytes-blocks", "bytes")
def bytes_of_blocks(rows: Rows) -> str:
    """Time and bytes of the forward over the block size."""
    tiles = [row for row in rows if row.get("block_q")]
    return table(
        ["queries x keys of a tile", *(f"{row['block_q']} x {row['block_k']}" for row in tiles)],
        [
            ["ms, forward", *(f"{row['ms']:.2f}" for row in tiles)],
            ["GB moved", *(f"{gigabytes(row):.2f}" for row in tiles)],
        ],
    )


@block("softmax", "softmax")
def softmax(rows: Rows) -> str:
    """The softmax kernels, milliseconds for 4,000 rows."""
    ms = {(row["name"], row["length"]): row["ms"] for row in rows if row["rows"] == 4000}
    lengths = sorted({length for _, length in ms})
    lines = [[f"{name}, ms", *(milliseconds(ms[name, n]) for n in lengths)] for name in ("native", "safe", "online")]
    lines.append(["safe / online", *(f"{ms['safe', n] / ms['online', n]:.2f}" for n in lengths)])
    return table(["4,000 rows of", *(f"{n:,}" for n in lengths)], lines)


def milliseconds(ms: float) -> str:
    """Three digits."""
    return f"{ms:.{3 if ms < 1 else 2}f}"


@block("attention-over-standard", "attention", "train-step")
def over_standard(attention: Rows, steps: Rows) -> str:
    """Flash over naive, of a training step and of attention alone, beside FlashAttention's table 2 and figure 1."""
    alone = {row["name"]: row for row in beside_naive(attention) if row["length"] == 1024}
    ms = {name: sum(alone[name][way]["ms"] for way in ("forward", "backward")) for name in ("naive", "flash")}
    speeds = {
        row["attention"]: row["tokens_per_s"]
        for row in steps
        if (row["shape"], row["dropout"], row["recompute"], row["extra"]) == ("32x1024", 0.0, "none", [])
    }
    return table(
        ["GPT-2, 1,024 tokens, without dropout", "theirs", "ours"],
        [
            ["training, over standard attention", "1.7 to 3.5", f"{speeds['flash'] / speeds['naive']:.2f}"],
            ["attention alone, over standard attention", "7.6", f"{ms['naive'] / ms['flash']:.1f}"],
        ],
    )


@block("attention-crossover", "attention")
def crossover(rows: Rows) -> str:
    """The speed of flash as a multiple of naive's, forward and backward together."""
    ms = {
        (row["name"], row["length"]): row["forward"]["ms"] + row["backward"]["ms"]
        for row in beside_naive(rows)
        if "backward" in row
    }
    lengths = sorted({n for name, n in ms if name == "naive"})
    ratios = [f"{ms['naive', n] / ms['flash', n]:.0f}" for n in lengths]
    return table(["tokens", *(f"{n:,}" for n in lengths)], [["times as fast as naive", *ratios]])


@figure("bytes", "bytes")
def bytes_figure(rows: Rows) -> Chart:
    """The bytes of each implementation and block size."""
    return bytes_chart(rows)


@figure("attention-speed", "attention")
def speed_figure(rows: Rows) -> Chart:
    """TFLOP/s over the length at head size 128, of flash and its fastest peers."""
    slow = ("naive", "tiled", "sdpa-math", "sdpa-efficient")
    return chart_of([row for row in rows if row["name"] not in slow], "speed", 128)


@figure("attention-memory", "attention")
def memory_figure(rows: Rows) -> Chart:
    """Memory over the length at head size 64."""
    return chart_of(beside_naive(rows), "memory", 64)


def share(row: Row) -> str:
    """The bandwidth of a row as a share of a copy's."""
    return percent(row["of_copy"])


@block("decode", "decode")
def decode(rows: Rows) -> str:
    """The bandwidth that attention to a cache reaches, as a share of a copy's."""
    names = {"sdpa flash": "SDPA's FlashAttention-2", "sdpa cudnn": "SDPA's cuDNN"}
    names |= {"flex decoding": "FlexAttention's decoding"}
    order = ["flash", "flash, pages of 16", "flash, pages of 64", "flash, pages of 256", *names]
    shown = sorted(
        (row for row in rows if row["name"] in order), key=lambda row: (order.index(row["name"]), -row["sequences"])
    )
    return pivot(
        shown,
        lambda row: names.get(row["name"], str(row["name"])),
        lambda row: f"{row['sequences']} x {row['keys']:,} keys",
        share,
    )
