"""The speed and memory of whole training steps: the recipe compared with nanoGPT.

    python -m bench.train_step                                       all of the table, about 25 minutes on an H200
    python -m bench.train_step --attention flash --shapes 32x1024    some of it; other rows of the same software stay
    python -m bench.train_step --recompute attention block --shapes 4x8192 --attention flash --dropout 0
    python -m bench.train_step ... -- training.profile=true          and where the time of each step goes
    python -m bench.train_step --gpus 1 4 ...                        on one GPU and on four: another column
    python -m bench.train_step -- training.residual_in_fp32=false    further overrides for train.py: another column

Every cell is a run of train.py in a separate process: 124M parameters and 32,768 tokens per step, with data loading,
logging and clipping. The median step counts. Running out of memory is a result. Rows go to
bench/results/train-step-<device>.json after each cell, and tables beside it, without dropout and with. Runs at the same
time need a folder each (--results). nanoGPT's figures come from `python -m bench.train_step.nanogpt` on the same kind
of device.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path

import torch

from bench.attention.__main__ import positive, rate
from bench.machine import device_name, require_gpu
from bench.record import Recorder, Row, command_line, command_of, measurement, read, result_file, write_table
from bench.runs import train
from bench.train_step.nanogpt import DROPOUTS, SHAPES, batch_and_length
from bench.train_step.views import ATTENTIONS, IDENTITY, gpus, result, table
from model.options import Recompute

SHOWN = (
    *("status", "message", "tokens_per_s", "step_ms", "data_ms", "mfu_full", "mfu_causal", "wall_s"),
    *("peak_allocated_gib", "peak_reserved_gib"),
)


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
        given.append("attention.rng=torch")  # sdpa cannot replay the project's masks
    return given


def measure(wanted: Row, steps: int) -> Row:
    """Run one cell and return it with its measurements."""
    given = overrides(wanted["attention"], wanted["shape"], wanted["dropout"], wanted["recompute"], steps)
    with tempfile.TemporaryDirectory() as folder:
        summary = train([*given, *wanted["extra"]], Path(folder), gpus(wanted))
        row = wanted | {name: summary[name] for name in SHOWN if name in summary}
        profile = Path(folder) / "profile" / "table.txt"
        return row | ({"profile": profile.read_text()} if profile.exists() else {})


def measure_all(cells: Sequence[Row], recorder: Recorder, measure: Callable[[Row], Row]) -> int:
    """Measure each cell, print it, and record it. Returns 1 if a cell failed."""
    failed = False
    for n, wanted in enumerate(cells, 1):
        name = " ".join(str(wanted[field]) for field in IDENTITY if wanted.get(field))
        print(f"[{n}/{len(cells)}] {name}", flush=True)
        row = measure(wanted)
        print(f"[{n}/{len(cells)}] {name}: {result(row)}", flush=True)
        print(row.get("profile") or row.get("message") or "", end="\n" if row["status"] == "failed" else "")
        if row["status"] == "failed":
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
    parser.add_argument("--recompute", nargs="+", default=["none"], choices=[kind.value for kind in Recompute])
    parser.add_argument("--steps", default=60, type=positive)
    parser.add_argument(
        "--gpus", nargs="+", default=[1], type=positive, metavar="N", help="numbers of GPUs, each with the whole shape"
    )
    parser.add_argument("overrides", nargs="*", help="for train.py, after --")
    args = parser.parse_args(arguments)
    require_gpu(parser)
    cells = [
        {"attention": attention, "shape": shape, "dropout": dropout, "recompute": recompute, "extra": args.overrides}
        | ({"gpus": count} if count > 1 else {})
        for attention, dropout, shape, recompute, count in product(
            args.attention, args.dropout, args.shapes, args.recompute, args.gpus
        )
    ]
    device = torch.device("cuda")
    path = result_file(args.name, device_name(device), args.results)
    with Recorder(path, IDENTITY, measurement(command_of(parser, arguments), device)) as recorder:
        failed = measure_all(cells, recorder, partial(measure, steps=args.steps))
    theirs = result_file("nanogpt", device_name(device), args.results)
    rows = read(path)
    for dropout in sorted({row["dropout"] for row in rows}):
        file = result_file(args.name + ("-dropout" if dropout else ""), device_name(device), args.results)
        write_table(file.with_suffix(".md"), table(rows, read(theirs), dropout), path, theirs)
    print(f"results: {path}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
