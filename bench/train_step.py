"""The speed and memory of whole training steps: the recipe itself, beside nanoGPT.

    python -m bench.train_step                                       all of the table, about 25 minutes on an H200
    python -m bench.train_step --attention flash --shapes 32x1024    some of it; other rows of the same software stay
    python -m bench.train_step --recompute attention block --shapes 4x8192 --attention flash --dropout 0
    python -m bench.train_step --profile ...                         and where the time of each step goes
    python -m bench.train_step -- training.residual_in_fp32=false    further overrides for train.py: another column
    python -m bench.train_step --plot-only a.json b.json             nothing measured: one result of several, drawn

Every cell is a run of train.py in a process of its own, with its data loading, logging and clipping, in 124M
parameters and 32,768 tokens a step, of which the median step counts. Running out of memory is a result. Results go
to bench/results/train_step-<device>.json, which is written after each cell, and are drawn beside it at the end. Runs
at the same time need a folder each (--results); --plot-only joins what they wrote.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from bench.attention import positive, rate
from bench.attention_views import over_lengths
from bench.measure import RESULTS, ROOT, slug, write
from report.draw import Chart, Palette, dress, legend, render_png, render_svg, standalone_svg, styles

SHAPES = ("32x1024", "16x2048", "8x4096", "4x8192", "2x16384")
ATTENTIONS = ("flash", "sdpa", "naive")
DROPOUTS = (0.0, 0.1)

# nanoGPT's own bench.py (124M parameters, torch.compile, SDPA, no data loading) on one NVIDIA H200 with torch 2.11:
# sequence length -> tokens/s without and with dropout 0.1 (attention and residual), and peak memory in GiB.
NANOGPT_DEVICE = "NVIDIA H200"
NANOGPT = {
    1024: (514_000, 478_000, 21.3),
    2048: (474_000, 428_000, 21.3),
    4096: (413_000, 355_000, 21.3),
    8192: (331_000, 262_000, 21.4),
    16384: (239_000, 174_000, 21.5),
}

Row = dict[str, Any]


def overrides(attention: str, shape: str, dropout: float, recompute: str, steps: int) -> list[str]:
    """What train.py is told for one cell."""
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
        command = [sys.executable, "train.py", *given, *wanted["extra"], f"hydra.run.dir={folder}"]
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
    """What makes two rows the same measurement."""
    return (row["attention"], row["shape"], row["dropout"], row["recompute"], *row["extra"])


def contestant(row: Row) -> str:
    """What a row is called in tables and legends: its attention, and what else it was told."""
    return " ".join([row["attention"], *(override.removeprefix("training.") for override in row["extra"])])


def contestants(rows: Iterable[Row]) -> list[str]:
    """Their names, ours first."""
    return sorted({contestant(row) for row in rows}, key=lambda name: (ATTENTIONS.index(name.split(" ")[0]), name))


def result(row: Row) -> str:
    """tokens/s and peak memory, or why there are none."""
    if row["status"] == "completed":
        return cell(row["tokens_per_s"], row.get("peak_allocated_gib"))
    return str(row["status"]).replace("_", " ")


def cell(speed: float, gib: float | None) -> str:
    """tokens/s (GiB)."""
    return f"{speed:,.0f} ({gib:.1f})" if gib else f"{speed:,.0f}"


def table(rows: Sequence[Row]) -> str:
    """Markdown: a row for each shape, dropout and recomputation, the implementations beside nanoGPT."""
    names = contestants(rows)
    head = ["batch x seq_len", "dropout", "recompute", "nanoGPT", *names, "flash / nanoGPT", "MFU of flash"]
    lines = [head, ["---"] * len(head)]
    found = {(contestant(row), row["shape"], row["dropout"], row["recompute"]): row for row in rows}
    for shape, dropout, recompute in sorted(
        {k[1:] for k in found}, key=lambda k: (k[1], int(k[0].split("x")[1]), k[2] != "none", k[2])
    ):
        row = {name: found.get((name, shape, dropout, recompute)) for name in names}
        flash, T = row.get("flash") or {}, int(shape.split("x")[1])
        on_same = any(one and one.get("device") == NANOGPT_DEVICE for one in row.values())
        nanogpt = nanogpt_speed(shape, dropout) if on_same and recompute == "none" else 0
        speed, mfu = flash.get("tokens_per_s"), flash.get("mfu_causal")
        lines.append(
            [
                shape.replace("x", " x "), f"{dropout:g}", recompute,
                cell(nanogpt, NANOGPT[T][2]) if nanogpt else "",
                *(result(one) if one else "" for one in row.values()),
                f"{speed / nanogpt:.2f}" if speed and nanogpt else "", f"{100 * mfu:.0f} %" if mfu else "",
            ]
        )  # fmt: skip
    return "tokens/s (GiB at the peak)\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def nanogpt_speed(shape: str, dropout: float) -> int:
    """nanoGPT's tokens/s, 0 where it was not measured."""
    if shape not in SHAPES or dropout not in DROPOUTS:
        return 0
    without, with_dropout, _ = NANOGPT[int(shape.split("x")[1])]
    return with_dropout if dropout else without


