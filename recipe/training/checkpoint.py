"""Checkpoints that are complete or absent.

    checkpoints/
      step-00000500/        the state after 500 updates
        model/                the weights: safetensors files, one for each rank that wrote
        training/             moments, loss scale: likewise
        manifest.json         format, step, metadata, and each file's size and SHA-256
      best -> step-00000400  the lowest validation loss so far

A checkpoint is written into a hidden folder, synced to the disk (files, then folder), and renamed. A kill at any
moment leaves the earlier checkpoints as they were, and the next save removes its remains. The manifests decide which
checkpoint is the best; the link to it is a convenience for people.

    path = save_checkpoint(folder, {"model": {name: tensor}, "training": {name: tensor}}, step=500, keep_last=2,
                           metadata={"val_loss": 1.83, "config": {...}})
    path, rejected = newest_valid(folder)
    state = load_checkpoint(path)
    manifest = read_manifest(path)          # .step, .metadata
"""

import errno
import hashlib
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.atomic import to_disk
from data.untrusted import read_json
from recipe.distributed.ranks import from_every_rank, from_first_rank, rank
from recipe.errors import UserError
from recipe.files import plain, to_json
from recipe.training.checkpoint_files import (
    PARTIAL,
    Allocate,
    Tensors,
    checkpoints_in,
    clean,
    partial_of,
    publish,
    read_tensors,
    remove,
    write_tensors,
    written_by,
)

FORMAT = 2
_digests: dict[tuple[int, ...], str] = {}  # of files that this process has read
MANIFEST, PARTS = "manifest.json", ("model", "training")


class CheckpointError(UserError, RuntimeError):
    """A checkpoint that cannot be written, is missing or damaged; the message names it and the reason."""


@dataclass(frozen=True)
class Manifest:
    """The description in a checkpoint.

    path      of the checkpoint
    step      number of updates done
    metadata  as given to `save_checkpoint`
    files     name -> {"bytes": size, "sha256": digest in hex}
    """

    path: Path
    step: int
    metadata: dict[str, Any]
    files: dict[str, dict[str, Any]]

    @property
    def val_loss(self) -> float | None:
        """The validation loss of these weights; None where it was not measured or is not finite."""
        value = self.metadata.get("val_loss")
        return value if isinstance(value, int | float) and math.isfinite(value) else None


def save_checkpoint(
    folder: Path, state: Mapping[str, Mapping[str, Tensor]], step: int, *, keep_last: int, metadata: dict[str, Any]
) -> Path:
    """Save the state after `step` updates as `folder`/step-XXXXXXXX, and return that path.

    Every rank calls this and writes its share; `folder`, keep_last and metadata of the first rank count.

    state      {"model": name -> tensor, "training": name -> tensor}, whole or sharded
    keep_last  number of the newest to keep, at least 1, in addition to the best
    metadata   plain values. "val_loss", if present, is the validation loss of these very weights and decides which
               checkpoint is the best; of equals, the earliest

    Raises CheckpointError if the disk is full or not writable. Earlier checkpoints stay untouched, and nothing
    half-written remains.
    """

    def begin() -> Path:
        path = folder / f"step-{step:08d}"
        with _explained(path):
            folder.mkdir(parents=True, exist_ok=True)
            clean(folder)
            for part in PARTS:
                (partial_of(path) / part).mkdir(parents=True)
        return path

    path = from_first_rank(begin)
    partial = partial_of(path)
    with _explained(path):
        for part in PARTS:
            write_tensors(partial / part, state[part])
        sealed = {
            str(file.relative_to(partial)): {"bytes": file.stat().st_size, "sha256": _sha256(file)}
            for part in PARTS
            for file in written_by(partial / part, rank())
        }
        files = {name: seal for share in from_every_rank(sealed) for name, seal in share.items()}

    def finish() -> None:
        with _explained(path):
            content = {"step": step, "metadata": plain(metadata), "files": files}
            with (partial / MANIFEST).open("w", encoding="utf-8") as file:
                file.write(to_json({"format": FORMAT, **content, "digest": _digest(content)}, indent=2))
                to_disk(file)
            if path in best_checkpoint(folder)[1]:  # its weights may be intact
                path.rename(tempfile.mkdtemp(prefix=f"unreadable-{path.name}-", dir=folder))
            publish(partial, path, PARTS)
            _link_best(folder)
            _prune(folder, step, keep_last)

    from_first_rank(finish)
    return path


def newest_valid(folder: Path, parts: Sequence[str] = PARTS, *, read: bool = True) -> tuple[Path, list[str]]:
    """The newest checkpoint in `folder` whose parts are undamaged, and a sentence for each newer, damaged one.

    read  whether to read the files; else only their sizes are compared

    Raises CheckpointError where there is none.
    """
    rejected = []
    for _, path in sorted(checkpoints_in(folder).items(), reverse=True):
        try:
            verify(path, parts, read=read)
        except CheckpointError as error:
            rejected.append(str(error))
        else:
            return path, rejected
    if not rejected:
        raise CheckpointError(f"There is no checkpoint to load in {folder}; name a run that has written one.")
    raise CheckpointError(
        f"No checkpoint in {folder} is intact. {' '.join(rejected)} Start a new run in another hydra.run.dir."
    )


