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
    xl        GPT-2 XL, 16 x 1,024 tokens per GPU, sharded, and each GPU separately

Steps run without waiting for each other, as in train.py; a speed is the median of several groups of steps. Each number
of GPUs is one torchrun of this file. A case's row goes to bench/results/several-gpus-<device>.json at its end, and a
table beside it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from attention import AttentionConfig, build_attention
from bench.machine import ROOT, device_name, require_gpu
from bench.measure import release
from bench.record import Recorder, Row, command_line, command_of, measurement, read, result_file, write_table
from data.batches import Batch
from model.gpt import GPT, Computation
from model.loss import LossKind
from model.options import GPTConfig, Positions, Recompute
from recipe.distributed.options import DataParallel, ParallelConfig
from recipe.distributed.ranks import from_every_rank, joined
from recipe.distributed.world import World
from recipe.run.build import build_trainer
from recipe.run.config import Config
from recipe.training.device import Precision
from recipe.training.graphed_step import WARMUP_CALLS
from recipe.training.optimizer import OptimizerConfig, ScheduleConfig
from recipe.training.options import TrainingConfig
from recipe.training.step import Trainer
from recipe.wording import markdown_table

VOCAB, SEED = 50_257, 1337
IDENTITY = ("kind", "name", "gpus")
ALONE = "alone"  # the name of a case in which GPUs do not work together
MILLION = 2**20
# name -> layers, heads, channels
MODELS = {"gpt2": (12, 12, 768), "gpt2-xl": (48, 25, 1600)}


