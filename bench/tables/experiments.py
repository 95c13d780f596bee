"""Runs of train.py: README, docs/experiments.md, docs/speed.md, docs/results.md, docs/training-options.md."""

from __future__ import annotations

import numpy as np

from bench.experiments.losses import chart as losses_chart
from bench.markdown import pivot, table
from bench.record import Row
from bench.tables.blocks import Rows, block, figure
from bench.tables.labels import case, thousands
from bench.tables.training import long_speeds, second_step
from recipe.drawing import Chart
from recipe.wording import times

TILED = "tiled, tiles of 256"


@block("commands", "cpu:default", "shakespeare", "train-step", "long-context")
def commands(cpu: Rows, shakespeare: Rows, steps: Rows, sequences: Rows) -> str:
    """README's commands with their times and results."""
    small = {case(row, "command"): row for row in cpu}
    (plays,), (long,) = shakespeare, (row for row in sequences if row["case"]["gpus"] == 1)
    best_step, best = min(plays["evaluations"], key=lambda evaluation: evaluation[1])
    (step,) = (
        row
        for row in steps
        if (row["attention"], row["shape"], row["dropout"], row["extra"]) == ("flash", "4x8192", 0.0, [])
        and row["recompute"] == "none"
    )
    text = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
    lines = [
        ["`python train.py`", "2 CPU cores", seconds(small["default"]), loss(small["default"])],
        [
            "`python train.py data=text data.path=input.txt seq_len=64 training.steps=2000`, on "
            f"[tiny Shakespeare]({text})",
            "2 CPU cores", seconds(small["shakespeare"]), loss(small["shakespeare"]),
        ],
        [
            "`python train.py experiment=shakespeare attention=flash training.compile=true`", "H200", seconds(plays),
            f"best validation loss {best:.3f}, at step {best_step:,} (nanoGPT: 1.47)",
        ],
        [
            "`python train.py model=gpt2 attention=flash data.tokenizer=gpt2 seq_len=8192 training.batch_size=4 "
            "training.compile=true`",
            "H200", f"{step['step_ms']:.0f} ms per step of 32,768 tokens",
            f"{thousands(step['tokens_per_s'])},000 tokens/s, {step['peak_allocated_gib']:.1f} GiB",
        ],
        [
            "`python train.py experiment=long_context attention=flash`", "H200",
            f"{second_step(long):.0f} s per step of 524,288 tokens",
            f"{round(long_speeds(sequences)[1], -2):,.0f} tokens/s, {long['peak_allocated_gib']:.1f} GiB",
        ],
    ]  # fmt: skip
    return table(["command", "on", "time", "result"], lines)


def seconds(row: Row) -> str:
    """The time of a run."""
    return f"{row['wall_s']:.0f} s"


def loss(row: Row) -> str:
    """The validation loss at the end of a run."""
    return f"validation loss {row['val_loss']:.2f}"


@block("parity", "parity")
def parity(rows: Rows) -> str:
    """Validation losses, and the distance of training losses in units of the distance of naive's seeds."""
    losses = {(case(row, "attention"), row["case"]["seed"]): np.array(row["losses"])[:, 1] for row in rows}
    naive, spread = losses["naive", 1], spread_of_seeds(losses)
    lines = []
    for row in rows:
        attention, seed = case(row, "attention"), row["case"]["seed"]
        label = TILED if attention == "tiled" else attention
        distances = "" if attention == "naive" else f"{distance(losses[attention, seed], naive) / spread:.2f}"
        lines.append([label, str(seed), f"{row['val_loss']:.4f}", distances])
    return table(["", "seed", "validation loss", "distance from naive's training loss, two seeds = 1"], lines)


def distance(losses: np.ndarray, reference: np.ndarray) -> float:
    """The mean absolute difference of two runs' training losses over the last third of the steps."""
    last = len(reference) // 3
    return float(np.abs(losses[-last:] - reference[-last:]).mean())


def spread_of_seeds(losses: dict[tuple[str, int], np.ndarray], reference: str = "naive") -> float:
    """The mean distance of the reference's other seeds from its first."""
    first = losses[reference, 1]
    others = [value for (name, seed), value in losses.items() if name == reference and seed != 1]
    return float(np.mean([distance(other, first) for other in others]))


@block("dropout-parity", "dropout-parity")
def dropout_parity(rows: Rows) -> str:
    """Validation losses with dropout."""
    return parity(rows)


@block("same-training", "same-training")
def same_training(rows: Rows) -> str:
    """The fast step beside the plain one."""
    names = {"plain": "plain", "fast": "fast", "fast-bf16-residual": "fast, residual stream in bf16"}
    losses = {(case(row, "run"), row["case"]["seed"]): np.array(row["losses"])[:, 1] for row in rows}
    plain, spread = losses["plain", 1], spread_of_seeds(losses, "plain")
    lines = []
    for row in rows:
        name, seed = case(row, "run"), row["case"]["seed"]
        label = names[name] + (", another seed" if seed != 1 else "")
        shown = f"{distance(losses[name, seed], plain) / spread:.2f}" if (name, seed) != ("plain", 1) else ""
        lines.append([label, f"{row['val_loss']:.4f}", shown])
    return table(["", "final validation loss", "distance from plain's training loss, two seeds = 1"], lines)


