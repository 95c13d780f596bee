"""The speed and memory of whole training steps: the recipe compared with nanoGPT.

    python -m bench.train_step                                       all of the table, about 25 minutes on an H200
    python -m bench.train_step --attention flash --shapes 32x1024    some of it; other rows of the same software stay
    python -m bench.train_step --recompute attention block --shapes 4x8192 --attention flash --dropout 0
    python -m bench.train_step --profile ...                         and where the time of each step goes
    python -m bench.train_step --gpus 4 ...                          on four GPUs: another column
    python -m bench.train_step -- training.residual_in_fp32=false    further overrides for train.py: another column
    python -m bench.train_step --plot-only a.json b.json             nothing measured: one result of several, drawn

Every cell is a run of train.py in a process of its own: 124M parameters and 32,768 tokens per step, with data loading,
logging and clipping. The median step counts. Running out of memory is a result. Results go to
bench/results/train_step-<device>.json after each cell, and the figures are drawn beside it at the end. Runs at the same
time need a folder each (--results); --plot-only joins what they wrote. nanoGPT's figures are those that
`python -m bench.nanogpt` measured on the same kind of device: bench/results/nanogpt-<device>.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench import nanogpt
from bench.attention import positive, rate
from bench.attention_views import over_lengths
from bench.measure import RESULTS, ROOT, require_gpu, slug, write
from bench.nanogpt import DROPOUTS, SHAPES, batch_and_length
from recipe.drawing import Chart, Palette, label_axes, legend, render_png, styles

ATTENTIONS = ("flash", "sdpa", "naive")

Row = dict[str, Any]
NanoGPT = dict[tuple[str, float], Row]  # by shape and dropout


def overrides(attention: str, shape: str, dropout: float, recompute: str, steps: int) -> list[str]:
    """The overrides of train.py for one cell."""
    batch, seq_len = shape.split("x")
    given = [
        "model=gpt2", f"attention={attention}", f"seq_len={seq_len}", f"training.batch_size={batch}",
        f"attention.dropout={dropout}", f"model.dropout={dropout}", "data.tokenizer=gpt2", "training.compile=true",
        f"training.recompute={recompute}", f"training.steps={steps}", "schedule.warmup_steps=10",
        "training.log_every=10", "training.eval_every=0",
        "training.checkpoint_every=0", "training.sample_tokens=0",
    ]  # fmt: skip
    if attention == "sdpa" and dropout:
        given.append("attention.rng=torch")  # which cannot replay its masks
    return given


def measure(wanted: Row, steps: int) -> Row:
    """Run one cell and return it with what was measured."""
    given = overrides(wanted["attention"], wanted["shape"], wanted["dropout"], wanted["recompute"], steps)
    with tempfile.TemporaryDirectory() as folder:
        ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus(wanted)}"]
        start = [sys.executable, *(ranks if gpus(wanted) > 1 else []), "train.py"]
        command = [*start, *given, *wanted["extra"], f"hydra.run.dir={folder}"]
        begin = time.monotonic()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        wall = time.monotonic() - begin
        try:
            summary = json.loads((Path(folder) / "summary.json").read_text())
        except OSError:
            return wanted | {"status": "failed", "message": (done.stderr.strip() or done.stdout.strip())[-2000:]}
        table = Path(folder) / "profile" / "table.txt"
        row = wanted | {
            "status": summary["status"],
            "message": summary["message"],
            **{name.split("/")[1]: value for name, value in (summary["median"] | summary["peak"]).items()},
            "wall_s": round(wall, 1),
            "device": summary["device"]["name"],
            "versions": summary["versions"],
            "commit": summary["git"]["commit"],
            "dirty": summary["git"]["dirty"],
            "measured": summary["finished"],
        }
        return row | ({"profile": table.read_text()} if table.exists() else {})


def key(row: Row) -> tuple[Any, ...]:
    """The identity of a measurement: a new row replaces the one with the same key."""
    return (row["attention"], row["shape"], row["dropout"], row["recompute"], *row["extra"], *several(row))


def column(row: Row) -> str:
    """The name of a row in tables and legends: its attention, further overrides and the number of GPUs."""
    given = (override.removeprefix("training.") for override in row["extra"])
    return " ".join([row["attention"], *given, *several(row)])


def gpus(row: Row) -> int:
    """The number of GPUs that trained, each with the row's batch size."""
    return row.get("gpus", 1)


def several(row: Row) -> list[str]:
    """The words for a row of more than one GPU; none for one."""
    return [f"on {gpus(row)} GPUs"] if gpus(row) > 1 else []


