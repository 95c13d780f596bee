"""The trainings that bench.several_gpus measures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from model.options import Recompute
from recipe.distributed.options import DataParallel, ParallelConfig
from recipe.training.graphed_step import WARMUP_CALLS

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
    long: bool = False
    recompute: Recompute = Recompute.none
    residual_in_fp32: bool = True
    optimizer: str = "adamw"
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    @property
    def steps(self) -> int:
        return self.first + self.groups * self.group


KINDS = ["speed", "bits", "eager", "muon", "quarter", "xl", "xl-long", "half", "million", "four"]


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
        eager = Case("eager", data.value, 1024, 8, 5, 9, dropout=0.1, tokens=tokens, compile=False, parallel=parallel)
        yield from (eager, replace(eager, kind="muon", optimizer="muon"))
    quarter = Case(
        "quarter", "heads", MILLION // 4, 1, 1, 1, first=1, long=True, recompute=Recompute.around_attention,
        parallel=together,
    )  # fmt: skip
    yield quarter
    yield Case("xl", ALONE, 1024, 16, 3, 3, model="gpt2-xl", parallel=ParallelConfig(shard))
    if gpus > 1:
        yield Case("xl", "exact", 1024, 16, 3, 3, model="gpt2-xl", parallel=ParallelConfig(shard))
        gathered_once = ParallelConfig(shard, reshard_after_forward=False)
        yield Case("xl", "exact, kept gathered", 1024, 16, 3, 3, model="gpt2-xl", parallel=gathered_once)
        any_order = ParallelConfig(shard, exact=False)
        yield Case("xl", "any order", 1024, 16, 3, 3, model="gpt2-xl", parallel=any_order)
        shared = ParallelConfig(shard, context=gpus)
        yield Case(
            "xl-long", "keys", gpus * MILLION // 4, 1, 1, 1, first=0, model="gpt2-xl", long=True,
            recompute=Recompute.block, residual_in_fp32=False, parallel=shared,
        )  # fmt: skip
    yield replace(quarter, kind="half", seq_len=MILLION // 2)
    yield replace(quarter, kind="million", seq_len=MILLION)
    if gpus > 1:
        yield replace(quarter, kind="four", seq_len=gpus * MILLION, first=0, residual_in_fp32=False)
