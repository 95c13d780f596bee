"""Training steps of GPT-2 124M on 1, 2 and 4 GPUs of one machine: their speed, and whether they compute the same bits.

    python -m bench.several_gpus                      every case, on as many of 1, 2 and 4 GPUs as there are
    python -m bench.several_gpus --cases speed bits   some of them

    speed     32 x 1,024 tokens a GPU
    bits      50 steps of 4 x 32 x 1,024 tokens: a digest of every loss, gradient norm and final weight
    eager     20 steps of 8 x 4 x 1,024 tokens, not compiled, replicated and sharded: likewise
    context   one sequence of 262,144 tokens over all GPUs
    million   one of 1,048,576

Every number of GPUs is one torchrun of this file. Results go to bench/results/several-gpus-<device>.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from attention import AttentionConfig, build_attention
from bench.measure import RESULTS, ROOT, environment, require_gpu, slug, write
from model.config import GPTConfig, Positions, Recompute
from model.gpt import GPT
from model.loss import LossKind
from training.device import Precision, World
from training.optimizer import OptimizerConfig, ScheduleConfig
from training.parallel import DataParallel, ParallelConfig
from training.ranks import joined
from training.step import Batch, Trainer, TrainingConfig

VOCAB, SEED = 50_257, 1337
KINDS = ["speed", "bits", "eager", "context", "million"]
MILLION = 2**20


@dataclass(frozen=True)
class Case:
    """One training to measure on some number of GPUs.

    sequences  of seq_len tokens in one micro-batch, on each GPU or, with context, on all
    tokens     of one step; None: one micro-batch on each GPU
    """

    kind: str
    name: str
    seq_len: int
    sequences: int
    steps: int
    dropout: float = 0.0
    tokens: int | None = None
    compile: bool = True
    parallel: ParallelConfig = field(default_factory=ParallelConfig)


def cases(gpus: int) -> Iterator[Case]:
    """What is measured on so many GPUs."""
    yield Case("speed", "exact", 1024, 32, 40, 0.1)
    if gpus > 1:
        yield Case("speed", "any order", 1024, 32, 40, 0.1, parallel=ParallelConfig(exact=False))
    yield Case("bits", "replicate", 1024, 32, 50, 0.1, 4 * 32 * 1024)
    for data in DataParallel:
        yield Case("eager", data.value, 1024, 4, 20, 0.1, 8 * 4 * 1024, compile=False, parallel=ParallelConfig(data))
    yield Case("context", "heads", MILLION // 4, 1, 3, parallel=ParallelConfig(context=gpus))
    yield Case("million", "heads", MILLION, 1, 2, parallel=ParallelConfig(context=gpus))


def build(case: Case, world: World, device: torch.device) -> Trainer:
    torch.manual_seed(SEED)
    long = case.kind in ("context", "million")
    config = GPTConfig(
        "gpt2", 12, 12, None, 768, case.dropout, positions=Positions.rotary if long else Positions.learned
    )
    training = TrainingConfig(
        steps=case.steps,
        batch_size=case.sequences,
        batch_tokens=case.tokens,
        precision=Precision.bf16,
        compile=case.compile,
        cuda_graph=not long,
    )
    model = GPT(
        config,
        VOCAB,
        case.seq_len,
        build_attention(AttentionConfig("flash", case.dropout)),
        Recompute.block if long else Recompute.none,
        LossKind.chunked,
        device=device,
        dtype=torch.bfloat16,
    )
    schedule = ScheduleConfig(warmup_steps=0)
    return Trainer(model, OptimizerConfig(lr=6e-4), schedule, training, SEED, device, world, case.parallel)


def micro_batches(trainer: Trainer, case: Case, step: int) -> list[Batch]:
    """Random tokens, the same for a sequence of the step on whatever GPU it lies."""
    world = trainer.world
    drawn: list[Batch] = []
    for micro_step in range(trainer.micro_steps):
        number = (step * trainer.micro_steps + micro_step) * world.data_size + world.data_rank
        generator = torch.Generator().manual_seed(number)
        window = torch.randint(VOCAB, (case.sequences, case.seq_len + 1), generator=generator).to(trainer.device)
        drawn.append((window[:, :-1].contiguous(), window[:, 1:].contiguous()))
    return drawn


def measure(case: Case, world: World, device: torch.device) -> dict[str, Any]:
    """The row of a case."""
    torch.compiler.reset()
    trainer = build(case, world, device)
    torch.cuda.reset_peak_memory_stats(device)
    updates, seconds = [], []
    for step in range(case.steps):
        batches = micro_batches(trainer, case, step)
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        loss, norm = trainer.update(step, batches)
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
        updates.append([float(loss).hex(), float(norm).hex()])
    trainer.raise_failure()
    # The first steps compile, choose kernels and record the CUDA graph.
    counted = seconds[case.steps // 2 :]
    row = {
        "kind": case.kind,
        "name": case.name,
        "gpus": world.size,
        "seq_len": case.seq_len,
        "tokens_per_step": trainer.tokens_per_step,
        "steps": case.steps,
        "dropout": case.dropout,
        "step_ms": 1e3 * statistics.median(counted),
        "tokens_per_s": trainer.tokens_per_step / statistics.median(counted),
        "peak_allocated_gib": torch.cuda.max_memory_allocated(device) / 2**30,
        "last_update": updates[-1],
    }
    if case.kind in ("bits", "eager"):
        digest = hashlib.sha256(json.dumps(updates).encode())
        for parameter in trainer.whole_model().parameters():
            digest.update(parameter.detach().cpu().numpy().tobytes())
        row["digest"] = digest.hexdigest()
    trainer.release()
    return row


def work(out: Path, kinds: list[str]) -> None:
    """One rank's part: every case of its number of GPUs, the first rank's rows into `out` as they come."""
    world = World.from_environment()
    device = torch.device("cuda", world.local_rank)
    with joined(world, device, timeout_s=300):
        for case in cases(world.size):
            if case.kind in kinds:
                row = measure(case, world, device)
                if world.rank == 0:
                    print(json.dumps(row), flush=True)
                    with out.open("a") as file:
                        file.write(json.dumps(row) + "\n")


def main(arguments: list[str]) -> None:
    """Everything the command line does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--gpus", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)  # what torchrun passes on
    args = parser.parse_args(arguments)
    require_gpu(parser)
    if args.rank_of is not None:
        work(args.rank_of, args.cases)
        return
    name = torch.cuda.get_device_name(0)
    path = args.results / f"several-gpus-{slug(name)}.json"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows"
        for gpus in args.gpus:
            if gpus > torch.cuda.device_count():
                continue
            torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
            own = ["-m", "bench.several_gpus", "--rank-of", str(out), "--cases", *args.cases]
            subprocess.run([sys.executable, *torchrun, *own], cwd=ROOT, check=False)
            rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
            where = environment(torch.device("cuda", 0))
            write(path, json.dumps({"environment": where, "rows": rows}, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