@dataclass(frozen=True)
class Case:
    """One training to measure on some number of GPUs.

    sequences  of seq_len tokens in one micro-batch, on each GPU or, with context, on all
    steps      steps that compile and record, before `groups` equal groups of timed steps
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
    long: bool = False  # one sequence over all GPUs
    optimizer: str = "adamw"
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    @property
    def steps(self) -> int:
        return self.first + self.groups * self.group


KINDS = ["speed", "bits", "eager", "muon", "quarter", "xl", "half", "million"]


def cases(gpus: int) -> Iterator[Case]:
    """The cases measured on `gpus` GPUs."""
    shard = DataParallel.shard
    yield Case("speed", ALONE, 1024, 32, 3, 20, dropout=0.1)
    if gpus > 1:
        yield Case("speed", "exact", 1024, 32, 3, 20, dropout=0.1)
        yield Case("speed", "any order", 1024, 32, 3, 20, dropout=0.1, parallel=ParallelConfig(exact=False))
    for data in DataParallel:
        parallel = ParallelConfig(data)
        yield Case("bits", data.value, 1024, 32, 5, 9, dropout=0.1, tokens=4 * 32 * 1024, parallel=parallel)
    for data in DataParallel:
        parallel, tokens = ParallelConfig(data), 4 * 8 * 1024
        eager = Case("eager", data.value, 1024, 8, 5, 9, dropout=0.1, tokens=tokens, compile=False, parallel=parallel)
        yield from (eager, replace(eager, kind="muon", optimizer="muon"))
    together = ParallelConfig(context=gpus)
    for kind, length in {"quarter": MILLION // 4, "half": MILLION // 2, "million": MILLION}.items():
        yield Case(kind, "heads", length, 1, 1, 1, first=1, long=True, parallel=together)
    yield Case("xl", ALONE, 1024, 16, 3, 3, model="gpt2-xl", parallel=ParallelConfig(shard))
    if gpus > 1:
        yield Case("xl", "exact", 1024, 16, 3, 3, model="gpt2-xl", parallel=ParallelConfig(shard))
        gathered_once = ParallelConfig(shard, reshard_after_forward=False)
        yield Case("xl", "exact, kept gathered", 1024, 16, 3, 3, model="gpt2-xl", parallel=gathered_once)
        any_order = ParallelConfig(shard, exact=False)
        yield Case("xl", "any order", 1024, 16, 3, 3, model="gpt2-xl", parallel=any_order)


def build(case: Case, world: World, device: torch.device) -> Trainer:
    """The trainer of a case, with a model of random weights."""
    torch.manual_seed(SEED)
    n_layers, n_heads, n_embd = MODELS[case.model]
    positions = Positions.rotary if case.long else Positions.learned
    recompute = Recompute.around_attention if case.long else Recompute.none
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
            Computation(recompute, LossKind.chunked, device=device, dtype=torch.bfloat16),
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


def measure(case: Case, world: World, device: torch.device) -> Row:
    """The row of a case.

    The speed is the mean over the GPUs. GPUs that work alone do not wait for the slowest, whose speed the row also has.
    """
    torch.compiler.reset()
    release(device)  # the trainer of the case before
    trainer = build(case, World(local_rank=world.local_rank) if case.name == ALONE else world, device)
    torch.cuda.reset_peak_memory_stats(device)
    updates: list[list[torch.Tensor]] = []

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

    train(0, case.first)
    groups = [train(first, case.group) for first in range(case.first, case.steps, case.group)]
    trainer.raise_failure()
    of_each = from_every_rank(statistics.median(groups))
    seconds_of_step = statistics.mean(of_each)
    written = [[float(value).hex() for value in update] for update in updates]
    row = {
        "kind": case.kind,
        "name": case.name,
        "gpus": world.size,
        "model": case.model,
        "seq_len": case.seq_len,
        "tokens_per_step": trainer.tokens_per_step,
        "steps": case.steps,
        "dropout": case.dropout,
        "step_ms": 1e3 * seconds_of_step,
        "slowest_step_ms": 1e3 * max(of_each),
        "tokens_per_s": trainer.tokens_per_step / seconds_of_step,
        "peak_allocated_gib": torch.cuda.max_memory_allocated(device) / 2**30,
        "last_update": written[-1],
    }
    if case.kind in ("bits", "eager", "muon"):
        digest = hashlib.sha256(json.dumps(written).encode())
        for parameter in trainer.whole_model().parameters():
            digest.update(parameter.detach().cpu().numpy().tobytes())
        row["digest"] = digest.hexdigest()
    trainer.release()
    return row


def work(path: Path, kinds: list[str], command: list[str]) -> None:
    """One rank's part: the cases of these kinds, in this order. The first rank adds each one's row to `path`."""
    world = World.from_environment()
    device = torch.device("cuda", world.local_rank)
    chosen = [case for kind in kinds for case in cases(world.size) if case.kind == kind]
    with joined(world, device, timeout_s=3600):
        rows = (measure(case, world, device) for case in chosen)
        if world.rank:
            for _ in rows:
                pass
            return
        with Recorder(path, IDENTITY, measurement(command, device)) as recorder:
            for row in rows:
                print(json.dumps(row), flush=True)
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
        options = ["--rank-of", str(path), "--cases", *args.cases, "--command", command]
        if subprocess.call([sys.executable, *ranks, *options], cwd=ROOT):
            failed.append(gpus)
    if path.exists():
        write_table(path.with_suffix(".md"), speeds(read(path)), path)
        print(f"wrote {path} and its table")
    if failed:
        parser.exit(1, f"not every case ended on {' and '.join(map(str, failed))} GPUs; see above\n")


def speeds(rows: Sequence[Row]) -> str:
    """Every measurement: tokens/s as a multiple of one GPU's, memory, and whether the bits are those of one GPU."""
    of = {(row["kind"], row["name"], row["gpus"]): row for row in rows}
    lines = []
    for (kind, name, gpus), row in sorted(of.items()):
        alone = of.get((kind, ALONE, gpus)) or of.get((kind, name, 1))
        one = of.get((kind, name, 1), {}).get("digest")
        lines.append(
            [
                f"{kind}, {name}",
                str(gpus),
                f"{row['seq_len']:,}",
                f"{row['tokens_per_s']:,.0f}",
                f"{row['tokens_per_s'] / alone['tokens_per_s']:.2f}" if alone and gpus > 1 else "",
                f"{row['peak_allocated_gib']:.1f}",
                {True: "yes", False: "no"}[row["digest"] == one] if one and gpus > 1 else "",
            ]
        )
    head = ["", "GPUs", "tokens of a sequence", "tokens/s", "times one", "GiB per GPU", "the bits of one"]
    return markdown_table(head, lines)


if __name__ == "__main__":
    main()
