"""From the command line to a run. Mistakes are reported before Hydra makes a run folder."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

# Hydra's parser of flags has no public name, and a copy would drift from the one that hydra.main uses.
from hydra._internal.utils import get_args_parser
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from recipe.distributed.world import World
from recipe.run.arena import arena_sweep_mistakes, is_arena, stray_options
from recipe.run.check import mistakes
from recipe.run.compose import (
    Composition,
    as_hydra_reads,
    by_key,
    compose_right,
    jobs,
    lines,
    register_all,
    replaced,
    swept_mistakes,
    to_config,
)
from recipe.run.config import ConfigError
from recipe.run.queue import launcher
from recipe.run.queue.jobs import share_checkout, without
from recipe.run.resume import check_folder, check_writable, resumed
from recipe.run.run_folder import check_not_running
from recipe.run.starting import with_start
from recipe.run.weights import Weights
from recipe.run.wording import explain, one_sentence

MANY_JOBS = 50  # take seconds to compose


def launch(main: Callable[[], None], weights: Weights) -> None:
    """Call `main`, decorated with hydra.main, on the checked command line, in which `init_from` names `weights`."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises errors that it would print over several lines
    register_all()
    with one_sentence():
        sys.argv[1:] = prepare(sys.argv[1:], weights)
        main()


def prepare(arguments: list[str], weights: Weights | None = None) -> list[str]:
    """The arguments for Hydra: checked, and with the overrides of the run that `resume` names.

    Raises UserError with one line for each mistake.
    """
    arguments = [as_hydra_reads(argument) for argument in arguments]
    args, rest = get_args_parser().parse_known_args(arguments)
    refuse([f"{f} is not a flag of train.py; overrides have no dashes: key=value." for f in rest if f.startswith("-")])
    if rest:  # argparse accepts overrides in one place only, and -m may stand between them
        args.overrides += rest
        arguments = [*(argument for argument in arguments if argument not in args.overrides), *args.overrides]
    if args.experimental_rerun:
        raise ConfigError("--experimental-rerun would run code from a pickled file; use resume=<run folder>.")
    if args.multirun and (args.cfg or args.info):
        raise ConfigError("-m cannot be combined with --cfg or --info; leave it out to see the configuration of a run.")
    if args.help or args.hydra_help or args.cfg or args.info:
        return arguments
    if weights is not None and (started := with_start(args.overrides, weights)) != args.overrides:
        arguments = [*(argument for argument in arguments if argument not in args.overrides), *started]
        args.overrides = started
    try:
        composition = compose_right(args.overrides)
        if not composition.wrong and World.from_environment().rank == 0:
            for sentence in replaced(args.overrides):
                print(f"note: {sentence}", file=sys.stderr)
        if args.multirun or composition.multirun:
            if composition.cfg is not None:
                more = launcher.continuing(args.overrides, Path(composition.cfg.hydra.sweep.dir))
                arguments += more
                composition = compose_right([*args.overrides, *more]) if more else composition
            cfg = check_sweep(composition, weights)
            if (ranks := World.from_environment().size) > 1:
                raise ConfigError(
                    f"A sweep starts its jobs itself, and {ranks} ranks were started; start it without torchrun. "
                    "hydra/launcher=gpus runs a job on each GPU."
                )
            launcher_class = cfg.hydra.launcher._target_
            if launcher_class.endswith(".SlurmLauncher") and shutil.which("srun") is None:
                raise ConfigError(
                    "hydra/launcher=slurm needs a machine of a Slurm cluster, and srun is not installed here; "
                    "use hydra/launcher=process or gpus."
                )
            if "submitit" in launcher_class:
                share_checkout()
            return arguments
        flags = [argument for argument in arguments if argument not in args.overrides]
        return [*flags, *checked_run(args.overrides, composition, weights)]
    except (HydraException, OmegaConfBaseException) as error:
        raise explain(error) from error


def check_sweep(composition: Composition, weights: Weights | None) -> DictConfig:
    """The sweep's configuration. Raises ConfigError for mistakes in it, in any of its jobs or in its folder."""
    sentences, composed = list(composition.wrong), list[tuple[list[str], Composition]]()
    if composition.cfg is not None and is_arena(composition.cfg):
        sentences += arena_sweep_mistakes(composition, partial(mistakes_of, weights=weights))
    elif composition.cfg is not None:
        swept = jobs(composition.right)
        if len(swept) > MANY_JOBS:
            print(f"checking {len(swept):,} jobs", file=sys.stderr)
        composed = [(job, compose_right(job)) for job in swept]
        for _, job in composed:
            sentences += job.wrong + mistakes_of(job, weights)
    refuse(sentences)
    assert composition.cfg is not None
    folder = Path(composition.cfg.hydra.sweep.dir)
    check_writable(folder, "hydra.sweep.dir")
    check_not_running(folder)
    for number, (overrides, job) in enumerate(composed):
        assert job.cfg is not None
        launcher.job_of(job.cfg, number, without(overrides, ["resume"]), folder).check_folder()
    return composition.cfg


def checked_run(given: list[str], composition: Composition, weights: Weights | None) -> list[str]:
    """The overrides of a run, including the overrides of a run to resume. Raises UserError for mistakes.

    composition  of the overrides `given`
    """
    overrides = given if composition.wrong else resumed(given)
    if overrides != given:
        composition = compose_right(overrides)
    refuse(composition.wrong + swept_mistakes(composition.right) + mistakes_of(composition, weights))
    assert composition.cfg is not None
    if World.from_environment().rank > 0:  # the first rank writes the run folder
        return lines(by_key(["hydra.run.dir=."]) | by_key(overrides))
    check_folder(Path(composition.cfg.hydra.run.dir), to_config(composition.cfg))
    return overrides


def mistakes_of(composition: Composition, weights: Weights | None) -> list[str]:
    """A sentence for each value that cannot train; none if nothing was composed."""
    if composition.cfg is None:
        return []
    launcher, config = composition.cfg.hydra.launcher, to_config(composition.cfg)
    ranks = int(launcher.get("nodes") or 1) * int(launcher.get("tasks_per_node") or 1)  # of a job, which starts later
    return [*stray_options(config, composition.cfg), *mistakes(config, ranks if ranks > 1 else None, weights)]


def refuse(sentences: list[str]) -> None:
    """Raise ConfigError with each distinct sentence on its own line, if there are any."""
    if sentences:
        raise ConfigError("\n".join(dict.fromkeys(sentences)))
