"""A checkpoint's tensors on the disk: torch.distributed.checkpoint in safetensors files.

Every rank writes its share into separate files, and any number of ranks can read them. Loading the format cannot
execute code.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

Tensors = dict[str, Tensor]
Allocate = Callable[[str, torch.Size, torch.dtype], Tensor]  # name, whole shape, dtype -> the tensor to load into


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
    known = reader.read_metadata().state_dict_metadata
    tensors = {
        name: allocate(name, stored.size, stored.properties.dtype)
        for name, stored in known.items()
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