@block("variants", "variants")
def variants(rows: Rows) -> str:
    """Validation losses of the scores, the lowest first."""
    ordered = sorted(rows, key=lambda row: (case(row, "attention") != "naive", row["val_loss"]))
    return pivot(
        ordered,
        lambda row: f"`{case(row, 'score')}`",
        lambda row: case(row, "attention"),
        lambda row: f"{row['val_loss']:.4f}",
        corner="`score=`",
    )


@block("break-it", "break-it")
def break_it(rows: Rows) -> str:
    """The effect of leaving out a line, in each precision."""
    by_case = {(case(row, "ablate"), case(row, "precision")): row for row in rows}
    precisions = ["fp32", "bf16", "fp16"]

    def line(label: str, ablate: str, value: str) -> list[str]:
        cells = []
        for precision in precisions:
            row = by_case[ablate, precision]
            shown = {
                "loss": f"{row.get('val_loss', 0):.3f}",
                "step": str(row.get("non_finite_step")),
                "probe": times(row["probe"]["gradients"]).removesuffix(" times") if "probe" in row else "",
            }
            cells.append(shown[value])
        return [label, *cells]

    return table(
        ["`attention.ablate=`", *precisions],
        [
            line("`none`: validation loss", "none", "loss"),
            line("`no_max_subtraction`: loss not finite at step", "no_max_subtraction", "step"),
            line("`no_rescaling`: validation loss", "no_rescaling", "loss"),
            line("`no_rescaling`: error of gradients, times rounding", "no_rescaling", "probe"),
        ],
    )


@block("block-size", "block-size")
def block_size(rows: Rows) -> str:
    """Time and loss over the tile of tiled."""
    shown = sorted(rows, key=lambda row: row["case"]["tile"])
    lines = (
        [case(row, "tile"), f"{row['step_ms']:.0f}", f"{row['train_loss']:.4f}", f"{row['probe']['gradients']:.1f}"]
        for row in shown
    )
    return table(["tile", "ms per step", "training loss", "error of gradients, times rounding"], lines)


@block("shakespeare", "shakespeare")
def shakespeare(rows: Rows) -> str:
    """nanoGPT's best-known small run."""
    (row,) = rows
    step, best = min(row["evaluations"], key=lambda evaluation: evaluation[1])
    after = dict(row["elapsed_s"])[step]
    return table(
        ["", "nanoGPT", "ours"],
        [
            ["best validation loss", "1.47", f"{best:.3f}"],
            ["at step", "", f"{step:,}"],
            ["seconds until then", "", f"{after:.0f}"],
            ["seconds for all steps", "", f"{row['wall_s']:.0f}"],
        ],
    )


@block("optimizers", "optimizers")
def optimizers(rows: Rows) -> str:
    """AdamW and Muon with GPT-2."""
    lines = (
        [
            f"`optimizer={case(row, 'optimizer')}`", f"{row['val_loss']:.3f}", f"{row['step_ms']:.0f}",
            f"{row['peak_allocated_gib']:.1f}",
        ]
        for row in rows
    )  # fmt: skip
    return table(["", "validation loss", "ms per step", "GiB"], lines)


@block("optimizers-cpu", "cpu:optimizers")
def optimizers_on_a_cpu(rows: Rows) -> str:
    """AdamW and Muon with the default model, and the averages of their weights."""
    names = {"adamw": "`optimizer=adamw`", "adamw 6e-3": "`optimizer=adamw optimizer.lr=6e-3`"}
    names["muon"] = "`optimizer=muon`"
    lines = []
    for row in rows:
        label = names[case(row, "optimizer")]
        lines.append([label, *(f"{value:.3f}" for step, value in row["evaluations"] if step)])
        if "evaluations_ema" in row:
            average = [f"{value:.3f}" for step, value in row["evaluations_ema"] if step]
            lines.append(["its average, `training.ema=0.99`", *average])
    steps = [f"{step:,}" for step, _ in rows[0]["evaluations"] if step]
    return table(["validation loss after steps", *steps], lines)


@block("first-ablation", "cpu:first-ablation")
def first_ablation(rows: Rows) -> str:
    """The final validation losses of docs/first-ablation.md, seed by seed, and the mean of their differences."""
    losses = {(case(row, "window"), row["case"]["seed"]): row["val_loss"] for row in rows}
    seeds = sorted({seed for _, seed in losses})
    pairs = [(losses["null", seed], losses["16", seed]) for seed in seeds]
    differences = [window - full for full, window in pairs]
    lines = [
        [str(seed), f"{full:.4f}", f"{window:.4f}", f"{window - full:+.4f}"]
        for seed, (full, window) in zip(seeds, pairs, strict=True)
    ]
    means = [f"{np.mean(column):.4f}" for column in zip(*pairs, strict=True)]
    spreads = [f"{np.std(column, ddof=1):.4f}" for column in zip(*pairs, strict=True)]
    lines.append(["mean", *means, f"{np.mean(differences):+.4f}"])
    lines.append(["standard deviation", *spreads, f"{np.std(differences, ddof=1):.4f}"])
    return table(["seed", "every earlier token", "the last 16", "difference"], lines)


@figure("losses", "losses")
def losses_figure(rows: Rows) -> Chart:
    """README's first figure."""
    return losses_chart(rows)