def best_checkpoint(folder: Path) -> tuple[Path | None, dict[Path, str]]:
    """The checkpoint with the lowest validation loss, None where none was measured; and a sentence for each checkpoint
    whose manifest cannot be read, which may have been better."""
    losses, unreadable = dict[Path, float](), dict[Path, str]()
    for path in checkpoints_in(folder).values():
        try:
            val_loss = read_manifest(path).val_loss
        except CheckpointError as error:
            unreadable[path] = str(error)
        else:
            losses |= {} if val_loss is None else {path: val_loss}
    # Of equals the earliest.
    return min(sorted(losses), key=losses.__getitem__, default=None), unreadable


def load_checkpoint(
    path: Path, allocate: Allocate | None = None, parts: Sequence[str] = PARTS, prefix: str = ""
) -> dict[str, Tensors]:
    """The state that was saved. Nothing in the files is executed, and nothing else is read of them.

    allocate  returns the tensor to load into, given a name, whole shape and dtype. Every rank then calls this and
              reads its share. None: whole tensors on the CPU, read by this process alone
    parts     to load: "model" or "training"
    prefix    of the names of the tensors to load

    Raises CheckpointError where a part is damaged.
    """
    together = allocate is not None
    from_first_rank(lambda: verify(path, parts)) if together else verify(path, parts)
    place = allocate or (lambda name, size, dtype: torch.empty(size, dtype=dtype))
    return {part: read_tensors(path / part, place, prefix, together=together) for part in parts}


def verify(path: Path, parts: Sequence[str] = PARTS, *, read: bool = True) -> None:
    """Compare the files of these parts with the manifest: their sizes and, if they are read, their SHA-256.

    Raises CheckpointError.
    """
    for name, expected in read_manifest(path).files.items():
        file = path / name
        if name.split("/")[0] not in parts:
            continue
        if not file.is_file() or file.stat().st_size != expected["bytes"]:
            raise CheckpointError(f"{path} is damaged: {name} is missing, or does not have {expected['bytes']} bytes.")
        if read and _sha256_once(file) != expected["sha256"]:
            raise CheckpointError(f"{path} is damaged: the content of {name} has changed since it was written.")


def read_manifest(path: Path) -> Manifest:
    """The manifest alone, without looking at the files it names. Raises CheckpointError."""
    try:
        content = read_json(path / MANIFEST)
        digest, written_in = content.pop("digest"), content.pop("format")
        if written_in != FORMAT:
            raise CheckpointError(
                f"{path} is of checkpoint format {written_in}, and this version reads format {FORMAT}."
            )
        if digest != _digest(content):
            raise CheckpointError(f"{path} is damaged: the content of {MANIFEST} has changed since it was written.")
        manifest = Manifest(path, content["step"], content["metadata"], content["files"])
        outside = [name for name in manifest.files if Path(name).is_absolute() or ".." in Path(name).parts]
        if outside or not isinstance(manifest.metadata, dict):
            raise ValueError
    except OSError as error:
        raise CheckpointError(
            f"{path} is not a checkpoint: its {MANIFEST} cannot be read ({error.strerror})."
        ) from error
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: its {MANIFEST} is not a manifest.") from error
    return manifest


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _sha256_once(file: Path) -> str:
    """The digest of a file, which may have many gigabytes: while it stays as it is, this process reads it once."""
    status = file.stat()
    version = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    if version not in _digests:
        _digests[version] = _sha256(file)
    return _digests[version]


def _link_best(folder: Path) -> None:
    best, _ = best_checkpoint(folder)
    link, fresh = folder / "best", folder / f"{PARTIAL}best"
    if best is None or (link.is_symlink() and link.readlink() == Path(best.name)):
        return
    if link.is_dir() and not link.is_symlink():  # from a run folder that was copied with its links followed
        copied = folder / f"{PARTIAL}copied-best"
        link.rename(copied)
        remove(copied)
    try:
        fresh.symlink_to(best.name)
        fresh.replace(link)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):  # a file system without links
            raise


def _prune(folder: Path, step: int, keep_last: int) -> None:
    """Keep the newest `keep_last` up to `step`, and the best. Later ones stay: they are damaged, or another run's. What
    cannot be read stays too: it may be the best."""
    newest = sorted(s for s in checkpoints_in(folder) if s <= step)[-keep_last:]
    best, unreadable = best_checkpoint(folder)
    for old, path in checkpoints_in(folder).items():
        if old < newest[0] and path != best and path not in unreadable:
            doomed = folder / f"{PARTIAL}{path.name}"
            path.rename(doomed)  # rename first: an interrupted removal must not look like a damaged checkpoint
            remove(doomed)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """On any failure remove the partial checkpoint; turn errors of the system into CheckpointError."""
    try:
        yield
    except BaseException as error:
        remove(partial_of(path))
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__context__  # the library wraps the system's error
        if cause is None:
            raise
        full, limited = cause.errno in (errno.ENOSPC, errno.EDQUOT), cause.errno == errno.EFBIG
        advice = "Free some space" if full else "Allow larger files" if limited else "Make the folder writable"
        resume = f"continue with resume={path.parents[1]}" if any(path.parent.glob("step-*")) else "train again"
        raise CheckpointError(
            f"The checkpoint {path} could not be written ({cause.strerror}); earlier ones are untouched. "
            f"{advice}, and {resume}."
        ) from cause


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(to_json(content, sort_keys=True).encode()).hexdigest()