def draw(figure: Figure, palette: Palette, rows: Sequence[Row], dropout: float) -> None:
    """Tokens/s and peak memory over sequence length."""
    speed, memory = figure.subplots(1, 2)
    names = contestants(rows)
    styled = styles([*names, "nanoGPT"], palette)
    for name in names:
        done = [r for r in rows if contestant(r) == name and r["status"] == "completed"]
        done.sort(key=lambda r: int(r["shape"].split("x")[1]))
        T, style = [int(r["shape"].split("x")[1]) for r in done], styled[name]
        look: dict[str, Any] = {"color": style.colour, "linestyle": style.line, "marker": style.marker}
        look |= {"markersize": 5, "linewidth": 1.8}
        speed.plot(T, [r["tokens_per_s"] / 1e3 for r in done], label=name, **look)
        memory.plot(T, [r.get("peak_allocated_gib", 0) for r in done], **look)
    if any(row.get("device") == NANOGPT_DEVICE for row in rows):
        look = {"color": palette["muted"], "linestyle": "--", "linewidth": 1.4}
        speeds = [nanogpt_speed(shape, dropout) / 1e3 for shape in SHAPES]
        speed.plot(list(NANOGPT), speeds, label="nanoGPT", **look)
        memory.plot(list(NANOGPT), [peak for *_, peak in NANOGPT.values()], **look)
    for axes, title in ((speed, "thousand tokens/s"), (memory, "GiB at the peak")):
        dress(axes, palette, title, "seq_len")
        over_lengths(axes, list(NANOGPT))
        axes.set_ylim(bottom=0)
    legend(figure, speed, palette)


def read(path: Path) -> dict[tuple[Any, ...], Row]:
    """The rows of an earlier result by their keys."""
    return {key(row): row for row in json.loads(path.read_text())}


def save(rows: Iterable[Row], path: Path) -> None:
    """Write the rows as JSON."""
    write(path, json.dumps(sorted(rows, key=lambda row: [str(part) for part in key(row)]), indent=1) + "\n")


def publish(rows: Sequence[Row], path: Path) -> None:
    """Write the rows to `path`, draw a figure for each dropout beside it, and print the table."""
    save(rows, path)
    print(table(rows))
    for dropout in DROPOUTS:
        shown = [r for r in rows if r["dropout"] == dropout and r["recompute"] == "none"]
        if any(row["status"] == "completed" for row in shown):
            chart = Chart(
                f"train-step-dropout-{dropout:g}",
                f"Training GPT-2 (124M), 32,768 tokens a step, dropout {dropout:g}",
                "Median of the steps of a run; nanoGPT by its own benchmark.",
                partial(draw, rows=shown, dropout=dropout),
            )
            stem = path.with_name(f"{path.stem}-dropout-{dropout:g}")
            stem.with_name(f"{stem.name}.png").write_bytes(render_png(chart, dark=False))
            write(stem.with_name(f"{stem.name}.svg"), standalone_svg(render_svg(chart)))


def batch_and_length(text: str) -> str:
    """A shape such as 32x1024."""
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text} is not a batch size and a sequence length, such as 32x1024")
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the cells that were asked for, printing each. Returns 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", nargs="+", default=ATTENTIONS, choices=ATTENTIONS)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, type=batch_and_length, metavar="BATCHxSEQ_LEN")
    parser.add_argument("--dropout", nargs="+", default=DROPOUTS, type=rate, metavar="P")
    parser.add_argument("--recompute", nargs="+", default=["none"], choices=["none", "attention", "block"])
    parser.add_argument("--steps", default=60, type=positive)
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

    # A profiled step is launched kernel by kernel, and slower: a measurement of its own.
    extra = [*args.overrides, *(["training.profile=true"] if args.profile else [])]
    cells = [
        {"attention": attention, "shape": shape, "dropout": dropout, "recompute": recompute, "extra": extra}
        for attention in args.attention for dropout in args.dropout for shape in args.shapes
        for recompute in args.recompute
    ]  # fmt: skip
    path = result_file(args.results, torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")
    rows = read(path) if path.exists() else {}
    failed = False
    for n, wanted in enumerate(cells, 1):
        row = measure(wanted, args.steps)
        print(f"[{n}/{len(cells)}] {' '.join(map(str, key(row)))}: {result(row)}", flush=True)
        print(row.get("profile") or row.get("message") or "", end="\n" if row["status"] == "failed" else "")
        if row["status"] == "failed":
            failed = True
            continue
        # What other software did does not stand beside this.
        rows = {k: old for k, old in rows.items() if old.get("versions") == row["versions"]} | {key(row): row}
        save(rows.values(), path)
    if rows:
        publish(list(rows.values()), path)
    return int(failed)


def result_file(folder: Path, device: str) -> Path:
    """Where the results of a device go."""
    return folder / f"train_step-{slug(device)}.json"


if __name__ == "__main__":
    sys.exit(main())
