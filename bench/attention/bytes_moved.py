"""Bytes that attention moves to and from the GPU's memory, read from the hardware's counters, and its time.

    python -m bench.attention.bytes_moved       # about a minute; needs NVIDIA's profiler, ncu

FlashAttention (Dao et al. 2022), figure 2, with this project's kernels: GPT-2 medium's attention (1,024 tokens, 16
heads of 64, batch 64), forward and backward, for naive, flash and torch's FlashAttention; and the forward pass over
block sizes. A pass is profiled in one process (ncu runs every kernel several times) and timed in another.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
from matplotlib.figure import Figure

from attention import AttentionConfig, KernelPath, Score
from attention.flash.call import Blocks, KernelCall
from attention.flash.forward import forward
from attention.spec import Inputs, Spec
from bench.attention.peers import Problem, candidates, from_registry
from bench.machine import device_name, require_gpu
from bench.measure import Call, Timing, interleaved, release
from bench.record import Recorder, Row, command_line, command_of, measurement, result_file
from recipe.drawing import Chart, Palette, label_axes, legend

B, H, T, D = 64, 16, 1024, 64
NAMES = ("naive", "flash", "sdpa-flash")
DIRECTIONS = ("forward", "backward")
# Rows of a query tile and of a key tile. Fewer than 64 queries do not fill a warpgroup's matrix instruction.
BLOCK_SIZES = ((32, 32), (64, 32), (64, 64), (64, 128), (128, 64), (128, 128))
# The counters that ncu sums over a pass's kernels.
METRICS = {"read": "dram__bytes_read.sum", "written": "dram__bytes_write.sum"}
# Products of T x T x D in a pass. FlashAttention's backward recomputes q k^T once; ours has two kernels that both do.
PRODUCTS = {"naive": (2, 4), "flash": (2, 7), "sdpa-flash": (2, 5)}


def problem() -> Problem:
    """GPT-2 medium's attention without a mask, as in the paper."""
    return Problem(B, H, T, D, "full", 0.0, torch.bfloat16, torch.device("cuda"))


def calls(name: str, direction: str) -> Callable[[], Call]:
    """A function that prepares one pass, for `interleaved`."""
    sizes = problem()
    (q, k, v), do = sizes.tensors()
    # Plain Triton's kernels on every GPU: their block sizes and products are those counted here.
    build = (
        from_registry(AttentionConfig("flash", path=KernelPath.plain)) if name == "flash" else candidates()[name].build
    )
    attend = build(sizes)

    def prepare() -> Call:
        if direction == "forward":
            return lambda: attend(q, k, v)
        out = attend(q, k, v)
        return lambda: torch.autograd.grad(out, (q, k, v), do)

    return prepare


def forward_in_blocks(blocks: Blocks) -> Callable[[], Call]:
    """The forward kernel with tiles of a given size."""
    inputs, _ = problem().tensors()
    q, k, v = (x.detach() for x in inputs)
    out = torch.empty_like(q)
    call = KernelCall(Spec(Score(causal=False), scale=1 / math.sqrt(D)), Inputs())
    return lambda: lambda: forward(q, k, v, out, call, blocks)


def preparation(name: str, direction: str) -> Callable[[], Call]:
    """The pass that a child process measures: an implementation by name, or a block size such as 64x128."""
    rows, times, columns = name.partition("x")
    if times and rows.isdigit():
        return forward_in_blocks(blocks_of(int(rows), int(columns)))
    return calls(name, direction)


def blocks_of(q: int, k: int) -> Blocks:
    """The block sizes, with eight warps for large tiles and four for others."""
    return Blocks(q, k, 8 if q >= 128 and k >= 128 else 4, 2)


def run_profiled(name: str, direction: str) -> None:
    """The work of a child process: one pass between the marks that ncu waits for."""
    prepare = preparation(name, direction)
    prepare()()
    torch.cuda.synchronize()
    call = prepare()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    call()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def bytes_moved(name: str, direction: str) -> dict[str, float]:
    """Bytes read and written by a pass, over all of its kernels. Raises RuntimeError with ncu's message."""
    child = [sys.executable, "-m", "bench.attention.bytes_moved", "--profiled", name, direction]
    options = ["--profile-from-start", "off", "--clock-control", "none", "--csv", "--print-units", "base"]
    command = ["ncu", *options, "--metrics", ",".join(METRICS.values()), *child]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    table = done.stdout[done.stdout.find('"ID"') :]
    sums = dict.fromkeys(METRICS.values(), 0.0)
    for line in csv.DictReader(io.StringIO(table)):
        if line["Metric Name"] in sums:
            sums[line["Metric Name"]] += float(line["Metric Value"].replace(",", ""))
    if done.returncode or not any(sums.values()):
        raise RuntimeError(
            f"ncu gave no counters for {name} {direction}: {(done.stderr or done.stdout)[-400:].strip()}"
        )
    return {kind: sums[metric] for kind, metric in METRICS.items()}


