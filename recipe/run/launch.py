"""From the command line to a run or a sweep. Mistakes are reported before a folder is made."""

import os
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

# Hydra's parser of flags has no public name, and a copy would drift from the one that hydra.main uses.
from hydra._internal.utils import get_args_parser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from attention import Ablation
from attention.formula.describe import idle
from recipe.distributed.world import World
from recipe.run.arena import checked_plan, run_arena, stray_options
from recipe.run.compose import (
    as_hydra_reads,
    by_key,
    checked,
    composed,
    jobs,
    lines,
    offer_files,
    refuse,
    swept_mistakes,
    to_config,
    unswept,
)
from recipe.run.compose import mistakes as override_mistakes
from recipe.run.config import Config, ConfigError, register
from recipe.run.jobs import Job
from recipe.run.mistakes import mistakes
from recipe.run.queue import Queue
from recipe.run.resume import check_defaults, check_folder, check_writable, resumed
from recipe.run.run_folder import check_not_running, full_disk_explained
from recipe.run.starting import Weights, with_start
from recipe.run.wording import explain, one_sentence

END = "\0"  # of an argument
# key = value, key =value, and key= value where what follows is no override
BLANKS = re.compile(r"(?<![^\0])([^\0=]+)(?:\0=\0?|=\0(?=[^\0=]*(?:\0|$)))([^\0]*)")


def launch(main: Any, weights: Weights) -> None:
    """Call `main`, decorated with hydra.main, on the checked command line, in which `init_from` names `weights`; or
    start the runs of a sweep."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises errors that it would print over several lines
    register()
    with one_sentence():
        command = prepare(sys.argv[1:], weights)
        if isinstance(command, list):
            sys.argv[1:] = command
            main()
        else:
            command(main.__wrapped__)


def prepare(arguments: list[str], weights: Weights | None = None) -> Any:
    """The arguments for Hydra: checked, and with the overrides of the run that `resume` names. Of a sweep, a function
    that runs it.

    Raises UserError with one line for each mistake.
    """
    refuse(
        [
            f"{' '.join(found[0].split(END))} has a blank beside the equals sign; write {found[1]}={found[2]}."
            for found in BLANKS.finditer(END.join(arguments))
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
    if args.help or args.hydra_help or args.cfg or args.info or args.shell_completion:
        with suppress(HydraException):  # which Hydra raises again
            offer_files(overrides)
        return [*flags, *overrides]
    try:
        refuse([sentence for line in overrides for sentence in override_mistakes(line)])
        if weights is not None:
            overrides = with_start(overrides, weights)
        overrides = lines(by_key(overrides))
        cfg = composed(unswept(overrides))
        if args.multirun or cfg.hydra.mode is RunMode.MULTIRUN:
            if cfg.resume is not None:
                raise ConfigError(
                    f"resume={cfg.resume} continues one run; a sweep goes on in its folder: hydra.sweep.dir=<folder>."
                )
            return sweep(cfg, overrides, weights)
        refuse(swept_mistakes(overrides))
        return [*flags, *run(cfg, overrides, weights)]
    except (HydraException, OmegaConfBaseException) as error:
        raise explain(error) from error


def run(cfg: DictConfig, overrides: list[str], weights: Weights | None) -> list[str]:
    """The overrides of a run, including the overrides of a run to resume. Raises UserError for mistakes."""
    again = resumed(overrides)
    if again != overrides:
        cfg = composed(again)
    config = to_config(cfg)
    refuse([*stray_options(config), *mistakes(config, weights=weights)])
    if World.from_environment().rank > 0:  # the first rank writes the run folder
        return lines(by_key(["hydra.run.dir=.", *again]))
    check_folder(Path(cfg.hydra.run.dir), config)
    return again


def sweep(cfg: DictConfig, overrides: list[str], weights: Weights | None) -> Callable[[Any], None]:
    """A function that runs a sweep, and takes the function that trains. Raises ConfigError for mistakes in the sweep,
    in any of its jobs, in its folder or in where it would run."""
    folder, launcher = Path(cfg.hydra.sweep.dir), cfg.hydra.launcher
    ranks = int(launcher.get("nodes") or 1) * int(launcher.get("tasks_per_node") or 1)  # of a job, which starts later
    formulas = dict[tuple[str, bool], None]()

    def of_run(config: Config) -> Iterable[str]:
        if config.score.formula is not None:
            formulas[config.score.formula, config.score.sinks] = None
        return mistakes(config, ranks=ranks, weights=weights)

    plan, queued = None, list[Job]()
    if cfg.arena.arms is None:
        queued = checked_jobs(overrides, folder, of_run)
    else:
        plan = checked_plan(to_config(cfg), overrides, of_run)
    check_writable(folder, "hydra.sweep.dir")
    check_not_running(folder)
    for job in queued:
        job.check_folder()
    check_defaults(queued)
    if (started := World.from_environment().size) > 1:
        raise ConfigError(
            f"A sweep starts its jobs itself, and {started} ranks were started; start it without torchrun. "
            "hydra/launcher=gpus runs a job on each GPU."
        )
    for formula, sinks in formulas:
        for sentence in idle(formula, sinks):
            print(f"score.formula={formula}: {sentence}")
    queue = Queue(cfg)
    start = partial(queue.run, queued) if plan is None else partial(run_arena, plan, queue)
    return full_disk_explained(folder, f"hydra.sweep.dir={folder}")(start)


def checked_jobs(overrides: list[str], folder: Path, of_run: Callable[[Config], Iterable[str]]) -> list[Job]:
    """The jobs of a sweep. Raises ConfigError for mistakes in any of them, which `of_run` finds."""
    queued, sentences = list[Job](), list[str]()
    for number, job in enumerate(jobs(overrides)):
        try:
            cfg = checked(job)
        except ConfigError as error:
            sentences.append(str(error))
            continue
        config = to_config(cfg)
        sentences += [*stray_options(config), *of_run(config)]
        cfg.hydra.job.num, cfg.hydra.job.id = number, str(number)
        ablated = config.attention.ablate is not Ablation.none
        queued.append(Job(number, tuple(job), folder / str(cfg.hydra.sweep.subdir), ablated))
    refuse(sentences)
    return queued