def columns(rows: Iterable[Row]) -> list[str]:
    """Their names, ours first."""
    return sorted({column(row) for row in rows}, key=lambda name: (ATTENTIONS.index(name.split(" ")[0]), name))


def result(row: Row) -> str:
    """tokens/s and peak memory, or why there are none."""
    if row["status"] == "completed":
        return cell(row["tokens_per_s"], row.get("peak_allocated_gib"))
    return str(row["status"]).replace("_", " ")


def cell(speed: float, gib: float | None) -> str:
    """tokens/s (GiB)."""
    return f"{speed:,.0f} ({gib:.1f})" if gib else f"{speed:,.0f}"


def table(rows: Sequence[Row], theirs: NanoGPT) -> str:
    """Markdown: a row for each shape, dropout and recomputation, a column for nanoGPT and each implementation."""
    names = columns(rows)
    head = ["batch x seq_len", "dropout", "recompute", "nanoGPT", *names, "flash / nanoGPT", "MFU of flash"]
    lines = [head, ["---"] * len(head)]
    found = {(column(row), row["shape"], row["dropout"], row["recompute"]): row for row in rows}
    for shape, dropout, recompute in sorted(
        {k[1:] for k in found}, key=lambda k: (k[1], int(k[0].split("x")[1]), k[2] != "none", k[2])
    ):
        row = {name: found.get((name, shape, dropout, recompute)) for name in names}
        flash = row.get("flash") or {}
        nano = theirs.get((shape, dropout)) if recompute == "none" else None
        speed, mfu = flash.get("tokens_per_s"), flash.get("mfu_causal")
        lines.append(
            [
                shape.replace("x", " x "), f"{dropout:g}", recompute,
                result(nano) if nano else "",
                *(result(one) if one else "" for one in row.values()),
                f"{speed / nano['tokens_per_s']:.2f}" if speed and nano and "tokens_per_s" in nano else "",
                f"{100 * mfu:.0f} %" if mfu else "",
            ]
        )  # fmt: skip
    return "tokens/s (GiB at the peak)\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def nanogpt_beside(rows: Sequence[Row]) -> NanoGPT:
    """nanoGPT's rows on the device of `rows`, by shape and dropout; none where it was not measured there."""
    devices = {row["device"] for row in rows if "device" in row}
    return nanogpt.read(RESULTS, devices.pop()) if len(devices) == 1 else {}


def length(row: Row) -> int:
    """Tokens of a sequence."""
    return int(row["shape"].split("x")[1])


def other_attention(row: Row) -> bool:
    """Whether further overrides change which keys are seen, so that the figures' comparison leaves the row out."""
    return any(override.startswith(("score", "data.documents=")) for override in row["extra"])


def draw(figure: Figure, palette: Palette, rows: Sequence[Row], theirs: Sequence[Row]) -> None:
    """Tokens/s and peak memory over sequence length, nanoGPT's dashed."""
    speed, memory = figure.subplots(1, 2)
    names = columns(rows)
    styled = styles([*names, "nanoGPT"], palette)
    for name in names:
        style = styled[name]
        look = {"color": style.colour, "linestyle": style.line, "marker": style.marker, "ms": 5, "lw": 1.8}
        curves(speed, memory, [r for r in rows if column(r) == name], name, look)
    if theirs:
        curves(speed, memory, theirs, "nanoGPT", {"color": palette["muted"], "linestyle": "--", "lw": 1.4})
    for axes, title in ((speed, "thousand tokens/s"), (memory, "GiB at the peak")):
        label_axes(axes, palette, title, "seq_len")
        over_lengths(axes, sorted({length(row) for row in (*rows, *theirs)}))
        axes.set_ylim(bottom=0)
    legend(figure, speed, palette)


def curves(speed: Axes, memory: Axes, rows: Sequence[Row], label: str, look: dict[str, Any]) -> None:
    """One line of each figure: the rows that completed, from short to long."""
    done = sorted((row for row in rows if row["status"] == "completed"), key=length)
    lengths = [length(row) for row in done]
    speed.plot(lengths, [row["tokens_per_s"] / 1e3 for row in done], label=label, **look)
    memory.plot(lengths, [row.get("peak_allocated_gib", 0) for row in done], **look)


def read(path: Path) -> dict[tuple[Any, ...], Row]:
    """The rows of an earlier result by their keys."""
    return {key(row): row for row in json.loads(path.read_text())}