def measure() -> list[Row]:
    """All passes and block sizes."""
    device = torch.device("cuda")
    passes = [(name, direction) for direction in DIRECTIONS for name in NAMES]
    passes += [(f"{q}x{k}", "forward") for q, k in BLOCK_SIZES]
    moved = {}
    for name, direction in passes:
        moved[name, direction] = bytes_moved(name, direction)
        print(f"{name:12}{direction:10}{sum(moved[name, direction].values()) / 1e9:8.2f} GB", flush=True)
    times: dict[tuple[str, str], Timing | Exception] = {}
    for direction in DIRECTIONS:
        names = [name for name, way in passes if way == direction]
        times |= {
            (name, direction): timing
            for name, timing in interleaved({n: preparation(n, direction) for n in names}, device, 0.3).items()
        }
        release(device)
    rows = []
    for name, direction in passes:
        timing = times[name, direction]
        if isinstance(timing, Exception):
            raise timing
        q, _, k = name.partition("x") if name[0].isdigit() else ("", "", "")
        products = PRODUCTS["flash" if q else name][DIRECTIONS.index(direction)]
        row: Row = {"name": "flash" if q else name, "direction": direction, "ms": timing.ms}
        row |= {f"gb_{kind}": moved[name, direction][kind] / 1e9 for kind in METRICS}
        row["gflop"] = products * 2 * B * H * T * T * D / 1e9
        rows.append(row | ({"block_q": int(q), "block_k": int(k)} if q else {}))
    return rows


def gigabytes(row: Row) -> float:
    """Bytes read and written, in GB."""
    return float(row["gb_read"] + row["gb_written"])


def table(rows: Sequence[Row]) -> str:
    """The rows for people."""
    lines = [f"{'':24}{'GFLOP':>9}{'GB read':>9}{'written':>9}{'ms':>9}"]
    for row in rows:
        name = f"{row['name']} {row['direction']}"
        name += f" {row['block_q']} x {row['block_k']}" if row.get("block_q") else ""
        lines.append(f"{name:24}{row['gflop']:>9.0f}{row['gb_read']:>9.2f}{row['gb_written']:>9.2f}{row['ms']:>9.3f}")
    return "\n".join(lines)


def draw(figure: Figure, palette: Palette, rows: Sequence[Row]) -> None:
    """Bytes of each implementation on the left; time and bytes over the block size on the right."""
    passes, blocks = [row for row in rows if not row.get("block_q")], [row for row in rows if row.get("block_q")]
    bars, lines = figure.subplots(1, 2)
    names = [f"{row['name']}\n{row['direction']}" for row in passes]
    moved = [gigabytes(row) for row in passes]
    bars.barh(names, moved, color=[palette[row["name"].partition("-")[0]] for row in passes], height=0.6)
    for n, gb in enumerate(moved):
        bars.annotate(
            f"{gb:.3g}", (gb, n), xytext=(3, 0), textcoords="offset points", va="center", color=palette["ink"]
        )
    bars.invert_yaxis()
    bars.set_xlim(0, 1.25 * max(moved))
    label_axes(bars, palette, "GB moved")
    sizes = [f"{row['block_q']}\n{row['block_k']}" for row in blocks]
    lines.plot(sizes, [row["ms"] for row in blocks], marker="o", color=palette["flash"], label="ms")
    lines.plot(sizes, [gigabytes(row) for row in blocks], marker="s", color=palette["other-0"], label="GB moved")
    lines.set_ylim(0, None)
    label_axes(lines, palette, "flash, forward", "queries and keys of a block")
    legend(figure, lines, palette)


def chart(rows: Sequence[Row]) -> Chart:
    """The figure of a result file's rows."""
    return Chart("bytes", "Bytes that attention moves", "", partial(draw, rows=rows), height=4.0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write bench/results/bytes-<device>.json."""
    parser = command_line("bench.attention.bytes_moved", __doc__, "bytes")
    parser.add_argument("--profiled", nargs=2, metavar=("NAME", "DIRECTION"), help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    require_gpu(parser)
    if args.profiled:
        run_profiled(*args.profiled)
        return
    if shutil.which("ncu") is None:
        parser.error("this benchmark needs ncu, NVIDIA's kernel profiler, on the PATH")
    device = torch.device("cuda")
    path = result_file(args.name, device_name(device), args.results)
    now = measurement(command_of(parser, arguments), device)
    with Recorder(path, ("name", "direction", "block_q", "block_k"), now) as recorder:
        rows = measure()
        recorder.add(*rows)
    print(table(rows))
    print(f"results: {path}")


if __name__ == "__main__":
    main()
