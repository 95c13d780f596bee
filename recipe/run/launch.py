"""From the command line to a run. Mistakes are reported before Hydra makes a run folder."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

# Hydra's parser of flags has no public name, and a copy would drift from the one that hydra.main uses.
from hydra._internal.utils import get_args_parser
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from recipe.distributed.world import World
from recipe.run.arena import arena_sweep_mistakes, is_arena, stray_options
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
from recipe.run.mistakes import mistakes
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
    refuse(
        [
            f"{first} {second} has a blank beside the equals sign; write {first}{second}."
            for first, second in itertools.pairwise(arguments)
            if (first.endswith("=") and "=" not in second) or second.startswith("=")
        ]
    )
    arguments = [as_hydra_reads(argument) for argument in arguments]
    args, rest = get_args_parser().parse_known_args(arguments)
    refuse([f"{f} is not a flag of train.py; overrides have no dashes: key=value." for f in rest if f.startswith("-")])
    overrides = [*args.overrides, *rest]  # argparse accepts them in one place only, and -m may stand between them
    flags = [argument for argument in arguments if argument not in overrides]
    if args.experimental_rerun:
        raise ConfigError("--experimental-rerun would run code from a pickled file; use resume=<run folder>.")
    if args.multirun and (args.cfg or args.info):
        raise ConfigError("-m cannot be combined with --cfg or --info; leave it out to see the configuration of a run.")
    if args.help or args.hydra_help or args.cfg or args.info:
        return [*flags, *overrides]
    if weights is not None:
        overrides = with_start(overrides, weights)
    try:
        composition = compose_right(overrides)
        if not composition.wrong and World.from_environment().rank == 0:
            for sentence in replaced(overrides):
                print(f"note: {sentence}", file=sys.stderr)
        if args.multirun or composition.multirun:
            if composition.cfg is not None:
                more = launcher.continuing(overrides, Path(composition.cfg.hydra.sweep.dir))
                overrides = [*overrides, *more]
                composition = compose_right(overrides) if more else composition
            check_sweep(composition, weights)
            return [*flags, *overrides]
        return [*flags, *checked_run(overrides, composition, weights)]
    except (HydraException, OmegaConfBaseException) as error:
        raise explain(error) from error


def check_sweep(composition: Composition, weights: Weights | None) -> None:
    """Raise ConfigError for mistakes in a sweep, in any of its jobs, in its folder or in where it would run."""
    cfg, sentences, composed = composition.cfg, list(composition.wrong), list[tuple[list[str], Composition]]()
    if cfg is not None and is_arena(cfg):
        sentences += arena_sweep_mistakes(composition, partial(mistakes_of, weights=weights))
    elif cfg is not None:
        swept = jobs(composition.right)
        if len(swept) > MANY_JOBS:
            print(f"checking {len(swept):,} jobs", file=sys.stderr)
        composed = [(job, compose_right(job)) for job in swept]
        for _, job in composed:
            sentences += job.wrong + mistakes_of(job, weights)
    refuse(sentences)
    assert cfg is not None
    folder = Path(cfg.hydra.sweep.dir)
    check_writable(folder, "hydra.sweep.dir")
    check_not_running(folder)
    for number, (overrides, job) in enumerate(composed):
        assert job.cfg is not None
        launcher.job_of(job.cfg, number, without(overrides, ["resume"]), folder).check_folder()
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


def checked_run(given: list[str], composition: Composition, weights: Weights | None) -> list[str]:
    """The overrides of a run, including the overrides of a run to resume. Raises UserError for mistakes.

    composition  of the overrides `given`
    """
    overrides = given if composition.wrong else resumed(given)
    if overrides != given:
        composition = compose_right(overrides)
    wrong = composition.wrong + swept_mistakes(composition.right)
    refuse(wrong + unrelated(mistakes_of(composition, weights), wrong))
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


def unrelated(sentences: list[str], wrong: list[str]) -> list[str]:
    """The sentences on a configuration that name no option of a wrong override: it was composed without that one."""
    left_out = [option[0] for sentence in wrong if (option := re.match(r"[\w./]+", sentence))]
    return [s for s in sentences if not any(re.search(rf"(?<![\w.]){re.escape(o)}(?!\.?\w)", s) for o in left_out)]


def refuse(sentences: list[str]) -> None:
    """Raise ConfigError with each distinct sentence on its own line, if there are any."""
    if sentences:
        raise ConfigError("\n".join(dict.fromkeys(sentences)))
