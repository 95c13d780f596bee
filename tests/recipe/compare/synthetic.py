"""Synthetic run folders like those of train.py, generated independently of how the report reads them.

A loss curve is the sum of a decay that all runs share, a slow drift per seed, batch noise per seed and step, and the
implementation's part: rounding that training amplifies, or an error.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.lines import write_lines

# The effect of rounding in one step on the loss, the largest logit and the gradient.
ROUNDING = {
    "fp32": (2e-7, 3e-6, 1e-6),
    "fp16": (3e-5, 4e-3, 2e-3),
    "bf16": (2e-4, 0.03, 0.012),
}

# The effect of a wrong implementation on the final loss, and at equal weights on the first logits and gradients.
ERRORS = {
    "mask_off_by_one": (0.01, 1.0, 0.5),
    "scale": (0.014, 0.5, 0.3),
    "no_rescaling": (0.02, 0.05, 0.25),
    "mask_ignores_layer": (0.003, 0.3, 0.2),
}


SEEDS_APART = 0.008  # the largest difference that rounding makes between runs of a seed: about that between seeds


def _wandering(generator: np.random.Generator, length: int) -> np.ndarray:
    """Noise of unit variance that is correlated over about 30 steps."""
    kernel = np.exp(-np.arange(120) / 30)
    return np.convolve(generator.normal(size=length + 119), kernel, "valid") / np.sqrt(np.sum(kernel**2))


def write_run(
    folder: Path,
    attention: str = "naive",
    seed: int = 1,
    *,
    steps: int = 400,
    seq_len: int = 256,
    batch_size: int = 12,
    precision: str = "bf16",
    device: str = "NVIDIA H200",
    devices: int = 1,
    status: str = "completed",
    stop: int | None = None,
    message: str | None = None,
    non_finite_step: int | None = None,
    error: str | None = None,
    chaos: float = 1.0,
    probe_every: int = 100,
    tokens_per_s: float = 4e5,
    vary: float = 0.02,
    peak_gib: float | None = 9.0,
    overrides: dict[str, Any] | None = None,
    summary: dict[str, Any] | None = None,
) -> Path:
    """Write one run folder.

    stop      the last step done, where that is not all of them
    error     the error of the implementation, a name of ERRORS
    vary      the share by which the speed of steps varies, up and down
    chaos     the factor by which training amplifies rounding in 100 steps, up to the difference between seeds
    """
    loss_noise, logit_noise, grad_noise = ROUNDING[precision]
    done = steps if stop is None else stop
    n = np.arange(steps + 1)
    shared = 2.6 + 8.2 * (1 + n / 12) ** -0.75
    of_seed = np.random.default_rng([seed, 1])
    wander = 0.008 * np.cumsum(of_seed.normal(size=steps + 1)) / np.sqrt(1 + n) * np.minimum(1, n / 50)
    batch = 0.06 * of_seed.normal(size=steps + 1)

    of_implementation = np.random.default_rng([seed, *attention.encode()])
    drift = np.minimum(loss_noise * float(chaos) ** (n / 100), SEEDS_APART) * _wandering(of_implementation, steps + 1)
    if attention == "naive" and error is None:
        drift[:] = 0
    bias, logit_error, grad_error = ERRORS[error] if error else (0.0, 0.0, 0.0)
    smooth = shared + wander + drift + bias * n / steps
    train, val = smooth + batch, smooth + 0.02

    config: dict[str, Any] = {
        "seed": seed,
        "seq_len": seq_len,
        "attention": {
            "name": attention, "dropout": 0.0, "rng": "replay", "block_q": 64, "block_k": 64, "ablate": "none",
        },
        "model": {"name": "gpt2", "n_layers": 12, "n_heads": 12, "n_embd": 768},
        "data": {"name": "stdlib"},
        "optimizer": {"name": "adamw", "lr": 6e-4},
        "training": {"steps": steps, "batch_size": batch_size, "precision": "auto"},
        "parity": {"every": probe_every, "reference": "naive"},
    }  # fmt: skip
    for name, value in (overrides or {}).items():
        part, _, option = name.rpartition(".")
        (config.setdefault(part, {}) if part else config)[option] = value

    lines = []
    for step in range(done + 1):
        line: dict[str, Any] = {}
        if step % 50 == 0 or step == done:
            line["val/loss"] = val[step]
        if step and (step % 10 == 0 or step == done):
            line |= {
                "train/loss": train[step],
                "throughput/tokens_per_s": tokens_per_s * of_seed.uniform(1 - vary, 1 + vary),
                "throughput/step_ms": 1e3 * batch_size * seq_len / tokens_per_s,
            }
        if probe_every and step and step % probe_every == 0 and (error or attention != "naive"):
            wobble = of_implementation.lognormal(0, 0.25, size=6)
            line |= {
                "parity/loss_diff": abs(of_implementation.normal()) * loss_noise,
                "parity/logits_max_diff": logit_noise * wobble[0] + logit_error,
                "parity/grad_rel_err": grad_noise * wobble[1] + grad_error,
                "parity/worst_parameter": "h.3.attn.c_attn.weight",
                "parity/noise_loss_diff": abs(of_implementation.normal()) * loss_noise,
                "parity/noise_logits_max_diff": logit_noise * wobble[2],
                "parity/noise_grad_rel_err": grad_noise * wobble[3],
                "parity/tokens": [batch_size, seq_len],
                "parity/attention_error": 0.9 if error else 0.5,
                "parity/attention_error_higher": 40.0 if error else 0.3,
                "parity/attention_precision": "fp64" if precision == "fp32" else "fp32",
                "parity/attention_worst": "layer 3, training, fp32: dk of sequence 0, head 1, key 31",
                "parity/attention_unseen": "the log-sum-exp (it is not returned)",
            }
        if line:
            lines.append({"step": step} | line)

    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    write_lines(folder / "metrics.jsonl", lines)
    content = {
        "status": status,
        "message": message,
        "non_finite_step": non_finite_step,
        "attention": attention,
        "config": config,
        "step": done,
        "steps": steps,
        "train_loss": train[done] if done else None,
        "val_loss": val[done] if done else None,
        "median": {
            "throughput/tokens_per_s": tokens_per_s,
            "throughput/step_ms": 1e3 * batch_size * seq_len / tokens_per_s,
            "throughput/mfu_causal": tokens_per_s * 8e8 / 989e12,
        }
        if done
        else {},
        "peak": {"memory/peak_allocated_gib": peak_gib},
        "memory_source": "cuda",
        "wall_time_s": done * batch_size * seq_len / tokens_per_s,
        "tokens": done * batch_size * seq_len,
        "parameters": 124_000_000,
        "device": {"type": "cuda", "name": device, "count": devices},
        "precision": precision,
        "versions": {"python": "3.12", "torch": "2.11.0", "triton": "3.6.0", "cuda": "12.8"},
        "git": {"commit": "0123456789abcdef", "dirty": False},
        "started": f"2026-11-20T10:{seed:02d}:00+00:00",
    }
    (folder / "summary.json").write_text(json.dumps(content | (summary or {})))
    return folder


def write_runs(
    folder: Path, attentions: Sequence[str] = ("naive", "flash"), seeds: Sequence[int] = (1,), **options: Any
) -> None:
    """A run of each attention with each seed."""
    for attention in attentions:
        for seed in seeds:
            write_run(folder / f"{attention}-{seed}", attention, seed, **options)
