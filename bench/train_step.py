"""The speed and memory of whole training steps: the recipe compared with nanoGPT.

    python -m bench.train_step                                       all of the table, about 25 minutes on an H200
    python -m bench.train_step --attention flash --shapes 32x1024    some of it; other rows of the same software stay
    python -m bench.train_step -- training.recompute=block           further overrides for train.py: another column

Every cell is a run of train.py in a separate process: 124M parameters and 32,768 tokens per step, with data loading,
logging and clipping. The median step counts. Running out of memory is a result. Rows go to
bench/results/train-step-<device>.json after each cell, and tables beside it, without dropout and with. Runs at the same
time need a folder each (--results). nanoGPT's figures come from `python -m bench.nanogpt` on the same kind of device.
"""

import json
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from bench.attention.__main__ import positive, rate
from bench.machine import ROOT, device_name, require_gpu
from bench.nanogpt import DROPOUTS, SHAPES, batch_and_length
from bench.record import Recorder, Row, command_line, pivot, read, recording, result_file, write_table

ATTENTIONS = ("flash", "sdpa", "naive")
IDENTITY = ("attention", "shape", "dropout", "extra")
NANOGPT = "nanoGPT"
OUTPUT_LINES = 40  # of a run that failed, which become its message
SHOWN = (
    "status", "message", "tokens_per_s", "step_ms", "data_ms", "mfu_full", "mfu_causal", "wall_s",
    "peak_allocated_gib", "peak_reserved_gib",
)  # fmt: skip


def overrides(attention: str, shape: str, dropout: float, steps: int, model: str = "gpt2") -> list[str]:
    """The overrides of train.py for one cell."""
    batch, seq_len = shape.split("x")
    given = [
        f"model={model}", f"attention={attention}", f"seq_len={seq_len}", f"training.batch_size={batch}",
        f"attention.dropout={dropout}", f"model.dropout={dropout}", "data.tokenizer=gpt2", "training.compile=true",
        f"training.steps={steps}", "schedule.warmup_steps=10", "training.log_every=10", "training.eval_every=0",
        "training.checkpoint_every=0", "training.sample_tokens=0",
    ]  # fmt: skip
    if attention == "sdpa" and dropout:
        given.append("attention.rng=torch")  # sdpa cannot replay the project's masks
    return given


def measure(cell: Row, steps: int) -> Row:
    """Run one cell and return it with its measurements."""
    asked = overrides(cell["attention"], cell["shape"], cell["dropout"], steps)
    with tempfile.TemporaryDirectory() as folder:
        return cell | train([*asked, *cell["extra"]], Path(folder))


def train(overrides: Sequence[str], folder: Path, ranks: Sequence[str] = ()) -> Row:
    """Run train.py in a run folder, and show its output as it comes. Returns its recorded results, of which a run whose
    model did not fit into memory lacks most, or {"status": "failed", "message": ...}.

    ranks  what starts it on several: the arguments of Python before the script
    """
    command = [sys.executable, "-u", *ranks, "train.py", *overrides, f"hydra.run.dir={folder}"]
    tail: deque[str] = deque(maxlen=OUTPUT_LINES)
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout
        for line in process.stdout:
            print(f"    {line}", end="", flush=True)
            tail.append(line)
    if not (folder / "summary.json").exists():
        return {"status": "failed", "message": "".join(tail).strip()[-2000:]}
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    row: Row = {"status": summary["status"], "message": summary.get("message"), "wall_s": summary.get("wall_time_s")}
    row |= {name.split("/")[1]: value for kind in ("median", "peak") for name, value in summary.get(kind, {}).items()}
    return {name: row[name] for name in SHOWN if row.get(name) is not None}


def measure_all(cells: Sequence[Row], recorder: Recorder, measure: Callable[[Row], Row]) -> int:
    """Measure each cell, print it, and record it. Returns 1 if a cell failed."""
    failed = False
    for n, cell in enumerate(cells, 1):
        name = " ".join(str(cell[field]) for field in recorder.identity if cell.get(field))
        print(f"[{n}/{len(cells)}] {name}", flush=True)
        row = measure(cell)
        print(f"[{n}/{len(cells)}] {name}: {result(row)}", flush=True)
        if row["status"] == "failed":
            print(row["message"])
            failed = True
        else:
            recorder.add(row)
    return int(failed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the cells that were asked for, printing each. Returns 1 if one failed."""
    parser = command_line("bench.train_step", __doc__, "train-step")
    parser.add_argument("--attention", nargs="+", default=ATTENTIONS, choices=ATTENTIONS)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, type=batch_and_length, metavar="BATCHxSEQ_LEN")
    parser.add_argument("--dropout", nargs="+", default=DROPOUTS, type=rate, metavar="P")
    parser.add_argument("--steps", default=60, type=positive)
    parser.add_argument("overrides", nargs="*", help="for train.py, after --")
    args = parser.parse_args(arguments)
    require_gpu(parser)
    cells = [
        {"attention": attention, "shape": shape, "dropout": dropout, "extra": args.overrides}
        for attention, dropout, shape in product(args.attention, args.dropout, args.shapes)
    ]
    device = torch.device("cuda")
    with recording(args, arguments, IDENTITY, device) as recorder:
        failed = measure_all(cells, recorder, partial(measure, steps=args.steps))
    theirs = result_file("nanogpt", device_name(device), args.results)
    path = recorder.path
    rows = read(path)
    for dropout in sorted({row["dropout"] for row in rows}):
        file = result_file(args.name + ("-dropout" if dropout else ""), device_name(device), args.results)
        write_table(file.with_suffix(".md"), table(rows, read(theirs), dropout), path, theirs)
    print(f"results: {path}")
    return failed


def column(row: Row) -> str:
    """The name of a row in tables: its attention and further overrides."""
    return " ".join([row["attention"], *(override.removeprefix("training.") for override in row["extra"])])


def length(row: Row) -> int:
    """Tokens of a sequence."""
    return int(row["shape"].split("x")[1])


def result(row: Row) -> str:
    """Thousand tokens/s and the GiB at the peak, or the reason why there are none."""
    if row["status"] != "completed":
        return str(row["status"]).replace("_", " ")
    return f"{row['tokens_per_s'] / 1e3:,.0f} ({row['peak_allocated_gib']:.1f})"


def table(rows: Sequence[Row], theirs: Sequence[Row], dropout: float) -> str:
    """A line for each shape, a column for nanoGPT and each of this project's steps, at one dropout rate."""
    shown = [row for row in rows if row["dropout"] == dropout]
    shapes, order = {row["shape"] for row in shown}, (NANOGPT, *ATTENTIONS)
    of_nano = {"attention": NANOGPT, "extra": []}
    nano = [row | of_nano for row in theirs if row["shape"] in shapes and row["dropout"] == dropout]
    together = sorted([*nano, *shown], key=lambda row: (length(row), order.index(row["attention"]), column(row)))
    return pivot(
        together,
        lambda row: f"{row['shape'].split('x')[0]} x {length(row):,}",
        column,
        result,
        corner=f"dropout {dropout:g}: thousand tokens/s (GiB)",
    )


if __name__ == "__main__":
    sys.exit(main())
