"""The work of test_several_ranks.py in four processes: the same training on 4, 2 and 1 of them.

python -m tests.recipe.distributed.several_ranks <folder> <8 ports>
"""

import contextlib
import gc
import io
import json
import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch._dynamo  # fully_shard imports it when it is first called: once here, not once a rank
from torch import Tensor, nn
from torch.multiprocessing import start_processes

from attention import AttentionConfig, build_attention
from data.batches import Batches, GlobalBatch
from data.options import DataConfig
from model.gpt import GPT
from model.options import AttentionBias, Gate, GPTConfig, Recompute
from model.score import ScoreConfig
from recipe.distributed import norm
from recipe.distributed.context import ContextBy
from recipe.distributed.norm import local
from recipe.distributed.options import DataParallel, ParallelConfig
from recipe.distributed.ranks import RankError, check_agreed, joined
from recipe.distributed.world import World
from recipe.files import plain
from recipe.run import profiler
from recipe.run.build import build_trainer
from recipe.run.config import Config
from recipe.run.tracker import TrackingConfig, TrackingMode
from recipe.training.checkpoint import newest_valid, save_checkpoint
from recipe.training.device import Precision
from recipe.training.optimizer import OPTIMIZERS, OptimizerConfig, ScheduleConfig
from recipe.training.options import TrainingConfig
from recipe.training.parity_probe import ParityConfig
from recipe.training.step import Trainer
from tests.parts import EVERYTHING
from train import train as train_run

CPU = torch.device("cpu")
T, B, MICRO_BATCHES, STEPS, SEED = 64, 2, 4, 4, 7
TEXT = np.frombuffer(Path(os.__file__).read_bytes(), np.uint8)
MODEL = GPTConfig(n_layers=2, n_heads=2, n_embd=32, dropout=0.1)
# Also biases, which autocast rounds like weights.
PARTS = replace(EVERYTHING, n_layers=2, n_heads=2, n_kv_heads=2, n_embd=32, dropout=0.1)
PARTS = replace(PARTS, bias=True, attention_bias=AttentionBias.none)
MIXED = replace(MODEL, layers=["kda", "attention"])
# Matrices of 90 and 2 rows, and of six shapes.
UNEVEN = replace(PARTS, n_kv_heads=1, mlp_width=90, gate=Gate.head)

# Gates of each layer whose matrices are read in fp32.
FORGETTING = ScoreConfig(formula="s + c[h, i] - c[h, j]", tensors={"c": "model.forget_gate"})

# All parameters in one group; those whose names begin in another way are frozen.
TRAINED = {"a matrix and a norm": ("h.0.mlp.c_fc", "ln_f"), "a norm": ("ln_f",)}

PARALLEL = {
    "exact": ParallelConfig(),
    "sharded": ParallelConfig(DataParallel.shard),
    "sharded, kept gathered": ParallelConfig(DataParallel.shard_grad_op),
    "heads": ParallelConfig(context=2),
    "keys, sharded": ParallelConfig(DataParallel.shard, context=2),
}

# Kind of training -> the numbers of ranks that do it, and options of build.
KINDS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "": ((1, 2, 4), {}),
    "mixers": ((1, 4), {"model": MIXED}),
    # Also matrices whose rows the ranks do not divide evenly, or that have fewer rows than ranks.
    "muon": ((1, 4), {"model": UNEVEN, "optimizer": "muon"}),
    # Of a norm alone only one of four ranks measures gradients.
    **{kind: ((1, 4), {"optimizer": "torch's", "trained": names}) for kind, names in TRAINED.items()},
    # A sum of two has one order, in a library too.
    "fp16": ((1, 2), {"precision": Precision.fp16, "micro_batches": 2}),
    # All parts, so that four ranks cut biases inside a vector of the optimizer's, and matrices that are read in fp32.
    "bf16": ((1, 4), {"precision": Precision.bf16, "score": FORGETTING}),
}

# Numbers of ranks, each of which resumes from the checkpoint of the number before it.
SHARD, REPLICATE = DataParallel.shard, DataParallel.replicate
CHAIN = ((4, SHARD), (2, SHARD), (1, REPLICATE), (4, REPLICATE))
RESUMED = ("", "muon", "bf16")  # the kinds of training that do; in bf16 all replicate


