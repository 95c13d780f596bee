"""Which run to resume, and whether its folder is free and its checkpoint fits."""

import contextlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from attention.from_file import digest_of, file_of, is_in_file
from data.untrusted import UntrustedError, check_value
from model.options import Positions
from recipe.distributed.ranks import from_first_rank, rank
from recipe.distributed.world import World
from recipe.files import plain
from recipe.run.compose import by_key, composed, lines, mistakes, opened, parsed, quoted, refuse, to_config
from recipe.run.config import Config, ConfigError, keys
from recipe.run.jobs import Job
from recipe.run.recorded import read_config
from recipe.run.removed import as_today, config_as_today, refusal
from recipe.run.run_folder import CONFIG, OUTPUTS, OVERRIDES, check_not_running, read_overrides
from recipe.run.starting import written
from recipe.training.checkpoint import CheckpointError, Manifest, newest_valid, read_manifest
from recipe.wording import as_typed

# Options that a launcher sets, or that change nothing in a run
NOT_OF_A_JOB = ("resume=", "tracking.", "model.name=", "score.name=")


def resumed(overrides: list[str]) -> list[str]:
    """Where `resume` names a run, its recorded overrides with the given ones on top, in that run's folder.

    resume=<run folder>                  that run
    resume=auto                          the newest under outputs/ that has a valid checkpoint
    resume=auto hydra.run.dir=<folder>   the run in that folder or, before its first checkpoint, a new one

    Raises ConfigError, CheckpointError where there is nothing to resume.
    """
    typed = by_key(overrides)
    if "resume" not in typed or typed["resume"].value() is None:
        return overrides
    target, run_dir = str(typed["resume"].value()), typed.get("hydra.run.dir")
    if target != "auto":
        folder = Path(target)
        if not (folder / OVERRIDES).is_file():
            raise ConfigError(f"resume={target} is not a run folder; name one that holds .hydra and checkpoints.")
    elif run_dir is None:
        folder = newest_run()
    else:
        folder = Path(str(run_dir.value()))
        if not has_checkpoints(folder):
            return overrides
    checkpoint = newest_intact(folder / "checkpoints")
    recorded = {override.key_or_group: override for override in recorded_overrides(folder)}
    earlier = {
        key: override
        for key, override in by_key(earlier_defaults(folder, lines(recorded))).items()
        if key.partition(".")[0] not in typed  # such as optimizer=muon
    }
    every = recorded | earlier | typed
    for key in ("attention.name", "attention"):
        if key in every:
            check_attention_file(folder, checkpoint, every[key].value(), key in typed)
            break
    path = quoted(str(folder))
    return lines(every | by_key([f"resume={path}", f"hydra.run.dir={path}", "hydra.mode=RUN"]))


def check_attention_file(run: Path, checkpoint: Path, name: Any, is_new: bool) -> None:
    """Raise ConfigError where an attention in a file is not the one with which the checkpoint was made, unless the
    command line names another; or where it lies in the run folder, which may be a stranger's.

    is_new  whether the command line names it
    """
    if not isinstance(name, str) or not is_in_file(name):
        return
    check_outside(run, name)
    file, metadata = file_of(name), read_manifest(checkpoint).metadata
    if is_new and name != metadata["config"]["attention"]["name"]:
        return
    if file.is_file() and digest_of(file) != metadata.get("attention_file"):
        raise ConfigError(
            f"{file} is not the attention of {checkpoint}; put {run / file.name} back there. To resume with the new "
            f"one, give it another name and choose it with attention=<file>.py:{name.rpartition(':')[2]}."
        )


def check_outside(run: Path, name: str) -> None:
    """Raise ConfigError for an attention in a file of the run folder, which gets a copy there."""
    if run.resolve() in file_of(name).resolve().parents:
        raise ConfigError(f"attention={name} lies in {run}, and nothing in a run folder is run; copy it elsewhere.")


def earlier_defaults(run: Path, overrides: list[str]) -> list[str]:
    """An override for each option in which the recorded configuration of the run differs from what its `overrides`
    compose today: the defaults of presets may have changed since. Raises ConfigError."""
    then, now = plain(read_config(run)), plain(to_config(composed(overrides)))
    return [opened(f"{key}={written(nested(then, key))}") for key in keys() if nested(then, key) != nested(now, key)]


def check_defaults(jobs: Sequence[Job]) -> None:
    """Raise ConfigError where some jobs have begun with other defaults than those with which others would start."""
    recorded = [job for job in jobs if (job.folder / CONFIG).is_file()]
    begun = [job for job in recorded if job.done or has_checkpoints(job.folder)]
    for job in begun if len(begun) < len(jobs) else []:
        differing = earlier_defaults(job.folder, [opened(line) for line in job.overrides])
        if earlier := [line for line in differing if not line.lstrip("+").startswith(NOT_OF_A_JOB)]:
            raise ConfigError(
                f"{job.folder} has other defaults than those of today ({' '.join(earlier)}), which the jobs without a "
                "result would have; start the sweep in another folder with hydra.sweep.dir, there also with these "
                "overrides, or finish it with the version that began it."
            )


