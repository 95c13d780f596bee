"""Checkpoints on the disk: their folder, and their tensors in torch.distributed.checkpoint's safetensors files.

A checkpoint gets its name when it is complete, and a save removes the remains of a killed one. Every rank writes its
share into separate files, and any number of ranks can read them. Loading the format cannot execute code.
"""

import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from data.atomic import sync

PARTIAL = ".partial-"  # being written or removed: not valid
REPLACED = ".replaced-"  # a complete checkpoint, moved aside while another of the same step replaces it
Tensors = dict[str, Tensor]
Allocate = Callable[[str, torch.Size, torch.dtype], Tensor]  # name, whole shape, dtype -> the tensor to load into


def partial_of(path: Path) -> Path:
    """The folder in which a checkpoint is written until it is complete."""
    return path.with_name(f"{PARTIAL}{path.name}")


def publish(partial: Path, path: Path, parts: Sequence[str]) -> None:
    """Bring the finished folder and its parts to the disk, and give it its name. Where the name is taken, the old
    checkpoint stays findable throughout."""
    for folder in (*(partial / part for part in parts), partial):
        sync(folder)
    aside = path.with_name(f"{REPLACED}{path.name}")
    if path.exists():
        path.rename(aside)
    partial.rename(path)
    sync(path.parent)
    remove(aside)


def clean(folder: Path) -> None:
    """Remove the remains of a killed save, and restore a checkpoint that it had moved aside."""
    for aside in folder.glob(f"{REPLACED}*"):
        original = aside.with_name(aside.name.removeprefix(REPLACED))
        if original.exists():
            remove(aside)
        else:
            aside.rename(original)
    for partial in folder.glob(f"{PARTIAL}*"):
        remove(partial)


def remove(path: Path) -> None:
    """Remove a folder or file, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """Step -> checkpoint, undamaged or not. One that was moved aside counts while nothing has taken its name."""
    by_step = {}
    for path in sorted(folder.glob("*step-*")):  # '.' sorts before 's', so the proper name wins
        if match := re.fullmatch(rf"(?:{re.escape(REPLACED)})?step-(\d+)", path.name):
            by_step[int(match[1])] = path
    return by_step


def write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the tensors into `folder` and bring them to the disk. Every rank calls this."""
    with _unwrapped():
        dcp.save(
            {name: tensor.detach().contiguous() for name, tensor in tensors.items()},
            storage_writer=dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True),
            no_dist=not dist.is_initialized(),
        )


def written_by(folder: Path, rank: int) -> list[Path]:
    """The files that a rank has written into `folder`."""
    return sorted(folder.glob(f"shard-{rank + 1:05d}-*.safetensors"))


def read_tensors(folder: Path, allocate: Allocate, prefix: str = "", *, together: bool) -> Tensors:
    """The tensors in `folder` whose names begin with `prefix`, each loaded into what `allocate` returns for it.

    together  whether every rank calls this, each for its share; else this process reads alone
    """
    reader = dcp.HuggingFaceStorageReader(str(folder))
    written = reader.read_metadata().state_dict_metadata
    tensors = {
        name: allocate(name, stored.size, stored.properties.dtype)
        for name, stored in written.items()
        if isinstance(stored, TensorStorageMetadata) and name.startswith(prefix)
    }
    with _unwrapped():
        dcp.load(tensors, storage_reader=reader, no_dist=not (together and dist.is_initialized()))
    return tensors


@contextmanager
def _unwrapped() -> Iterator[None]:
    """Raise the first rank's failure without the library's wrapper, and hide its warning about a single process."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            yield
    except CheckpointException as error:
        failure, _ = error.failures[min(error.failures)]
        raise failure from error
