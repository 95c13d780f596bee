"""Training on 1, 2 and 4 GPUs of one machine: its speed and memory, and whether it computes the same bits.

    python -m bench.several_gpus                               every case, on as many of 1, 2 and 4 GPUs as there are
    python -m bench.several_gpus --cases speed bits --gpus 4   some of them; other rows of the file stay

    speed     GPT-2 124M, 32 x 1,024 tokens per GPU
    bits      50 steps of 4 x 32 x 1,024 tokens, replicated and sharded: a digest of all losses and gradient norms
    eager     50 steps of 4 x 8 x 1,024 tokens, not compiled: likewise
    muon      the same with Muon
    quarter   one sequence of 262,144 tokens over all GPUs
    million   one of 1,048,576
    xl        GPT-2 XL, 16 x 1,024 tokens per GPU, sharded

Every cell is a run of train.py, by torchrun where it has several GPUs; the median step counts. A cell's row goes to
bench/results/several-gpus-<device>.json at its end, and a table beside it.
"""

import hashlib
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.machine import require_gpu
from bench.record import Row, command_line, pivot, read, recording, write_table
from bench.train_step import measure_all, overrides, result, train
from recipe.run.metrics import read_metrics

IDENTITY = ("kind", "name", "gpus")
KINDS = ("speed", "bits", "eager", "muon", "quarter", "million", "xl")
OF_BITS = ("bits", "eager", "muon")  # kinds whose step is the same on any number of GPUs
LONGEST = 2**20


def cases(gpus: int) -> list[Row]:
    """The cells measured on a number of GPUs, with their overrides for train.py."""
    bits = [*overrides("flash", "32x1024", 0.1, 50), "training.batch_tokens=131072", "training.log_every=1"]
    eager = [
        *overrides("flash", "8x1024", 0.1, 50), "training.batch_tokens=32768", "training.log_every=1",
        "training.compile=false",
    ]  # fmt: skip
    long = ["experiment=long_context", "attention=flash", "training.recompute=around_attention", "training.steps=5"]
    copies = {data: [f"parallel.data={data}"] for data in ("replicate", "shard")}
    of_kinds: dict[str, tuple[list[str], dict[str, list[str]]]] = {
        "speed": (overrides("flash", "32x1024", 0.1, 60), {"exact": []}),
        "bits": (bits, copies),
        "eager": (eager, copies),
        "muon": ([*eager, "optimizer=muon"], copies),
        "xl": (
            overrides("flash", "16x1024", 0.0, 20, model="gpt2-xl"),
            {"exact": ["parallel.data=shard"], "exact, gathered once": ["parallel.data=shard_grad_op"]},
        ),
    }
    for kind, length in {"quarter": LONGEST // 4, "million": LONGEST}.items():
        of_kinds[kind] = ([*long, f"seq_len={length}", f"parallel.context={gpus}"], {"heads": []})
    return [
        {"kind": kind, "name": name, "gpus": gpus, "overrides": [*of_kinds[kind][0], *further]}
        for kind in KINDS
        for name, further in of_kinds[kind][1].items()
    ]


def measure(cell: Row) -> Row:
    """Run one cell and return it with its measurements."""
    ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={cell['gpus']}"]
    with tempfile.TemporaryDirectory() as folder:
        row = cell | train(cell["overrides"], Path(folder), ranks if cell["gpus"] > 1 else [])
        if cell["kind"] in OF_BITS:
            steps = [
                [line["train/loss"], line["optim/grad_norm"]]
                for line in read_metrics(Path(folder, "metrics.jsonl"))
                if "train/loss" in line
            ]
            row["digest"] = hashlib.sha256(json.dumps(steps).encode()).hexdigest()
        return row


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the cases on each number of GPUs, and write their rows. Returns 1 if one failed."""
    parser = command_line("bench.several_gpus", __doc__, "several-gpus")
    parser.add_argument("--cases", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument(
        "--gpus", nargs="+", type=int, choices=(1, 2, 4), help="default: as far as this machine has them"
    )
    args = parser.parse_args(arguments)
    require_gpu(parser)
    numbers = args.gpus or [gpus for gpus in (1, 2, 4) if gpus <= torch.cuda.device_count()]
    cells = [cell for gpus in numbers for cell in cases(gpus) if cell["kind"] in args.cases]
    # `measured` tells these rows from those of 0.2.
    with recording(args, arguments, IDENTITY, torch.device("cuda"), measured="runs of train.py") as recorder:
        failed = measure_all(cells, recorder, measure)
    path = recorder.path
    write_table(path.with_suffix(".md"), table(read(path)), path)
    print(f"results: {path}")
    return failed


def table(rows: Sequence[Row]) -> str:
    """Each case on each number of GPUs: its speed and memory, how many times one GPU's, and whether bits are equal."""
    of_one = {(row["kind"], row["name"]): row for row in rows if row["gpus"] == 1}

    def cell(row: Row) -> str:
        parts, one = [result(row)], of_one.get((row["kind"], row["name"]))
        if one and row["gpus"] > 1 and row["status"] == one["status"] == "completed":
            parts.append(f"{row['tokens_per_s'] / one['tokens_per_s']:.2f} times one")
            if "digest" in row:
                parts.append("the same bits" if row["digest"] == one["digest"] else "other bits")
        return ", ".join(parts)

    return pivot(
        rows,
        lambda row: f"{row['kind']}, {row['name']}",
        lambda row: f"{row['gpus']}",
        cell,
        corner="thousand tokens/s (GiB per GPU) by GPUs",
        columns=[str(gpus) for gpus in sorted({row["gpus"] for row in rows})],
    )


if __name__ == "__main__":
    sys.exit(main())