def recorded_overrides(run: Path) -> list[Override]:
    """The overrides that the run recorded, each a plain value of an option of this recipe, or a file of conf/.

    Hydra would run functions that others name, such as callbacks. Raises ConfigError for such a line.
    """
    try:
        return [own_override(line) for line in as_today(read_overrides(run))]
    except OSError as error:
        reason = f"cannot be read ({error.strerror})"
    except UntrustedError as error:
        reason = str(error)
    raise ConfigError(f"{run / OVERRIDES} {reason}, so the run cannot be resumed; restore the file.")


def own_override(line: str) -> Override:
    """A recorded override as Hydra reads it. Raises UntrustedError unless it sets an option of the recipe to a plain
    value."""
    try:
        (override,) = parsed([line])
        check_value(None if override.is_sweep_override() else override.value())
    except (HydraException, RecursionError, UntrustedError):
        raise UntrustedError(f"holds {line[:200]}, which is no override") from None
    if (sentence := refusal(override.key_or_group)) is not None:
        raise ConfigError(f"The run recorded {line}. {sentence} Or resume it with the version that trained it.")
    foreign = override.is_hydra_override() or override.is_sweep_override() or override.package is not None
    if foreign or "_target_" in line or "${" in line or any(mistakes(line)):
        raise UntrustedError(f"holds {line[:200]}, which is no plain value of an option of this recipe")
    return override


def newest_run() -> Path:
    """The run folder under outputs/ whose newest valid checkpoint was written last. Raises ConfigError."""
    for folder in sorted(OUTPUTS.glob("**/checkpoints"), key=lambda f: f.stat().st_mtime, reverse=True):
        with contextlib.suppress(CheckpointError):
            newest_intact(folder)
            return folder.parent
    raise ConfigError(f"resume=auto finds no run with a valid checkpoint under {OUTPUTS}/; leave it out to start one.")


def newest_intact(checkpoints: Path) -> Path:
    """The newest intact checkpoint. Only the first rank reads the files; the others check sizes, because all of them
    load the first rank's choice, or fail. Raises CheckpointError."""
    return newest_valid(checkpoints, read=World.from_environment().rank == 0)[0]


def find_checkpoint(folder: Path) -> Manifest | None:
    """The newest valid checkpoint of a run to resume, if it has one: the same on every rank. Raises CheckpointError."""
    if not has_checkpoints(folder):
        return None
    path, rejected = from_first_rank(lambda: newest_valid(folder / "checkpoints"))
    if rank() == 0:
        print(*rejected, f"resuming from {path}", sep="\n")
    return read_manifest(path)


def has_checkpoints(run: Path) -> bool:
    """Whether the run folder holds checkpoints, intact or damaged."""
    return any(run.glob("checkpoints/step-*"))


def check_folder(folder: Path, config: Config) -> None:
    """Raise ConfigError for a run folder that cannot be written or holds another run, and for a checkpoint in it that
    this configuration cannot resume."""
    check_writable(folder, "hydra.run.dir")
    check_not_running(folder)
    check_unused(folder, config)
    if is_in_file(config.attention.name):
        check_outside(folder, config.attention.name)
    if config.resume is not None and has_checkpoints(folder):
        path = newest_intact(folder / "checkpoints")
        check_resumable(read_manifest(path).metadata["config"], config, path)


def check_unused(folder: Path, config: Config) -> None:
    """Raise ConfigError for a folder that holds a run, which this configuration does not resume."""
    if config.resume is None and (folder / "metrics.jsonl").exists():
        raise ConfigError(
            f"hydra.run.dir={folder} already holds a run; add resume=auto to continue it, or name another folder."
        )


def check_writable(folder: Path, override: str) -> None:
    """Raise ConfigError unless `folder`, which `override` names, is there or can be made, and can be written to."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.exists(path))
    try:
        os.rmdir(tempfile.mkdtemp(dir=existing))  # on some file systems permissions are not enough to know
    except OSError as error:
        raise ConfigError(
            f"{override}={folder} cannot be written, because of {existing} ({error.strerror}); name another folder."
        ) from error


def check_resumable(recorded: dict[str, Any], config: Config, checkpoint: Path) -> None:
    """Raise ConfigError where `checkpoint` was trained with another model, optimizer or other data than `config` has.

    recorded  the checkpoint's configuration, plain
    """
    now, default, recorded = plain(config), plain(Config()), config_as_today(recorded)
    names = ["optimizer.name"]
    if config.model.positions is Positions.learned:  # a table with a row for each position; rotary ones have any length
        names.append("seq_len")
    for part, free in (("model", {"name", "dropout"}), ("score", {"name"}), ("data", {"cache"})):
        names += [f"{part}.{name}" for name in now[part].keys() - free]
    sentences = []
    for name in sorted(names):
        new = nested(now, name)
        # An option that the run did not record is newer than the run, which behaved as with the default.
        then = nested(recorded, name, nested(default, name))
        if then != new:
            sentences.append(
                f"{checkpoint} was trained with {name}={as_typed(then)} instead of {name}={as_typed(new)}; leave that "
                "out, put the run's own checkpoints back, or start a new run without resume."
            )
    refuse(sentences)


def nested(values: Any, name: str, default: Any = None) -> Any:
    """The value of a dotted name in nested mappings."""
    for part in name.split("."):
        if not isinstance(values, dict) or part not in values:
            return default
        values = values[part]
    return values
