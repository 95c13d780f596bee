"""Train a GPT whose attention implementation is one line of configuration.

python train.py attention=tiled seq_len=1024
python train.py --help
"""

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

from attention.check.judge import computing_with
from data.feed import feed
from data.prepare import prepare
from data.tasks import TASKS, TaskData
from recipe import CONF
from recipe.distributed.ranks import check_agreed, from_first_rank, joined
from recipe.distributed.world import World
from recipe.files import plain
from recipe.infer.generation.text import sample_of_run
from recipe.infer.huggingface import HuggingFace
from recipe.run.build import build_run
from recipe.run.compose import to_config
from recipe.run.config import Config
from recipe.run.describe import describe_complete, describe_end
from recipe.run.launch import launch
from recipe.run.resume import check_unused, find_checkpoint
from recipe.run.run_folder import full_disk_explained, locked
from recipe.run.wording import one_sentence
from recipe.training.device import resolve_device
from recipe.training.loop import fit

WEIGHTS = HuggingFace()  # of init_from


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def main(cfg: DictConfig) -> None:
    """A job of Hydra's. Ends with status 128 + n where signal n stopped it."""
    job, config = HydraConfig.get(), to_config(cfg)
    folder = Path(os.path.relpath(job.runtime.output_dir))
    first = World.from_environment().rank == 0
    again = f"hydra.run.dir={folder} resume=auto"
    with one_sentence(), full_disk_explained(folder, again), locked(folder) if first else nullcontext():
        if first:
            check_unused(folder, config)  # another run may have begun since the command line was checked
        given: Any = OmegaConf.to_container(job.overrides.task, resolve=False)
        status = train(config, folder, given)
    if status:
        sys.exit(status)


def train(config: Config, folder: Path, overrides: list[str]) -> int:
    """Train a run in its folder. Returns 0, or 128 + n where signal n ended it early. Raises UserError."""
    options, training, cpu = plain(config), config.training, config.training.cpu
    device = resolve_device(config.device)
    world = World.from_environment(config.parallel.context)
    with joined(world, device):
        check_agreed(options)
        folder = from_first_rank(lambda: folder)
        checkpoint = None if config.resume is None else find_checkpoint(folder)
        if complete := describe_complete(training, folder, checkpoint):
            if world.rank == 0:
                print(complete)
            return 0
        # As configured, else as in the checkpoint, else as on the first rank.
        recorded = checkpoint and checkpoint.metadata.get("cpu_threads")
        threads = cpu.threads or recorded or from_first_rank(torch.get_num_threads)
        share = training.share(config.seq_len, world)
        with computing_with(threads):
            task = TASKS.get(config.data.name)
            data = TaskData(task) if task else prepare(config.data, announce_wait=world.rank == 0)
            fed = feed(data, config.data, config.seq_len, share, config.seed, training.eval_batches, training.eval_span)
            run = build_run(config, fed, folder, overrides, checkpoint, world, device, WEIGHTS)
            with run.record:
                done = fit(run)
                if ending := describe_end(run, done, folder):
                    run.record.print(ending)
                elif training.sample_tokens and not task:
                    model = run.trainer.whole_model()  # every rank calls this
                    if world.rank == 0:
                        run.record.print(sample_of_run(model, folder, training.sample_tokens, config.seed))
            run.trainer.release()
    run.interruption.pass_on()
    ended = done == training.steps or run.record.reached is not None
    return 0 if ended else 128 + (run.interruption.number or 0)


if __name__ == "__main__":
    process.run(lambda: launch(main, WEIGHTS))
