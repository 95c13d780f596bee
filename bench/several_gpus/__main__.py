"""Training steps on 1, 2 and 4 GPUs of one machine: their speed and memory, and whether they compute the same bits.

    python -m bench.several_gpus                               every case, on as many of 1, 2 and 4 GPUs as there are
    python -m bench.several_gpus --cases speed bits --gpus 4   some of them, in this order; other rows of the file stay

    speed     GPT-2 124M, 32 x 1,024 tokens per GPU: "alone", each GPU separately at the same time, and together
    bits      50 steps of 4 x 32 x 1,024 tokens, replicated and sharded: a digest of losses, norms and final weights
    eager     50 steps of 4 x 8 x 1,024 tokens, not compiled: likewise
    muon      the same with Muon
    quarter   one sequence of 262,144 tokens over all GPUs
    half      one of 524,288: on two GPUs, the length per GPU of `million` on four
    million   one of 1,048,576
    four      one of 4,194,304 over four GPUs, or half of that over two, the residual stream in bf16: a single step,
              whose time includes compiling
    xl        GPT-2 XL, 16 x 1,024 tokens per GPU, sharded, and each GPU separately
    xl-long   GPT-2 XL, one sequence of 1,048,576 tokens over four GPUs, or half of that over two, sharded, the residual
              stream in bf16: a single step, whose time includes compiling

Steps run without waiting for each other, as in train.py; a speed is the median of several groups of steps. Each number
of GPUs is one torchrun of this file. A case's row goes to bench/results/several-gpus-<device>.json at its end, and a
table beside it. A case with a sequence of 131,072 tokens or more also writes a row after its first step, whose time
includes compiling.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from attention import AttentionConfig, build_attention
from bench.machine import device_name, require_gpu
from bench.measure import release
from bench.record import Recorder, Row, command_line, command_of, measurement, read, result_file, write_table
from bench.runs import python
from bench.several_gpus.cases import ALONE, KINDS, MODELS, Case, cases
from bench.several_gpus.views import speeds
from data.batches import Batch
from model.gpt import GPT, Computation
from model.loss import LossKind
from model.options import GPTConfig, Positions
from recipe.distributed.ranks import from_every_rank, joined
from recipe.distributed.world import World
from recipe.run.build import build_trainer
from recipe.run.config import Config
from recipe.training.device import Precision
from recipe.training.optimizer import OptimizerConfig, ScheduleConfig
from recipe.training.options import TrainingConfig
from recipe.training.step import Trainer

VOCAB, SEED = 50_257, 1337
IDENTITY = ("kind", "name", "gpus")


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
    )
    with device:  # random numbers come faster there
        model = GPT(
            config,
            VOCAB,
            case.seq_len,
            build_attention(AttentionConfig("flash", case.dropout)),
            Computation(case.recompute, LossKind.chunked, case.residual_in_fp32, device=device, dtype=torch.bfloat16),
        )
    optimizer, schedule = OptimizerConfig(case.optimizer, lr=6e-4), ScheduleConfig(warmup_steps=0)
    whole = Config(SEED, optimizer=optimizer, schedule=schedule, training=training, parallel=case.parallel)
    trainer = build_trainer(whole, model, device, replace(world, context=case.parallel.context))
    if case.long:
        trainer.replay = None  # a CUDA graph would hold memory of its own
    return trainer


def micro_batches(trainer: Trainer, case: Case, step: int) -> list[Batch]:
    """Random tokens; a sequence of the step has the same tokens on whichever GPU it is."""
    world = trainer.world
    drawn: list[Batch] = []
    for micro_step in range(trainer.micro_steps):
        number = (step * trainer.micro_steps + micro_step) * world.data_size + world.data_rank
        generator = torch.Generator().manual_seed(number)
        window = torch.randint(VOCAB, (case.sequences, case.seq_len + 1), generator=generator).to(trainer.device)
        drawn.append(Batch(window[:, :-1].contiguous(), window[:, 1:].contiguous()))
    return drawn


@dataclass(frozen=True)
class Progress:
    """The state after a group of a case's steps.

    done      the number of steps so far
    seconds   of one step: the median over the groups so far; groups that compile count only while there are no others
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


