"""A checkpoint's tensors on the disk: torch.distributed.checkpoint in safetensors files, and the format before it.

Every rank writes its share into files of its own, and any number of ranks reads them. Neither format can execute
anything when it is loaded.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, distribute_tensor

Tensors = dict[str, Tensor]
Allocate = Callable[[str, torch.Size, torch.dtype], Tensor]  # name, whole shape, dtype -> the tensor to load into

# Of format 1.
WEIGHTS, TRAINING = "model.safetensors", "training.pt"


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


def read_tensors(folder: Path, allocate: Allocate, *, together: bool) -> Tensors:
    """Every tensor in `folder`, each loaded into the tensor that `allocate` returns for it.

    together  whether every rank calls this, each for its share; else this process reads alone
    """
    reader = dcp.HuggingFaceStorageReader(str(folder))
    known = reader.read_metadata().state_dict_metadata
    tensors = {
        name: allocate(name, found.size, found.properties.dtype)
        for name, found in known.items()
        if isinstance(found, TensorStorageMetadata)
    }
    with _unwrapped():
        dcp.load(tensors, storage_reader=reader, no_dist=not (together and dist.is_initialized()))
    return tensors


def read_format_1(path: Path, aliases: Mapping[str, str], allocate: Allocate) -> dict[str, Tensors]:
    """The content of `model.safetensors` and `training.pt`, under the names of format 2 except for the moments, which
    format 1 numbers in the order of the optimizer's parameters. Raises pickle.UnpicklingError for more than plain
    values."""
    weights = safetensors.torch.load_file(path / WEIGHTS)
    weights |= {alias: weights[name] for alias, name in aliases.items()}
    rest = torch.load(path / TRAINING, map_location="cpu", weights_only=True)
    training = {
        f"moments.{index}.{slot}": value for index, slots in rest["moments"].items() for slot, value in slots.items()
    }
    training |= {"scale": rest["scale"], "growth_tracker": rest["quiet_steps"]}
    parts = {"model": weights, "training": training}
    for part in parts.values():
        for name, whole in part.items():
            part[name] = _placed(whole, allocate(name, whole.shape, whole.dtype))
    return parts


def _placed(whole: Tensor, target: Tensor) -> Tensor:
    """`target`, filled with its share of a tensor that every rank has whole."""
    if isinstance(target, DTensor):
        whole = distribute_tensor(whole.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
    return target.copy_(whole)


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
