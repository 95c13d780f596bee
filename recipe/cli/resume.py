"""Which run to resume, and the folder that a run keeps to itself."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from omegaconf import OmegaConf

from model.config import Positions
from recipe.cli.compose import by_key, lines
from recipe.config import Config, ConfigError, as_plain
from recipe.distributed.world import World
from recipe.sweeps.launcher import quoted
from recipe.training.checkpoint import CheckpointError, newest_valid, read_manifest
from recipe.wording import as_typed

OUTPUTS = Path("outputs")


class StillRunning(ConfigError):
    """Another process has the run folder."""


def resumed(overrides: list[str]) -> list[str]:
    """Where `resume` names a run, its recorded overrides with the given ones on top, in that run's folder.

    resume=<run folder>                  that run
    resume=auto                          the newest under outputs/ that has a valid checkpoint
    resume=auto hydra.run.dir=<folder>   the run in that folder or, before its first checkpoint, a new one

    Raises ConfigError, CheckpointError where there is nothing to resume.
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
    path = quoted(str(folder))
    last = by_key([f"resume={path}", f"hydra.run.dir={path}", "hydra.mode=RUN"])
    return lines(recorded | given | last)


def newest_run() -> Path:
    """The run folder under outputs/ whose newest valid checkpoint was written last. Raises ConfigError."""
    damaged = []
    for folder in sorted(OUTPUTS.glob("**/checkpoints"), key=lambda f: f.stat().st_mtime, reverse=True):
        try:
            newest_valid(folder)
        except CheckpointError:
            damaged += [str(folder.parent)] if has_checkpoints(folder.parent) else []
        else:
            return folder.parent
    reason = f": every checkpoint of {' and '.join(damaged)} is damaged" if damaged else ""
    raise ConfigError(
        f"resume=auto finds no run with a valid checkpoint under {OUTPUTS}/{reason}; leave it out to start one."
    )


def has_checkpoints(run: Path) -> bool:
    """Whether the run folder holds checkpoints, intact or damaged."""
    return any(run.glob("checkpoints/step-*"))


def check_folder(folder: Path, config: Config) -> None:
    """Raise ConfigError for a run folder that cannot be written or holds another run, and for a checkpoint in it that
    this configuration cannot resume."""
    check_writable(folder, "hydra.run.dir")
    if config.resume is None and (folder / "metrics.jsonl").exists():
        raise ConfigError(
            f"hydra.run.dir={folder} already holds a run; add resume=auto to continue it, or name another folder."
        )
    with locked(folder):
        pass
    if config.resume is not None and has_checkpoints(folder):
        path, _ = newest_valid(folder / "checkpoints")
        check_resumable(read_manifest(path).metadata["config"], config, path)


def check_writable(folder: Path, override: str) -> None:
    """Raise ConfigError unless `folder`, which `override` names, is there or can be made, and can be written to."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.exists(path))
    try:
        os.rmdir(tempfile.mkdtemp(dir=existing))  # permissions alone do not tell of every file system
    except OSError as error:
        raise ConfigError(
            f"{override}={folder} cannot be written, because of {existing} ({error.strerror}); name another folder."
        ) from error


def check_resumable(recorded: dict[str, Any], config: Config, checkpoint: Path) -> None:
    """Raise ConfigError where `checkpoint` was trained with another model, optimizer or other data than `config` has.

    recorded  the checkpoint's configuration, plain
    """
    now, default = as_plain(config), as_plain(Config())
    then_and_now = {"optimizer.name": (recorded["optimizer"]["name"], now["optimizer"]["name"])}
    if config.model.positions is Positions.learned:  # a table with a row for each position; rotary ones have any length
        then_and_now["seq_len"] = recorded["seq_len"], now["seq_len"]
    for part, free in (("model", {"name", "dropout"}), ("score", {"name"}), ("data", {"cache"})):
        for name in now[part].keys() - free:
            # An option that the run did not record is newer than the run, which did what its default does.
            then = recorded.get(part, {}).get(name, default[part][name])
            then_and_now[f"{part}.{name}"] = then, now[part][name]
    composed = OmegaConf.load(checkpoint.parents[1] / ".hydra" / "config.yaml")
    sentences = []
    for name, (then, new) in sorted(then_and_now.items()):
        if then == new:
            continue
        if OmegaConf.select(composed, name) == new:  # nothing was overridden
            raise ConfigError(
                f"{checkpoint} belongs to another run, whose {name} is {as_typed(then)} instead of {as_typed(new)}; "
                "put that one's checkpoints back, or start a new run without resume."
            )
        reason = "was trained on other data" if name.startswith("data.") else "does not fit it"
        sentences.append(
            f"{name}={as_typed(new)} differs from the run's {name}={as_typed(then)}, and {checkpoint.name} {reason}; "
            "leave it out, or start a new run without resume."
        )
    if sentences:
        raise ConfigError("\n".join(sentences))


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Within the block, this process alone has the run folder. Raises StillRunning where another one has it."""
    if World.from_environment().rank > 0 or not folder.is_dir():
        yield
        return
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise StillRunning(f"{folder} belongs to a run that is still running; stop that one first.") from None
    try:
        yield
    finally:
        lock.release()
