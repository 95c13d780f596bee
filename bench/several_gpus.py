"""Training steps on 1, 2 and 4 GPUs of one machine: their speed and memory, and whether they compute the same bits.

    python -m bench.several_gpus                               every case, on as many of 1, 2 and 4 GPUs as there are
    python -m bench.several_gpus --cases speed bits --gpus 4   some of them, in this order; other rows of the file stay

    speed     GPT-2 124M, 32 x 1,024 tokens per GPU: "alone", each GPU separately at the same time, and together
    bits      50 steps of 4 x 32 x 1,024 tokens, replicated and sharded: a digest of losses, norms and final weights
    eager     50 steps of 4 x 8 x 1,024 tokens, not compiled: likewise
    quarter   one sequence of 262,144 tokens over all GPUs
    half      one of 524,288: on two GPUs, each has as much of it as one of four has of a million
    million   one of 1,048,576
    four      one of 4,194,304 over four GPUs, or as much of one on each of two: a single step, whose time includes
              compiling
    xl        GPT-2 XL, 16 x 1,024 tokens per GPU, sharded, and each GPU separately
    xl-long   GPT-2 XL, one sequence of 1,048,576 tokens over four GPUs, or as much of one on each of two, sharded, the
              residual stream in bf16: a single step, whose time includes compiling

Steps run without waiting for each other, as in train.py; a speed is the median of several groups of them. Every number
of GPUs is one torchrun of this file. Each case's row goes to bench/results/several-gpus-<device>.json when it ends. A
sequence of 131,072 tokens or more has a row after its first step already, whose time includes compiling.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from attention import AttentionConfig, build_attention
from bench.measure import RESULTS, ROOT, environment, release, require_gpu, slug, write
from data.batches import Batch
from model.config import GPTConfig, Positions, Recompute
from model.gpt import GPT
from model.loss import LossKind
from recipe.device import Precision
from recipe.distributed.config import DataParallel, ParallelConfig
from recipe.distributed.ranks import from_every_rank, joined
from recipe.distributed.world import World
from recipe.training.config import TrainingConfig
from recipe.training.graphed_step import WARMUP_CALLS
from recipe.training.optimizer import OptimizerConfig, ScheduleConfig
from recipe.training.step import Trainer

VOCAB, SEED = 50_257, 1337
ALONE = "alone"  # the name of a case in which GPUs do not work together
MILLION = 2**20
# name -> layers, heads, channels
MODELS = {"gpt2": (12, 12, 768), "gpt2-xl": (48, 25, 1600)}


@dataclass(frozen=True)
class Case:
    """One training to measure on some number of GPUs.

    sequences  of seq_len tokens in one micro-batch, on each GPU or, with context, on all
    steps      first those that compile and record, then `groups` equal groups to time
    tokens     of one step; None: one micro-batch on each GPU
    """

    kind: str
    name: str
    seq_len: int
    sequences: int
    groups: int
    group: int
    first: int = WARMUP_CALLS + 2
    dropout: float = 0.0
    tokens: int | None = None
    compile: bool = True
    model: str = "gpt2"
    long: bool = False
    residual_in_fp32: bool = True
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    @property
    def steps(self) -> int:
        return self.first + self.groups * self.group


KINDS = ["speed", "bits", "eager", "quarter", "xl", "xl-long", "half", "million", "four"]


def cases(gpus: int) -> Iterator[Case]:
    """The cases measured on `gpus` GPUs."""
    shard, together = DataParallel.shard, ParallelConfig(context=gpus)
    yield Case("speed", ALONE, 1024, 32, 3, 20, dropout=0.1)
    if gpus > 1:
        yield Case("speed", "exact", 1024, 32, 3, 20, dropout=0.1)
        yield Case("speed", "any order", 1024, 32, 3, 20, dropout=0.1, parallel=ParallelConfig(exact=False))
    for data in DataParallel:
        parallel = ParallelConfig(data)
        yield Case("bits", data.value, 1024, 32, 5, 9, dropout=0.1, tokens=4 * 32 * 1024, parallel=parallel)
    for data in DataParallel:
        parallel, tokens = ParallelConfig(data), 4 * 8 * 1024
        yield Case("eager", data.value, 1024, 8, 5, 9, dropout=0.1, tokens=tokens, compile=False, parallel=parallel)
    yield Case("quarter", "heads", MILLION // 4, 1, 1, 1, first=1, long=True, parallel=together)
    yield Case("xl", ALONE, 1024, 16, 3, 3, model="gpt2-xl", parallel=ParallelConfig(shard))
    if gpus > 1:
        yield Case("xl", "exact", 1024, 16, 3, 3, model="gpt2-xl", parallel=ParallelConfig(shard))
        kept = ParallelConfig(shard, reshard_after_forward=False)
        yield Case("xl", "exact, kept gathered", 1024, 16, 3, 3, model="gpt2-xl", parallel=kept)
        any_order = ParallelConfig(shard, exact=False)
        yield Case("xl", "any order", 1024, 16, 3, 3, model="gpt2-xl", parallel=any_order)
        shared = ParallelConfig(shard, context=gpus)
        yield Case(
            "xl-long", "keys", gpus * MILLION // 4, 1, 1, 1, first=0, model="gpt2-xl", long=True,
            residual_in_fp32=False, parallel=shared,
        )  # fmt: skip
    yield Case("half", "heads", MILLION // 2, 1, 1, 1, first=1, long=True, parallel=together)
    yield Case("million", "heads", MILLION, 1, 1, 1, first=1, long=True, parallel=together)
    if gpus > 1:
        yield Case("four", "heads", gpus * MILLION, 1, 1, 1, first=0, long=True, parallel=together)


def build(case: Case, world: World, device: torch.device) -> Trainer:
    """The trainer of a case, with a model of random weights."""
    torch.manual_seed(SEED)
    n_layers, n_heads, n_embd = MODELS[case.model]
    positions = Positions.rotary if case.long else Positions.learned
    config = GPTConfig(case.model, n_layers, n_heads, None, n_embd, case.dropout, positions=positions)
    training = TrainingConfig(
        steps=case.steps,
        batch_size=case.sequences,
        batch_tokens=case.tokens,
        precision=Precision.bf16,
        compile=case.compile,
        cuda_graph=not case.long,
    )
    with device:  # random numbers come faster there
        model = GPT(
            config,
            VOCAB,
            case.seq_len,
            build_attention(AttentionConfig("flash", case.dropout)),
            Recompute.block if case.long else Recompute.none,
            LossKind.chunked,
            residual_in_fp32=case.residual_in_fp32,
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


@dataclass(frozen=True)
class Progress:
    """What is known after a group of a case's steps.

    done      the number of steps so far
    seconds   of one step: the median over the groups so far, without those that compile once there are others
    compiles  whether `seconds` includes compiling
    """

    done: int
    seconds: float
    compiles: bool


def train_in_groups(case: Case, train: Callable[[int, int], float]) -> Iterator[Progress]:
    """Train the steps of a case; `train` takes the first step of a group and their number, and returns the seconds of
    one."""
    done, timed = case.first, list[float]()
    if case.first:
        yield Progress(done, train(0, done), case.compile)
    for _ in range(case.groups):
        timed.append(train(done, case.group))
        done += case.group
        yield Progress(done, statistics.median(timed), case.compile and not case.first)


def measure(case: Case, world: World, device: torch.device) -> Iterator[dict[str, Any]]:
    """The row of a case, and before it, of a long sequence, one for the steps so far.

    The speed is the mean over the GPUs. Those that are alone do not wait for the slowest, which the row tells too.
    """
    started = time.monotonic()
    torch.compiler.reset()
    trainer = build(case, World(local_rank=world.local_rank) if case.name == ALONE else world, device)
    torch.cuda.reset_peak_memory_stats(device)
    updates: list[tuple[torch.Tensor, torch.Tensor]] = []
    ended: list[float] = []

    def train(first: int, count: int) -> float:
        """Seconds per step."""
        batches = [micro_batches(trainer, case, step) for step in range(first, first + count)]
        torch.cuda.synchronize(device)
        from_every_rank(None)  # they begin together
        began = time.perf_counter()
        for step, batch in enumerate(batches, first):
            loss, norm = trainer.update(step, batch)
            updates.append((loss.clone(), norm.clone()))
        torch.cuda.synchronize(device)
        return (time.perf_counter() - began) / count

    for progress in train_in_groups(case, train):
        trainer.raise_failure()
        ended.append(round(time.monotonic() - started, 1))
        if world.rank == 0:
            print(f"{ended[-1]:.0f} s: {case.kind}, {case.name}: {progress.done} of {case.steps} steps", flush=True)
        if not case.long and progress.done < case.steps:
            continue
        of_each = from_every_rank(progress.seconds)
        seconds_of_step = statistics.mean(of_each)
        written = [[float(value).hex() for value in update] for update in updates]
        row = {
            "kind": case.kind,
            "name": case.name,
            "gpus": world.size,
            "model": case.model,
            "seq_len": case.seq_len,
            "tokens_per_step": trainer.tokens_per_step,
            "steps": progress.done,
            "ended_s": list(ended),  # after the case began, each group of steps
            "dropout": case.dropout,
            "step_ms": 1e3 * seconds_of_step,
            "slowest_step_ms": 1e3 * max(of_each),
            "compiles": progress.compiles,
            "tokens_per_s": trainer.tokens_per_step / seconds_of_step,
            "peak_allocated_gib": torch.cuda.max_memory_allocated(device) / 2**30,
            "last_update": written[-1],
        }
        if case.kind in ("bits", "eager"):
            digest = hashlib.sha256(json.dumps(written).encode())
            for parameter in trainer.whole_model().parameters():
                digest.update(parameter.detach().cpu().numpy().tobytes())
            row["digest"] = digest.hexdigest()
        yield row
    trainer.release()


def work(path: Path, kinds: list[str]) -> None:
    """One rank's part: the cases of these kinds, in this order. The first rank adds each one's row to `path`."""
    world = World.from_environment()
    device = torch.device("cuda", world.local_rank)
    chosen = [case for kind in kinds for case in cases(world.size) if case.kind == kind]
    with joined(world, device, timeout_s=3600):
        for case in chosen:
            for row in measure(case, world, device):
                if world.rank == 0:
                    print(json.dumps(row), flush=True)
                    write(path, json.dumps({"rows": merged(path, row | environment(device))}, indent=1) + "\n")
            release(device)


def key(row: dict[str, Any]) -> tuple[str, str, int]:
    """The identity of a measurement: a new row replaces the one with the same key."""
    return row["kind"], row["name"], row["gpus"]


def merged(path: Path, fresh: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of the file and the fresh one, which replaces its own and those of other software. A time that includes
    compiling replaces none that does not."""
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    kept = {key(row): row for row in rows if row["versions"] == fresh["versions"]}
    earlier = kept.get(key(fresh))
    if earlier and fresh["compiles"] and not earlier.get("compiles"):
        return [*kept.values()]
    return [*(kept | {key(fresh): fresh}).values()]