def save(rows: Iterable[Row], path: Path) -> None:
    """Write the rows as JSON."""
    write(path, json.dumps(sorted(rows, key=lambda row: [str(part) for part in key(row)]), indent=1) + "\n")


def publish(rows: Sequence[Row], path: Path) -> None:
    """Write the rows to `path`, draw a figure for each dropout beside it, and print the table."""
    save(rows, path)
    theirs = nanogpt_beside(rows)
    print(table(rows, theirs))
    for dropout in DROPOUTS:
        shown = [r for r in rows if r["dropout"] == dropout and r["recompute"] == "none" and not other_attention(r)]
        if any(row["status"] == "completed" for row in shown):
            chart = Chart(
                f"train-step-dropout-{dropout:g}",
                f"Training GPT-2 (124M), 32,768 tokens per step, dropout {dropout:g}",
                "Median of the steps of a run; nanoGPT by its own benchmark.",
                partial(draw, rows=shown, theirs=[row for row in theirs.values() if row["dropout"] == dropout]),
            )
            path.with_name(f"{path.stem}-dropout-{dropout:g}.png").write_bytes(render_png(chart, dark=False))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the cells that were asked for, printing each. Returns 1 if one failed."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.train_step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--attention", nargs="+", default=ATTENTIONS, choices=ATTENTIONS)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, type=batch_and_length, metavar="BATCHxSEQ_LEN")
    parser.add_argument("--dropout", nargs="+", default=DROPOUTS, type=rate, metavar="P")
    parser.add_argument("--recompute", nargs="+", default=["none"], choices=["none", "attention", "block"])
    parser.add_argument("--steps", default=60, type=positive)
    parser.add_argument("--gpus", default=1, type=positive, metavar="N", help="on each the whole shape; another column")
    parser.add_argument("--profile", action="store_true", help="where the time goes, without replaying CUDA graphs")
    parser.add_argument("--results", default=RESULTS, type=Path, help="folder for the JSON and the figures")
    parser.add_argument(
        "--plot-only",
        nargs="+",
        type=Path,
        metavar="JSON",
        help="earlier results of one device; the last file prevails",
    )
    parser.add_argument("overrides", nargs="*", help="for train.py, after --")
    args = parser.parse_args(arguments)
    if args.plot_only:
        missing = [str(path) for path in args.plot_only if not path.is_file()]
        if missing:
            parser.error(f"--plot-only: there is no file {', '.join(missing)}")
        rows = {k: row for path in args.plot_only for k, row in read(path).items()}
        devices = {row["device"] for row in rows.values() if "device" in row}
        if len(devices) != 1:
            parser.error(f"--plot-only takes results of one device, not of {', '.join(sorted(devices)) or 'none'}")
        publish(list(rows.values()), result_file(args.results, *devices))
        return 0

    require_gpu(parser)
    # A profiled step launches its kernels one by one and is slower: it has its own row.
    extra = [*args.overrides, *(["training.profile=true"] if args.profile else [])]
    cells = [
        {"attention": attention, "shape": shape, "dropout": dropout, "recompute": recompute, "extra": extra}
        for attention in args.attention for dropout in args.dropout for shape in args.shapes
        for recompute in args.recompute
    ]  # fmt: skip
    if args.gpus > 1:
        cells = [cell | {"gpus": args.gpus} for cell in cells]
    return measure_all(
        cells, result_file(args.results, torch.cuda.get_device_name()), partial(measure, steps=args.steps)
    )


def measure_all(cells: Sequence[Row], path: Path, measure: Callable[[Row], Row]) -> int:
    """Measure each cell, print it, and write the results to `path`. Returns 1 if a cell failed."""
    rows = read(path) if path.exists() else {}
    failed = False
    for n, wanted in enumerate(cells, 1):
        row = measure(wanted)
        print(f"[{n}/{len(cells)}] {' '.join(map(str, key(row)))}: {result(row)}", flush=True)
        print(row.get("profile") or row.get("message") or "", end="\n" if row["status"] == "failed" else "")
        if row["status"] == "failed":
            failed = True
            continue
        # Figures of other software versions cannot be compared with this one.
        rows = {k: old for k, old in rows.items() if old.get("versions") == row["versions"]} | {key(row): row}
        save(rows.values(), path)
    if rows:
        publish(list(rows.values()), path)
    return int(failed)


def result_file(folder: Path, device: str) -> Path:
    """The path of the results on a device."""
    return folder / f"train_step-{slug(device)}.json"


if __name__ == "__main__":
    sys.exit(main())
