"""The command line: Hydra's overrides in, a checked configuration or one sentence out.

Everything is composed and checked before Hydra makes a run folder, so that a mistake leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from filelock import FileLock, Timeout
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException, ValidationError

from config import Config, ConfigError, check, check_resumable, keys, register, suggestion
from errors import UserError
from training.checkpoint import CheckpointError, newest_valid, read_manifest
from training.device import World
from training.sweeps import launcher

CONF = Path(__file__).parent / "conf"
OUTPUTS = Path("outputs")


def launch(main: Callable[[], None]) -> None:
    """Call `main`, decorated with hydra.main, on the checked command line."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises what it would otherwise print over several lines
    register()
    launcher.register()
    with one_sentence():
        sys.argv[1:] = prepare(sys.argv[1:])
        main()


@contextlib.contextmanager
def one_sentence() -> Iterator[None]:
    """End the process with one sentence and status 1 for a failure that a user can act on."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        fail(explain(error))
    except UserError as error:
        fail(error)
    except KeyboardInterrupt:
        sys.exit(130)


def fail(error: Exception) -> NoReturn:
    """Print the sentence and exit with status 1."""
    print(f"error: {error}", file=sys.stderr)
    sys.exit(1)


def prepare(arguments: list[str]) -> list[str]:
    """The arguments for Hydra: checked, and with the overrides of the run that `resume` names. Raises UserError."""
    args = get_args_parser().parse_args(arguments)
    if args.multirun and (args.cfg or args.info):
        raise ConfigError("-m does not go with --cfg or --info; leave it out to see the configuration of one run.")
    if args.help or args.hydra_help or args.cfg or args.info or args.shell_completion:
        return arguments
    try:
        if args.multirun or composed(unswept(args.overrides)).hydra.mode is RunMode.MULTIRUN:
            for job in jobs(args.overrides):
                check(to_config(composed(job)))
            return arguments
        flags = [argument for argument in arguments if argument not in args.overrides]
        overrides = resumed(args.overrides)
        cfg = composed(overrides)
        config = to_config(cfg)
        check(config)
        if World.from_environment().rank > 0:  # the first rank keeps the run folder
            return [*flags, *lines(by_key(["hydra.run.dir=."]) | by_key([*overrides, "hydra.output_subdir=null"]))]
        check_folder(Path(cfg.hydra.run.dir), config)
        return [*flags, *overrides]
    except (HydraException, OmegaConfBaseException) as error:
        raise explain(error) from error


def composed(overrides: list[str]) -> DictConfig:
    """The configuration that Hydra composes, with its own under `hydra`."""
    for override in OverridesParser.create().parse_overrides(overrides):
        refuse_mistake(override)
    with initialize_config_dir(str(CONF), version_base="1.3", job_name="train"):
        return compose("config", overrides, return_hydra_config=True)


def to_config(cfg: DictConfig) -> Config:
    """Plain dataclasses from a composed configuration."""
    cfg = deepcopy(cfg)
    with open_dict(cfg):
        cfg.pop("hydra", None)
    return OmegaConf.to_object(cfg)  # type: ignore[return-value]


def jobs(overrides: list[str]) -> list[list[str]]:
    """The overrides of each job of a sweep: every combination, of the command line and of the experiment's own."""
    params = composed(unswept(overrides)).hydra.sweeper.params or {}
    both = OverridesParser.create().parse_overrides([f"{key}={value}" for key, value in params.items()] + overrides)
    return BasicSweeper.split_arguments([o for o in both if not o.is_hydra_override()], None)[0]


def unswept(overrides: list[str]) -> list[str]:
    """The overrides that have one value."""
    parsed = OverridesParser.create().parse_overrides(overrides)
    return [line for line, o in zip(overrides, parsed, strict=True) if not o.is_sweep_override()]


def resumed(overrides: list[str]) -> list[str]:
    """Where `resume` names a run, its recorded overrides with the given ones on top, in that run's folder.

    resume=<run folder>                  that run
    resume=auto                          the newest under outputs/ that has a valid checkpoint
    resume=auto hydra.run.dir=<folder>   the run in that folder or, before its first checkpoint, a new one
    """
    given = by_key(overrides)
    if "resume" not in given or given["resume"].value() is None:
        return overrides
    target, run_dir = str(given["resume"].value()), given.get("hydra.run.dir")
    if target != "auto":
        folder = Path(target)
        if not (folder / ".hydra" / "overrides.yaml").is_file():
            raise ConfigError(f"resume={target} is not a run folder; name one that holds .hydra and checkpoints.")
    elif run_dir is None:
        folder = newest_run()
    else:
        folder = Path(str(run_dir.value()))
        if not has_checkpoints(folder):
            return overrides
    newest_valid(folder / "checkpoints")
    recorded = by_key(list(OmegaConf.load(folder / ".hydra" / "overrides.yaml")))
    quoted = "'" + str(folder).replace("\\", "\\\\").replace("'", "\\'") + "'"
    last = by_key([f"resume={quoted}", f"hydra.run.dir={quoted}", "hydra.mode=RUN"])
    return lines(recorded | given | last)