def build(
    world: World,
    parallel: ParallelConfig,
    micro_batches: int = MICRO_BATCHES,
    precision: Precision = Precision.fp32,
    model: GPTConfig | None = None,
    optimizer: str = "adamw",
    trained: tuple[str, ...] = ("",),
    score: ScoreConfig | None = None,
) -> Trainer:
    torch.manual_seed(SEED)
    model = model or (MODEL if precision is Precision.fp32 else PARTS)
    gpt = GPT(model, 256, T, build_attention(AttentionConfig(dropout=0.1)), score=score)
    for name, parameter in gpt.named_parameters():
        parameter.requires_grad_(name.startswith(trained))
    settings = TrainingConfig(steps=20, batch_size=B, batch_tokens=B * T * micro_batches, precision=precision, ema=0.9)
    # At this learning rate a difference in the last bit soon shows.
    options, schedule = OptimizerConfig(optimizer, lr=1e-2), ScheduleConfig(warmup_steps=2)
    config = Config(SEED, optimizer=options, schedule=schedule, training=settings, parallel=parallel)
    return build_trainer(config, gpt, CPU, replace(world, context=parallel.context))


def torchs_adamw(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=torch.tensor(config.lr), weight_decay=0.1, fused=True)


def train(trainer: Trainer, steps: range) -> list[list[str]]:
    """Loss and gradient norm of each step, in hexadecimal."""
    batches = Batches(TEXT, trainer.model.seq_len, trainer.global_batch, SEED)
    done = []
    for step in steps:
        update = trainer.update(step, [batches.stored(step, m).widened() for m in range(trainer.micro_steps)])
        done.append([float(update[name]).hex() for name in ("train/loss", "optim/grad_norm")])
    return done


def validate(trainer: Trainer) -> dict[str, str]:
    batches = Batches(TEXT, trainer.model.seq_len, GlobalBatch(B), SEED)
    measured = trainer.measure([batches.stored(step).widened() for step in range(50, 53)])
    return {"validation": measured["val/loss"].hex(), "validation of the average": measured["val/loss_ema"].hex()}


def local_tree(terms: list[Tensor]) -> Tensor:
    """((t0 + t1) + (t2 + t3)) + ... by recursion: the left branch is the largest power of two that leaves a right."""
    if len(terms) == 1:
        return terms[0]
    middle = 1 << (len(terms) - 1).bit_length() - 1
    return local_tree(terms[:middle]) + local_tree(terms[middle:])


def part_of_moments(trainer: Trainer) -> float:
    """How much of all moments this rank keeps."""
    moments = [value for name, value in trainer.state()["training"].items() if name.endswith(".exp_avg")]
    return sum(local(m).numel() for m in moments) / sum(m.numel() for m in moments)


@torch.no_grad()
def one_loss(trainer: Trainer) -> str:
    """A loss of the gathered model, computed on this rank alone, in hexadecimal."""
    inputs, targets, *_ = Batches(TEXT, trainer.model.seq_len, GlobalBatch(B), SEED).stored(50).widened()
    model = trainer.whole_model().eval()
    loss = model(inputs, targets).item().hex()
    model.train()
    return loss


def parallels(kind: str, size: int) -> list[str]:
    """The ways in which so many ranks share a kind of training; one rank has nothing to share out."""
    if size == 1 or kind == "mixers":
        return ["exact"]
    if size == 4 and not kind:
        return [*PARALLEL]
    return ["exact", "sharded"]


def work(world: World) -> dict[str, Any]:
    """All results that are compared between runs on different numbers of ranks, by the way of sharing and the kind."""
    found: dict[str, Any] = {}
    for kind, (sizes, options) in KINDS.items():
        for name in parallels(kind, world.size) if world.size in sizes else []:
            by_keys = patch("recipe.distributed.sharing.shared_by", return_value=ContextBy.keys)
            with by_keys if name.startswith("keys") else nullcontext():
                trainer = build(world, PARALLEL[name], **options)
            updates = train(trainer, range(2))
            results = {"updates": updates, **validate(trainer), "whole model": one_loss(trainer)}
            found[f"{name}, {kind}"] = results
            if trainer.sharing.context is not None:
                attend, _ = trainer.sharing.context
                found["seconds of patience"] = attend.group._get_backend(CPU).options._timeout.total_seconds()
            if world.size == 1 and kind in RESUMED:
                updates = updates + train(trainer, range(2, STEPS))
                found[f"{kind} to the end"] = {"updates": updates, **validate(trainer)}
            if name == "exact" and not kind:
                found["part of the moments"] = part_of_moments(trainer)
            if name == "exact" and kind in ("fp16", "bf16") and world.size > 1:
                computing = trainer.sharing.computing.parameters()
                found["rounded"] = sum(p.numel() for p in computing if p.dtype is options["precision"].dtype)
    if world.size == 1:
        found["six micro-batches"] = three(world)
    check_agreed(plain(Config(seed=SEED, device=f"cuda:{world.rank}")))
    try:
        check_agreed(plain(Config(optimizer=OptimizerConfig(lr=1 + world.rank))))
    except RankError as error:
        found["refused"] = str(error)
    return found