def measure(case: Case, world: World, device: torch.device) -> Iterator[Row]:
    """The row of a case, and before it, of a long sequence, one for the steps so far.

    The speed is the mean over the GPUs. GPUs that work alone do not wait for the slowest, whose speed the row also has.
    """
    started = time.monotonic()
    torch.compiler.reset()
    release(device)  # the trainer of the case before
    trainer = build(case, World(local_rank=world.local_rank) if case.name == ALONE else world, device)
    torch.cuda.reset_peak_memory_stats(device)
    updates: list[list[torch.Tensor]] = []
    ended: list[float] = []

    def train(first: int, count: int) -> float:
        """Seconds per step."""
        batches = [micro_batches(trainer, case, step) for step in range(first, first + count)]
        torch.cuda.synchronize(device)
        from_every_rank(None)  # they begin together
        began = time.perf_counter()
        for step, batch in enumerate(batches, first):
            update = trainer.update(step, batch)
            updates.append([update[name].clone() for name in ("train/loss", "optim/grad_norm")])
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
        if case.kind in ("bits", "eager", "muon"):
            digest = hashlib.sha256(json.dumps(written).encode())
            for parameter in trainer.whole_model().parameters():
                digest.update(parameter.detach().cpu().numpy().tobytes())
            row["digest"] = digest.hexdigest()
        yield row
    trainer.release()


def work(path: Path, kinds: list[str], command: list[str]) -> None:
    """One rank's part: the cases of these kinds, in this order. The first rank adds each one's row to `path`."""
    world = World.from_environment()
    device = torch.device("cuda", world.local_rank)
    chosen = [case for kind in kinds for case in cases(world.size) if case.kind == kind]
    with joined(world, device, timeout_s=3600):
        rows = (row for case in chosen for row in measure(case, world, device))
        if world.rank:
            for _ in rows:
                pass
            return
        with Recorder(path, IDENTITY, measurement(command, device)) as recorder:
            for row in rows:
                print(json.dumps(row), flush=True)
                record(recorder, row)


def record(recorder: Recorder, row: Row) -> None:
    """Add a row, unless its time includes compiling and the time of the earlier row does not."""
    earlier = recorder.earlier(row)
    if not row["compiles"] or earlier is None or earlier["compiles"]:
        recorder.add(row)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the cases on each number of GPUs, and write their rows."""
    parser = command_line("bench.several_gpus", __doc__, "several-gpus")
    parser.add_argument("--cases", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--gpus", nargs="+", type=int, help="default: 1, 2 and 4, as far as this machine has them")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)  # what torchrun passes on
    parser.add_argument("--command", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    require_gpu(parser)
    if args.rank_of is not None:
        work(args.rank_of, args.cases, shlex.split(args.command))
        return
    there = torch.cuda.device_count()
    numbers = args.gpus or [gpus for gpus in (1, 2, 4) if gpus <= there]
    if max(numbers) > there or min(numbers) < 1:
        parser.error(f"--gpus {' '.join(map(str, numbers))} is not possible here: this machine has {there} GPUs")
    path = result_file(args.name, device_name(torch.device("cuda")), args.results).absolute()
    failed = []
    for gpus in numbers:
        ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}", "-m", "bench.several_gpus"]
        command = shlex.join(command_of(parser, arguments))
        if python([*ranks, "--rank-of", str(path), "--cases", *args.cases, "--command", command]):
            failed.append(gpus)
    if path.exists():
        write_table(path.with_suffix(".md"), speeds(read(path)), path)
        print(f"wrote {path} and its table")
    if failed:
        parser.exit(1, f"not every case ended on {' and '.join(map(str, failed))} GPUs; see above\n")


if __name__ == "__main__":
    main()
