"""nanoGPT's benchmark, for the column next to ours in bench.train_step.

    git clone https://github.com/karpathy/nanoGPT
    python -m bench.nanogpt nanoGPT                              ten cells, about ten minutes on an H200
    python -m bench.nanogpt nanoGPT --shapes 32x1024 --dropout 0   one of them; the others stay

Each cell runs the checkout's bench.py in a separate process, with random tokens, torch.compile and bf16, at GPT-2's
124M parameters: 10 warm-up steps, then the mean of 20. It loads no data, clips no gradients and logs nothing.
bench.py sets dropout to 0; here the model's configuration gets the rate of the cell instead, for attention weights and
the residual stream. Results go to bench/results/nanogpt-<device>.json.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import torch

from bench.attention.__main__ import rate
from bench.machine import require_gpu
from bench.record import Row, command_line, recording

SHAPES = ("32x1024", "16x2048", "8x4096", "4x8192", "2x16384")
DROPOUTS = (0.0, 0.1)
TIME = re.compile(r"time per iteration: ([\d.]+)ms")
PEAK = re.compile(r"peak bytes: (\d+)")

# Runs in the checkout: bench.py as it is, but for the dropout of the model it builds.
CHILD = """
import runpy, sys, torch, model
rate, plain = float(sys.argv.pop(1)), model.GPTConfig
model.GPTConfig = lambda **given: plain(**given | {"dropout": rate})
runpy.run_path("bench.py", run_name="__main__")
print("peak bytes:", torch.cuda.max_memory_allocated())
"""


def measure(checkout: Path, shape: str, dropout: float) -> Row:
    """Run nanoGPT's bench.py for one cell and return its row."""
    batch, seq_len = map(int, shape.split("x"))
    settings = {"batch_size": batch, "block_size": seq_len, "real_data": False, "dtype": "bfloat16", "compile": True}
    command = [sys.executable, "-c", CHILD, str(dropout), *(f"--{name}={value}" for name, value in settings.items())]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
    row = {"shape": shape, "dropout": dropout}
    took, peak = TIME.search(done.stdout), PEAK.search(done.stdout)
    if done.returncode or not took or not peak:
        if "OutOfMemoryError" in done.stderr:
            return row | {"status": "out of memory"}
        return row | {"status": "failed", "message": (done.stderr.strip() or done.stdout.strip())[-2000:]}
    step_ms, gib = float(took[1]), int(peak[1]) / 2**30
    tokens_per_s = 1e3 * batch * seq_len / step_ms
    return row | {"status": "completed", "tokens_per_s": tokens_per_s, "step_ms": step_ms, "peak_allocated_gib": gib}


def batch_and_length(text: str) -> str:
    """A shape such as 32x1024."""
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text} is not a batch size and a sequence length, such as 32x1024")
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the cells that were asked for, printing each. Returns 1 if one failed."""
    parser = command_line("bench.nanogpt", __doc__, "nanogpt")
    parser.add_argument("checkout", type=Path, help="folder of a nanoGPT checkout")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, type=batch_and_length, metavar="BATCHxSEQ_LEN")
    parser.add_argument("--dropout", nargs="+", default=DROPOUTS, type=rate, metavar="P")
    args = parser.parse_args(arguments)
    if not all((args.checkout / name).is_file() for name in ("bench.py", "model.py")):
        parser.error(f"{args.checkout} has no bench.py and model.py; name a checkout of nanoGPT")
    require_gpu(parser)
    checkout = subprocess.run(["git", "rev-parse", "HEAD"], cwd=args.checkout, capture_output=True, text=True)
    commit, failed = checkout.stdout.strip() or None, False
    with recording(args, arguments, ("shape", "dropout"), torch.device("cuda"), nanogpt=commit) as recorder:
        for shape, dropout in product(args.shapes, args.dropout):
            row = measure(args.checkout, shape, dropout)
            print(" ".join(f"{name}={value}" for name, value in row.items()), flush=True)
            if row["status"] == "failed":
                failed = True
            else:
                recorder.add(row)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