def three(world: World) -> dict[str, Any]:
    """Losses of three ranks, or of one, with six micro-batches in all, by the way of sharing."""
    results = {}
    for kind, options in {"": {}, "muon": KINDS["muon"][1]}.items():
        for name in ("exact", "sharded")[: world.size]:
            results[f"{name}, {kind}"] = train(build(world, PARALLEL[name], micro_batches=6, **options), range(2))
    return results


def resume(world: World, folder: Path, step: int, data: DataParallel, kind: str) -> list[list[str]]:
    """Train a step from the newest checkpoint, if any; returns the update, and at the end the average's validation
    loss."""
    parallel = ParallelConfig() if kind == "bf16" else ParallelConfig(data)
    trainer = build(world, parallel, **KINDS[kind][1])
    if step:
        trainer.load(newest_valid(folder)[0])
    done = train(trainer, range(step, step + 1))
    if step == STEPS - 1:
        done.append([validate(trainer)["validation of the average"]])
    save_checkpoint(folder, trainer.state(), step + 1, keep_last=1, metadata={})
    return done


def whole_run(world: World, folder: Path, parallel: ParallelConfig) -> None:
    """A run of train.py with probe, evaluation, recomputation, accumulation and a sample, and on four ranks a
    profile. The folder gets what it prints too.
    """
    config = Config(
        seq_len=32,
        device="cpu",
        attention=AttentionConfig(dropout=0.1),
        model=replace(MODEL, n_layers=1),
        data=DataConfig("text", path=str(folder.parent / "text.txt"), cache=str(folder.parent / "cache")),
        training=TrainingConfig(
            steps=3, batch_size=1, batch_tokens=4 * 32, recompute=Recompute.block, log_every=1, eval_every=3,
            eval_batches=2, checkpoint_every=0, sample_tokens=20, profile=world.size == 4,
        ),
        parity=ParityConfig(every=2, reference="tiled"),
        parallel=parallel,
        tracking=TrackingConfig(mode=TrackingMode.disabled),
    )  # fmt: skip
    folder.mkdir(exist_ok=True)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert train_run(config, folder, []) == 0
    if world.rank == 0:
        (folder / "said.txt").write_text(said.getvalue())


def main(rank: int, folder: Path, ports: list[str]) -> None:
    torch.set_num_threads(1)
    norm.PIECE = 256  # small matrices have pieces too
    profiler.WARMUP_STEPS = profiler.PROFILED_STEPS = 1  # a step without a probe, which has the most operations
    OPTIMIZERS["torch's"] = torchs_adamw
    resumed: dict[str, dict[int, Any]] = {kind: {} for kind in RESUMED}
    for turn, ((size, data), port) in enumerate(zip(CHAIN, ports[:4], strict=True)):
        if rank < size:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            world = World(rank, size, rank)
            with joined(world, CPU):
                for kind, updates in resumed.items():
                    updates[turn] = resume(world, folder / f"checkpoints-{kind}", turn, data, kind)
                if turn < 3:
                    (folder / f"{rank}-of-{size}.json").write_text(json.dumps(work(world)))
            if turn in (0, 2):
                variables = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_PORT": ports[4 + turn]}
                os.environ.update({name: str(value) for name, value in variables.items()})
                whole_run(world, folder / f"run-{size}", ParallelConfig(data))
    if rank < 3:
        os.environ["MASTER_PORT"] = ports[7]
        with joined(world := World(rank, 3, rank), CPU):
            (folder / f"{rank}-of-3.json").write_text(json.dumps(three(world)))
    (folder / f"{rank}-resumed.json").write_text(json.dumps(resumed))


if __name__ == "__main__":
    Path(sys.argv[1], "text.txt").write_bytes(TEXT.tobytes())
    gc.freeze()  # forked, the four share what this process has imported
    start_processes(main, (Path(sys.argv[1]), sys.argv[2:]), nprocs=4, start_method="fork")
