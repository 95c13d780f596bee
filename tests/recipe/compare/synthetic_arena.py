"""Synthetic arenas: a folder with a plan and runs whose losses are known, written without the code that reads them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.lines import write_lines
from tests.recipe.compare.synthetic import write_run

STEPS = 300
TOKENS = 1024  # of a step
PROBES = {
    "mqar": {
        "chance": 1 / 64,
        "lengths": [64, 128],
        "distances": [1, 2, 4, 8, 16, 32, 64],
        "accuracy": [[None, 1.0, 1.0, 0.97, 0.5, 0.25, None], [None, None, 1.0, 0.9, 0.4, 0.2, 0.0]],
    },
    "position_loss": {"trained": 64, "positions": [0, 1, 3, 9, 63, 127], "loss": [4.0, 3.0, 2.5, 2.2, 2.0, 2.4]},
}


def losses_of(seed: int, effect: float, deviation: float, arm: str) -> float:
    """The final loss: a part that all arms of a seed share, the arm's effect, and what pairing does not remove."""
    shared = np.random.default_rng(seed).normal(0, 0.02)
    own = np.random.default_rng([seed, *arm.encode()]).normal(0, deviation)
    return 2.5 + shared + effect + (own if effect or deviation else 0.0)


def write_arena(
    folder: Path,
    effects: Mapping[str, float],
    *,
    seeds: int = 6,
    deviation: float = 0.004,
    looks: int = 1,
    looked: tuple[int, ...] | None = None,
    step_ms: Mapping[str, float] | None = None,
    flops: Mapping[str, float] | None = None,
    rates: Mapping[float, float] | None = None,
    changes: Mapping[tuple[str, int], dict[str, Any] | None] | None = None,
    arguments: tuple[str, ...] = ("experiment=arena",),
) -> Path:
    """Write an arena whose first arm is the baseline.

    effects    of each arm on the final loss
    deviation  of the part of the loss that depends on arm and seed
    looks      that are planned; looked: the seeds of each that was taken
    step_ms    of each arm; 50 by default
    rates      learning rates that each arm tried, and their effect on the loss; the lowest is chosen
    changes    by (arm, seed): other values in the summary, or None for a run without a folder
    """
    arms, rates = list(effects), dict(rates or {})
    best = min(rates, key=rates.__getitem__) if rates else 0.003
    plan = {
        "format": 1,
        "arms": {arm: [f"score={arm}"] for arm in arms},
        "baseline": arms[0],
        "common": ["experiment=arena"],
        "arguments": list(arguments),
        "first_seed": 1,
        "margin": 0.005,
        "planned_looks": looks,
        "lr": {arm: sorted(rates) for arm in arms},
        "lr_seeds": 1,
        "commit": "0123456789abcdef",
        "looks": [{"seeds": n, "planned": "2026-11-20T10:00:00+00:00"} for n in looked or (seeds,)],
        "chosen": dict.fromkeys(arms, best) if rates else {},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "arena.json").write_text(json.dumps(plan))
    number = 0
    for arm in arms if len(rates) > 1 else []:
        for rate, effect in sorted(rates.items()):
            write(folder / str(number), arm, 1_000_001, rate, 2.5 + effects[arm] + effect, 50.0, 1e6, {})
            number += 1
    for seed in range(1, seeds + 1):
        for arm in arms:
            change = (changes or {}).get((arm, seed), {})
            if change is not None:
                loss = losses_of(seed, effects[arm], deviation, arm)
                costs = (step_ms or {}).get(arm, 50.0), (flops or {}).get(arm, 1e6)
                write(folder / str(number), arm, seed, best, loss, *costs, change)
            number += 1
    return folder


def write(
    folder: Path, arm: str, seed: int, rate: float, loss: float, ms: float, flops: float, change: dict[str, Any]
) -> None:
    """One run, whose validation loss falls on a straight line by a nat over the run."""
    summary = {
        "tokens": STEPS * TOKENS,
        "val_loss": loss,
        "train_loss": loss,
        "median": {"throughput/step_ms": ms, "throughput/tokens_per_s": 1e3 * TOKENS / ms},
        "memory_source": "attention",
        "flops_per_token": flops,
        "probes": PROBES,
    }
    settings = {"score.name": arm, "optimizer.lr": rate, "arena.arm": arm}
    write_run(folder, "naive", seed, steps=STEPS, probe_every=0, overrides=settings, summary=summary | change)
    lines: list[dict[str, Any]] = [
        {"step": step, "val/loss": loss + 1 - step / STEPS, "train/loss": loss + 1 - step / STEPS}
        for step in range(0, STEPS + 1, 50)
    ]
    lines[-1] |= {"probe/mqar": 1 - loss / 10, "probe/mqar_x2": 0.25}
    write_lines(folder / "metrics.jsonl", lines)
