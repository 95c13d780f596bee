"""The price of each part of the model in tokens/s: steps of GPT-2's shape with one part at a time.

    python -m bench.parts                           the arms of experiment=speedrun, and the other parts
    python -m bench.parts --arms gate muon          some of them, and the baseline

A step has 32 x 1,024 random tokens in bf16, compiled and replayed as a CUDA graph; each arm is built in this process,
and the median of its steps counts. An arm takes 20 seconds. The baseline is measured first and last, and each row has
the mean of the two. Results go to bench/results/parts-<GPU>.json.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Sequence

import torch
import yaml

from bench.machine import ROOT, device_name, require_gpu
from bench.record import Recorder, Row, command_line, command_of, measurement, result_file
from data.batches import Batch
from recipe.distributed.world import World
from recipe.run.arms import read_arms
from recipe.run.build import build_model, build_trainer
from recipe.run.compose import composed, to_config
from recipe.run.tracker import TrackingMode
from recipe.training.graphed_step import WARMUP_CALLS

SIZE = ["model=gpt2", "attention=flash", "seq_len=1024", "training.batch_size=32", "training.compile=true"]
VOCABULARY = 50_257
# Parts of docs/models.md that experiment=speedrun does not try.
OTHERS = {
    "norm_both": "model.norm_place=both",
    "geglu": "model.mlp=geglu",
    "grouped_heads": "model.n_kv_heads=4",
    "gate_element": "model.gate=element",
    "value_embeddings": "model.value_embeddings=2",
    "log_scale": "model.log_scale=true",
    "mtp": "model.mtp=0.3",
}


def arms() -> dict[str, list[str]]:
    """The overrides of each arm by its name; the first is the baseline."""
    text = yaml.safe_load((ROOT / "conf" / "experiment" / "speedrun.yaml").read_text())["arena"]["arms"]
    tried = read_arms(text, [path.stem for path in (ROOT / "conf" / "arm").glob("*.yaml")])
    return tried | {name: [override] for name, override in OTHERS.items()}


def timed(overrides: Sequence[str], device: torch.device, steps: int) -> Row:
    """The step of a model: its median time in ms, tokens/s and most memory."""
    config = to_config(composed([*SIZE, *overrides]))
    config.tracking.mode = TrackingMode.disabled
    torch.cuda.reset_peak_memory_stats()
    trainer = build_trainer(config, build_model(config, VOCABULARY, device, World()), device, World())
    tokens = torch.randint(VOCABULARY, (32, 1025), device=device)
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    seconds = []
    for step in range(WARMUP_CALLS + 2 + steps):  # the first steps compile and capture
        torch.cuda.synchronize()
        begin = time.perf_counter()
        trainer.update(step, [batch])
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    median = statistics.median(seconds[-steps:])
    trainer.release()
    peak = torch.cuda.max_memory_allocated() / 2**30
    return {"step_ms": 1e3 * median, "tokens_per_s": trainer.tokens_per_step / median, "peak_allocated_gib": peak}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the arms one by one, and write each row at once."""
    parser, known = command_line("bench.parts", __doc__, "parts"), arms()
    parser.add_argument("--arms", nargs="+", choices=list(known), default=list(known))
    parser.add_argument("--steps", default=20, type=int, help="timed steps of an arm")
    args = parser.parse_args(arguments)
    require_gpu(parser)
    device = torch.device("cuda")
    now = measurement(command_of(parser, arguments), device)
    path = result_file(args.name, device_name(device), args.results)
    first = next(iter(known))
    rows: list[Row] = []
    with Recorder(path, ("arm",), now) as recorder:
        for name in [first, *(arm for arm in args.arms if arm != first), first]:
            row = {"arm": name, "overrides": known[name]} | timed(known[name], device, args.steps)
            print(f"{name}: {row['step_ms']:.1f} ms, {row['tokens_per_s']:,.0f} tokens/s", flush=True)
            rows.append(row)
            baseline = statistics.mean(row["step_ms"] for row in rows if row["arm"] == first)
            recorder.add(*(row | {"baseline_ms": baseline} for row in rows))
            torch.compiler.reset()
            gc.collect()
            torch.cuda.empty_cache()
    print(f"results: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