def main(arguments: list[str]) -> None:
    """Measure the cases on each number of GPUs, and write their rows."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.several_gpus", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--gpus", nargs="+", type=int, help="default: those of 1, 2 and 4 that there are")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)  # what torchrun passes on
    args = parser.parse_args(arguments)
    require_gpu(parser)
    if args.rank_of is not None:
        work(args.rank_of, args.cases)
        return
    found = torch.cuda.device_count()
    numbers = args.gpus or [gpus for gpus in (1, 2, 4) if gpus <= found]
    if max(numbers) > found or min(numbers) < 1:
        parser.error(f"--gpus {' '.join(map(str, numbers))} is not possible here: torch finds {found} GPUs")
    path = args.results.absolute() / f"several-gpus-{slug(torch.cuda.get_device_name(0))}.json"
    failed = []
    for gpus in numbers:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
        own = ["-m", "bench.several_gpus", "--rank-of", str(path), "--cases", *args.cases]
        if subprocess.run([sys.executable, *torchrun, *own], cwd=ROOT, check=False).returncode:
            failed.append(gpus)
    print(f"wrote {path}")
    if failed:
        parser.exit(1, f"not every case ended on {' and '.join(map(str, failed))} GPUs; see above\n")


if __name__ == "__main__":
    main(sys.argv[1:])