def newest_run() -> Path:
    """The run folder under outputs/ whose newest valid checkpoint was written last."""
    for folder in sorted(OUTPUTS.glob("**/checkpoints"), key=lambda f: f.stat().st_mtime, reverse=True):
        with contextlib.suppress(CheckpointError):
            newest_valid(folder)
            return folder.parent
    raise ConfigError(f"resume=auto finds no run with a valid checkpoint under {OUTPUTS}/; leave it out to start one.")


def has_checkpoints(run: Path) -> bool:
    """Whether the run folder holds checkpoints, whole or damaged."""
    return any(run.glob("checkpoints/step-*"))


def check_folder(folder: Path, config: Config) -> None:
    """Refuse a run folder that holds another run, or a checkpoint that this configuration cannot go on from."""
    if config.resume is None and (folder / "metrics.jsonl").exists():
        raise ConfigError(
            f"hydra.run.dir={folder} already holds a run; add resume=auto to go on with it, or name another folder."
        )
    with held(folder):
        pass
    if config.resume is not None and has_checkpoints(folder):
        path, _ = newest_valid(folder / "checkpoints")
        check_resumable(read_manifest(path).metadata["config"], config)


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep a run folder to this process for the length of the block. Raises ConfigError where another one has it."""
    if World.from_environment().rank > 0 or not folder.is_dir():
        yield
        return
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigError(f"{folder} belongs to a run that is still going on; stop that one first.") from None
    try:
        yield
    finally:
        lock.release()


def by_key(overrides: list[str]) -> dict[str, Override]:
    """Overrides by what they override; a later one replaces an earlier one."""
    return {o.key_or_group: o for o in OverridesParser.create().parse_overrides(overrides)}


def lines(overrides: dict[str, Override]) -> list[str]:
    """As they stand on a command line."""
    return [str(override.input_line) for override in overrides.values()]


def groups() -> list[str]:
    """attention, model, ...: the folders of conf/."""
    return sorted(folder.name for folder in CONF.iterdir() if folder.is_dir() and folder.name != "hydra")


def refuse_mistake(override: Override) -> None:
    """Raise ConfigError for an override that Hydra would misread or explain at length, with what was meant."""
    key, known = override.key_or_group, [*groups(), *keys()]
    if override.is_hydra_override() or key.startswith("hydra/"):
        return
    if override.is_sweep_override():
        raise ConfigError(f"{override.input_line} is more than one value; add -m for a run with each.")
    if override.is_delete():
        raise ConfigError(f"{override.input_line} would leave {key} without a value; write {key}=<value>.")
    if key not in known:
        hint = suggestion(key, known) or "; python train.py --help lists what there is."
        raise ConfigError(f"{override.input_line} overrides nothing, as there is no {key}{hint}")
    if key in groups() and not isinstance(override.value(), str | None):
        raise ConfigError(
            f"{override.input_line} has to name a file of conf/{key}/; single values are {key}.<name>=..."
        )


def explain(error: Exception) -> ConfigError:
    """One sentence for what Hydra and OmegaConf say over several lines."""
    cause = error.__cause__ or error
    if isinstance(cause, UserError):  # of a launcher, around which Hydra puts words of its own
        return ConfigError(str(cause))
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        hint = suggestion(choice, list(error.options)) or "."
        return ConfigError(f"{group}={choice} is not known; choose one of {', '.join(error.options)}{hint}")
    if isinstance(error, OverrideParseException):
        return ConfigError(
            f"{error.override} is not an override; write key=value, and quote a value with special characters twice: "
            "'key=\"a b\"'."
        )
    if isinstance(cause, ValidationError) and cause.full_key is not None and cause.full_key in keys():
        return ConfigError(f"{cause.full_key}={cause.value} is not {expected(cause.full_key)}.")
    return ConfigError(" ".join(" ".join(str(e).split()) for e in dict.fromkeys((error, cause))))


def expected(key: str) -> str:
    """What a value of `key` has to be, in words."""
    kind: Any = Config
    for name in key.split("."):
        kind = get_type_hints(kind)[name]
    if get_origin(kind) is UnionType:
        kind = get_args(kind)[0]
    if get_origin(kind) is tuple:
        return "a list of numbers, such as [0.9,0.99]"
    if issubclass(kind, Enum):
        return "one of " + ", ".join(member.name for member in kind)
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[kind]
