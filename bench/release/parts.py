"""The parts of a release: each is one command of at most nine minutes that renews some rows of one result file."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import NamedTuple

from bench.arena.cases import SEEDS, SWEEPS

MOST_MINUTES = 9.0
NANOGPT = Path(".cache/nanoGPT")


class Part(NamedTuple):
    """One part.

    name     on the command line
    command  the words after `python -m`
    results  the name of its result file
    minutes  about how long it takes on an H200, or on two CPU cores
    gpus     how many GPUs it needs; 0: a CPU
    kernels  the groups of GPU kernels that it measures, of bench/kernels/
    needs    a program, a package or a folder that it also needs; empty: nothing
    """

    name: str
    command: str
    results: str
    minutes: float
    gpus: int = 1
    kernels: tuple[str, ...] = ("attention",)
    needs: str = ""


STEP = ("attention", "model")  # the kernels of a training step
LAYOUTS = "documents alibi soft_cap sinks"
WINDOWED = "score=window score.window=1024 'score.layers=[{},{window:null}]'"
ONE_SHAPE = "bench.train_step --attention flash --dropout 0"


def step(name: str, arguments: str, minutes: float) -> Part:
    """A part of bench.train_step."""
    return Part(f"train-step-{name}", arguments, "train-step", minutes, kernels=STEP)


def gpus(count: int, cases: str, minutes: float) -> Part:
    """A part of bench.several_gpus."""
    name, command = f"{count}-gpus-{cases.replace(' ', '-')}", f"bench.several_gpus --gpus {count} --cases {cases}"
    kernels = STEP if count == 1 else (*STEP, "exchange")
    return Part(name, command, "several-gpus", minutes, count, kernels)


def runs(experiment: str, minutes: float, only: str = "", count: int = 1) -> Part:
    """A part of bench.experiments; `experiment` may name its machine after a colon."""
    chosen = f" --only {only}" if only else ""
    suffix = f"-{only.strip(chr(39)).split(' ')[0].lower()}" if only else ""
    name = experiment.replace(":", "-") + suffix
    kernels = STEP if count else ()
    command = f"bench.experiments {experiment}{chosen}"
    return Part(name, command, experiment.partition(":")[0], minutes, count, kernels)


PARTS = (
    *(
        Part(
            f"attention-{mask}-{head_size}",
            f"bench.attention --masks {mask} --heads {head_size}",
            "attention",
            7,
            needs="flash_attn.cute",
        )
        for mask in ("causal", "full")
        for head_size in (64, 128)
    ),
    Part(
        "attention-variants",
        f"bench.attention --name attention-variants --masks causal window {LAYOUTS} --lengths 16384 --dropout 0 0.1 "
        "--only flash flash-plain flex",
        "attention-variants",
        6,
    ),
    Part(
        "kernel-paths-causal",
        "bench.attention.kernel_paths --variants causal --lengths 128 256 512 1024 2048 4096 8192 16384",
        "kernel-paths",
        4,
    ),
    *(
        Part(
            f"kernel-paths-{head_size}",
            f"bench.attention.kernel_paths --heads {head_size} --variants full window {LAYOUTS} "
            "--lengths 128 256 512 1024 2048 16384",
            "kernel-paths",
            6,
        )
        for head_size in (64, 128)
    ),
    Part("formulas", "bench.attention.formulas", "formulas", 4),
    Part("bytes", "bench.attention.bytes_moved", "bytes", 2, needs="ncu"),
    Part("softmax", "bench.attention.softmax", "softmax", 1, kernels=("softmax",)),
    Part("decode", "bench.generate.decode", "decode", 1, kernels=("cache",)),
    Part("generate-one", "bench.generate --cases one", "generate", 3, kernels=("attention", "cache")),
    Part("parts", "bench.parts", "parts", 7, kernels=STEP),
    Part("llama-train", "bench.llama --cases train", "llama", 3, kernels=STEP),
    Part("llama-decode", "bench.llama --cases decode", "llama", 1, kernels=("attention", "cache")),
    Part("llama-cpu", "bench.llama --cases cpu", "llama", 8, gpus=0),
    Part("generate-many", "bench.generate --cases many", "generate", 3, kernels=("attention", "cache")),
    *(step(name, f"bench.train_step --attention {name}", 6) for name in ("flash", "sdpa", "naive")),
    step("bf16", "bench.train_step --attention flash -- training.residual_in_fp32=false", 6),
    step("window", f"{ONE_SHAPE} --shapes 4x8192 -- {WINDOWED}", 1),
    step("documents", f"{ONE_SHAPE} --shapes 4x8192 -- data.documents=mask", 1),
    step("recompute", f"{ONE_SHAPE} --shapes 32x1024 --recompute attention around_attention block", 3),
    *(
        Part(
            f"train-step-{model}",
            f"{ONE_SHAPE} --name train-step-sizes --shapes 16x1024 2x8192 -- model={model}",
            "train-step-sizes",
            2,
            kernels=STEP,
        )
        for model in ("gpt2-medium", "gpt2-large", "gpt2-xl")
    ),
    *(
        Part(
            f"nanogpt-{rate}",
            f"bench.train_step.nanogpt {NANOGPT} --dropout {rate}",
            "nanogpt",
            6,
            kernels=(),
            needs=str(NANOGPT),
        )
        for rate in ("0", "0.1")
    ),
    runs("parity", 5),
    runs("dropout-parity", 3),
    runs("losses", 4),
    runs("same-training", 5),
    runs("variants", 7),
    runs("break-it", 4),
    runs("crossover", 6),
    runs("block-size", 2),
    runs("context-length", 6, "'learned positions' ALiBi"),
    runs("context-length", 4, "'rotary positions, Muon'"),
    runs("equal-time", 8),
    runs("optimizers", 2),
    runs("shakespeare", 2),
    runs("long-context", 3),
    runs("memory-wall", 8),
    gpus(1, "bits eager muon quarter half", 7),
    gpus(1, "million", 9),
    gpus(2, "speed bits eager muon quarter half", 7),
    gpus(2, "xl", 3),
    gpus(2, "four", 9),
    gpus(2, "xl-long", 6),
    gpus(4, "speed bits eager muon xl million", 8),
    Part(
        "train-step-two-gpus",
        "bench.train_step --name train-step-two-gpus --gpus 1 2 --attention flash --shapes 32x1024 --dropout 0.1",
        "train-step-two-gpus",
        2,
        2,
        kernels=STEP,
    ),
    runs("long-context:two-gpus", 3, count=2),
    runs("default", 5, count=0),
    runs("optimizers:cpu", 7, count=0),
    runs("first-ablation", 5, count=0),
    *(Part(f"arena-{case}", f"bench.arena {case}", "arena", MOST_MINUTES, 0, kernels=()) for case in (*SEEDS, *SWEEPS)),
    Part("generate-cpu", "bench.generate --device cpu", "generate", 1, 0, kernels=()),
    Part("attention-faults", "tests.attention.faults", "attention-faults", 5, 0, kernels=()),
    Part("attention-right", "tests.attention.faults --right 5 --quick", "attention-right", 5, 0, kernels=()),
)


def missing(part: Part, gpus_here: int) -> str:
    """What this machine lacks for a part; empty if it can run the part."""
    if part.gpus > gpus_here:
        return f"{part.gpus} GPUs" if part.gpus > 1 else "a GPU"
    if not part.needs or shutil.which(part.needs) or Path(part.needs).is_dir():
        return ""
    try:
        module = importlib.util.find_spec(part.needs)
    except (ModuleNotFoundError, ValueError):
        module = None
    return "" if module else part.needs
