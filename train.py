"""Train a GPT whose attention implementation is one line of configuration.

python train.py attention=tiled seq_len=1024
python train.py --help
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

# Before torch is imported: threads that spin for each other halve the speed of a CPU that has other work too.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from recipe.run import process

if __name__ == "__main__":
    process.begin()

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from data.chat import end_at_answers
from data.errors import brief
from data.prepare import prepare as prepare_data
from data.tasks import TASKS, TaskBatches, TaskData
from data.tokenizers import load_tokenizer
from model.gpt import GPT
from model.linear import products_by
from recipe import CONF
from recipe.distributed.ranks import from_first_rank, joined
from recipe.distributed.world import World
from recipe.infer.generation.sampling import Sampling
from recipe.infer.generation.text import stream
from recipe.infer.huggingface import HuggingFace
from recipe.run.build import (
    build_model,
    build_run,
    build_trainer,
    check_text,
    cpu_threads,
    find_checkpoint,
    restore,
)
from recipe.run.compose import to_config
from recipe.run.config import Config, as_plain
from recipe.run.describe import describe_complete, describe_end, describe_run
from recipe.run.launch import launch
from recipe.run.mistakes import check_ranks_agree
from recipe.run.record import recorded_out_of_memory
from recipe.run.resume import check_unused
from recipe.run.run_folder import locked
from recipe.run.wording import one_sentence
from recipe.training.device import computing_with, cpu_memory_limit, oom_guard, resolve_device, too_large_model
from recipe.training.loop import Run, fit
from recipe.training.step import Trainer


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def main(cfg: DictConfig) -> None:
    """A job of Hydra's. Ends with status 128 + n where signal n stopped it."""
    job, config = HydraConfig.get(), to_config(cfg)
    folder = Path(os.path.relpath(job.runtime.output_dir))
    first = World.from_environment().rank == 0
    with one_sentence(), locked(folder) if first else nullcontext():
        if first:
            check_unused(folder, config)  # another run may have begun since the command line was checked
        given: Any = OmegaConf.to_container(job.overrides.task, resolve=False)
        status = train(config, folder, given)
    if status:
        sys.exit(status)


def train(config: Config, folder: Path, overrides: list[str]) -> int:
    """Train a run in its folder. Returns 0, or 128 + n where signal n ended it early. Raises UserError."""
    world, device = World.from_environment(config.parallel.context), resolve_device(config.device)
    with joined(world, device):
        check_ranks_agree(config)
        folder = from_first_rank(lambda: folder)
        checkpoint = find_checkpoint(config, folder, world)
        with computing_with(cpu_threads(config, checkpoint)), products_by(config.training.cpu.products):
            run = prepare(config, folder, overrides, checkpoint, world, device)
            if run is None:
                return 0
            with run.record:
                for line in describe_run(config, run.trainer):
                    run.record.print(line)
                done = fit(run)
                finish(run, done, folder)
            run.trainer.release()
    run.interruption.pass_on()
    ended = done == config.training.steps or run.record.reached is not None
    return 0 if ended else 128 + (run.interruption.number or 0)


def prepare(
    config: Config, folder: Path, overrides: list[str], checkpoint: Path | None, world: World, device: torch.device
) -> Run | None:
    """The run of a configuration, ready to train from a checkpoint; None if it is complete already."""
    torch.compiler.reset()  # drops compiled code of an earlier job of a sweep in this process
    task = TASKS.get(config.data.name)
    data = TaskData(task) if task else prepare_data(config.data, announce_wait=world.rank == 0)
    check_text(config, data)  # before a model of that length is built
    with (
        recorded_out_of_memory(folder, as_plain(config), overrides, device, world),
        oom_guard(too_large_model(config.model, device)),
        cpu_memory_limit(config.training.cpu.memory_gib if device.type == "cpu" else None),
    ):
        trainer = build_trainer(
            config, build_model(config, data.vocab_size, device, world, HuggingFace()), device, world
        )
    start = restore(trainer, config, checkpoint, data)
    if complete := describe_complete(config, folder, start):
        if world.rank == 0:
            print(complete)
        return None
    return build_run(config, folder, overrides, data, trainer, start)


def finish(run: Run, done: int, folder: Path) -> None:
    """Say why a run ended early and how it goes on; of a complete one on a text, show what its model generates."""
    if ending := describe_end(run, done, folder):
        run.record.print(ending)
    elif run.trainer.training.sample_tokens and not isinstance(run.batches, TaskBatches):
        model = run.trainer.whole_model()
        if run.trainer.world.rank == 0:
            run.record.print(sample(model, run.trainer, folder))


def sample(model: GPT, trainer: Trainer, folder: Path) -> str:
    """What the model of a complete run generates, or why it does not: an attention may refuse lengths of a text."""
    tokenizer, sampling = load_tokenizer(folder), Sampling(temperature=0.8, top_k=50, seed=trainer.seed)
    end_at_answers(tokenizer, folder)
    try:
        text = "".join(
            stream(model, tokenizer, "\n", trainer.training.sample_tokens, sampling, dtype=trainer.dtype)
        ).strip()
    except Exception as error:
        return f"the run is complete, but has no sample ({brief(error)}); training.sample_tokens=0 asks for none"
    return f"\n{text}\n"


if __name__ == "__main__":
    process.run(lambda: launch(main, HuggingFace()))
