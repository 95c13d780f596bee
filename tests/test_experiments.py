"""conf/experiment/ keeps its promises: the commands in its files, the launchers, a sweep from the command line."""

import shlex
from pathlib import Path

import numpy as np
import pytest
import torch

from data.batches import eval_batches
from model.mistakes import model_mistakes
from recipe.distributed.world import World
from recipe.run import compose
from recipe.run.arena import checked_plan
from recipe.run.config import Config
from tests.programs import ROOT, completed, summary

EXPERIMENTS = sorted((ROOT / "conf" / "experiment").glob("*.yaml"))


def commands(file: Path) -> list[list[str]]:
    """The arguments of each `python train.py ...` in a file's comments."""
    text = file.read_text().replace("\\\n#", " ")
    lines = [line.lstrip("# ") for line in text.splitlines() if line.startswith("# python train.py ")]
    return [[compose.as_hydra_reads(argument) for argument in shlex.split(line)[2:]] for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("file", EXPERIMENTS, ids=lambda file: file.stem)
def test_every_command_in_a_file_composes(file):
    assert f"experiment={file.stem}" in commands(file)[0]
    for command in commands(file):
        config = compose.to_config(compose.composed(compose.jobs(command)[-1]))
        if config.arena.arms:
            checked_plan(config, command, lambda of_arm: model_mistakes(of_arm.model))


def configs(experiment: str) -> list[Config]:
    """The configuration of each of its jobs."""
    return [compose.to_config(compose.composed(job)) for job in compose.jobs([f"experiment={experiment}"])]


def test_tiles_of_the_block_size_experiment_are_square():
    tiles = [(config.attention.block_q, config.attention.block_k) for config in configs("block_size")]
    assert tiles == [(b, b) for b in (16, 32, 64, 128)]


@pytest.mark.parametrize("name", ["crossover", "context_length"])
def test_a_length_changes_the_batch_and_not_the_tokens_of_a_step(name):
    tokens = {config.seq_len * config.training.share(config.seq_len, World()).sequences for config in configs(name)}
    assert len(tokens) == 1


def test_every_context_length_is_evaluated_on_the_same_text():
    text = np.arange(200_000, dtype=np.uint32)
    evaluated = set()
    for config in configs("context_length"):
        batch = config.training.batch_size, config.training.eval_batches, config.training.eval_span
        windows = eval_batches(text, config.seq_len, *batch)
        evaluated.add(tuple(torch.cat([targets.flatten() for _, targets, *_ in windows]).tolist()))
    assert len(evaluated) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_sweep_is_one_command_and_is_not_repeated(tmp_path):
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 200)
    small = [
        *("model.n_layers=1", "model.n_heads=2", "model.n_embd=16", "seq_len=16", "device=cpu"),
        *("data=text", f"data.path={tmp_path / 'text.txt'}", "data.tokenizer=bytes", "tracking.mode=disabled"),
        *("training.steps=2", "training.eval_every=0", "schedule.warmup_steps=0", "parity.every=1"),
    ]
    command = ["experiment=parity", "attention=tiled", "seed=1", *small]
    printed = completed(ROOT / "train.py", *command, folder=tmp_path)
    (run,) = tmp_path.glob("multirun/*/*/0")
    found = summary(run)
    assert (found["status"], found["attention"], found["parity"]["checks"]) == ("completed", "tiled", 2)
    assert found["config"]["tracking"]["group"] == f"parity-{run.parts[-3]}-{run.parts[-2]}"
    assert f"python compare.py {run.parent.relative_to(tmp_path)}" in printed

    again = completed(ROOT / "train.py", *command, f"hydra.sweep.dir={run.parent}", folder=tmp_path)
    assert "1 job, 1 of them done already" in again
    assert list(tmp_path.glob("multirun/*/*/0")) == [run]
