"""The ranks of one run: joining, exchanging values between hosts, and noticing that one is gone."""

import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from recipe.distributed.world import World
from recipe.errors import UserError

T = TypeVar("T")

# A rank that loses another one waits this long for the others to report, so that it can name the missing one.
SECONDS_TO_REPORT = 3.0
# torchrun starts the ranks of one machine within seconds. After this long a line names the ranks that are missing.
SECONDS_OF_SILENCE = 10.0
PATIENCE_S = 600.0  # how long a rank waits for another before it gives up
# Time for the threads that send messages to free the last message.
SECONDS_TO_FREE = 0.05


class RankError(UserError, RuntimeError):
    """Ranks that did not join or were lost; the message names them."""


@contextmanager
def joined(world: World, device: torch.device, timeout_s: float = PATIENCE_S) -> Iterator[None]:
    """Make `device` the current one, and connect the ranks for the duration of the block.

    timeout_s  how long to wait for the others, when joining and in every exchange

    Raises RankError if a rank does not join, or is gone before the block ends.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world.size == 1:
        yield
        return
    store = _rendezvous(world, timeout_s)
    # By default NCCL adds waits for events to a CUDA graph, so that its work outside may overlap. The graph is then no
    # longer one chain, and its kernels start later. Trainer._wait_for_replay keeps the two apart instead.
    os.environ.setdefault("NCCL_GRAPH_MIXING_SUPPORT", "0")
    # Replicated gradients are exchanged when the GPU has nothing else to do. More channels than NCCL would take are
    # faster then.
    os.environ.setdefault("NCCL_MIN_CTAS", "48")
    # Messages between hosts go through gloo, so that neither waits for the devices.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = patience(device, timeout_s)
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)
    try:
        yield
        # Exit together: torchrun ends the others as soon as one exits with a status other than 0, as after a signal.
        from_every_rank(None)
        # Time for a thread of gloo's to free that message: it needs Python's lock, and would abort a process that ends.
        time.sleep(SECONDS_TO_FREE)
    except RuntimeError as error:
        missing = [] if isinstance(error, UserError) else _missing(store, world)
        if not missing:
            raise
        raise RankError(
            f"Rank {world.rank} lost {_names(missing)} in the middle of the run; look at what it printed last, "
            "and resume from the newest checkpoint with resume=<run folder>."
        ) from error
    else:
        dist.destroy_process_group()
    finally:
        # After a failure the GPUs' communicators end with the process: destroying them needs all ranks.
        if device.type == "cpu" and dist.is_initialized():
            dist.destroy_process_group()


def patience(device: torch.device, timeout_s: float = PATIENCE_S) -> timedelta:
    """How long an exchange of tensors waits for another rank, where a message between hosts waits `timeout_s`."""
    # NCCL's timeout counts from the launch of an exchange, even while earlier work of a long step runs, and it ends the
    # process without naming a rank. The hosts, which ask each other before they wait for it, should give up first.
    return timedelta(seconds=timeout_s * (2 if device.type == "cuda" else 1))


def _rendezvous(world: World, timeout_s: float) -> dist.Store:
    """The store at MASTER_ADDR:MASTER_PORT, once every rank has joined."""
    try:
        host, port = _address()
    except (KeyError, ValueError):
        raise RankError(
            f"RANK={world.rank} of WORLD_SIZE={world.size} needs MASTER_ADDR and MASTER_PORT to find the others; start "
            "the ranks with torchrun --nproc-per-node, or unset RANK and WORLD_SIZE to train alone."
        ) from None
    # torchrun runs a store at this address itself; every rank then only connects to it.
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    first = world.rank == 0 and not hosted
    started, announced = time.monotonic(), False
    try:
        if not first and not _answers(host, port, timeout_s):
            raise RankError(_absence_message(world, [0], host, port, timeout_s))
        store = dist.TCPStore(
            host, port, None, first, timedelta(seconds=timeout_s), wait_for_workers=False, multi_tenant=True
        )
        meeting = dist.PrefixStore(f"gpt-attention/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        meeting.set(f"here/{world.rank}", "yes")
        while absent := _absent(meeting, "here", world):
            waited = time.monotonic() - started
            if waited > timeout_s:
                raise RankError(_absence_message(world, absent, host, port, timeout_s))
            if waited > SECONDS_OF_SILENCE and not announced:
                announced = True
                print(f"rank {world.rank} waits for {_names(absent)} at {host}:{port}", file=sys.stderr, flush=True)
            time.sleep(0.02)
    except (dist.DistError, dist.DistStoreError, RuntimeError) as error:
        if isinstance(error, RankError):
            raise
        raise RankError(_absence_message(world, [0], host, port, timeout_s)) from error
    return meeting


def _address() -> tuple[str, int]:
    """The address where the ranks meet: torchrun's, or on the first node of a Slurm step. Raises KeyError."""
    if "MASTER_ADDR" in os.environ or "SLURM_STEP_NODELIST" not in os.environ:
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    job, step = int(os.environ["SLURM_JOB_ID"]), int(os.environ["SLURM_STEP_ID"])
    return first_node(os.environ["SLURM_STEP_NODELIST"]), 20_000 + (100 * job + step) % 10_000


def first_node(nodes: str) -> str:
    """The first node of a list in Slurm's notation: gpu[03-07,12],login1 begins with gpu03."""
    head, bracket, numbers = nodes.partition("[") if "[" in nodes.split(",")[0] else (nodes.split(",")[0], "", "")
    return head + re.split(r"[-,\]]", numbers)[0] if bracket else head


def _answers(host: str, port: int, timeout_s: float) -> bool:
    """Whether something listens at host:port within `timeout_s`; if nothing does, TCPStore would print C++ frames."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((host, port), timeout=1):
                return True
        except OSError:
            time.sleep(0.05)
    return False


def _absence_message(world: World, absent: list[int], host: str, port: int, timeout_s: float) -> str:
    return (
        f"Rank {world.rank} of {world.size} waited {timeout_s:g} s at {host}:{port}, and {_names(absent)} did not "
        "join; start every rank (torchrun --nproc-per-node does), or unset RANK and WORLD_SIZE to train alone."
    )


def _missing(store: dist.Store, world: World) -> list[int]:
    """The ranks that do not report within a few seconds that they noticed the failure too."""
    try:
        store.set(f"noticed/{world.rank}", "yes")
        deadline = time.monotonic() + SECONDS_TO_REPORT
        while (absent := _absent(store, "noticed", world)) and time.monotonic() < deadline:
            time.sleep(0.05)
    except RuntimeError:  # the rank that ran the store is gone
        return [0]
    return absent


def _absent(store: dist.Store, what: str, world: World) -> list[int]:
    return [rank for rank in range(world.size) if not store.check([f"{what}/{rank}"])]


def _names(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def rank() -> int:
    """The rank of this process; 0 if it is alone."""
    return dist.get_rank() if dist.is_initialized() else 0


def from_first_rank(work: Callable[[], T]) -> T:
    """The result of work() on the first rank, on every rank. If it fails there, every rank raises its error."""
    if not dist.is_initialized():
        return work()
    outcome: list[object] = [None, None]
    if rank() == 0:
        try:
            outcome[0] = work()
        except Exception as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[1], Exception):
        raise outcome[1]
    return outcome[0]  # type: ignore[return-value]


def highest(values: Sequence[float]) -> list[float]:
    """The highest of each value over all ranks. Their hosts exchange them; none waits for its device."""
    numbers = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(numbers, dist.ReduceOp.MAX, async_op=True).wait(timedelta(seconds=PATIENCE_S))
    return numbers.tolist()


def check_agreed(options: Mapping[str, Any]) -> None:
    """Raise RankError, on every rank, where one of them has other options than the first. The device may differ."""
    first, *others = from_every_rank(options)
    for number, other in enumerate(others, start=1):
        for name, ours in first.items():
            if name != "device" and other[name] != ours:
                raise RankError(
                    f"Rank {number} has another {name} than rank 0 ({other[name]} instead of {ours}); start every rank "
                    "with the same overrides."
                )


def from_every_rank(value: T) -> list[T]:
    """The values of all ranks, in their order."""
    if not dist.is_initialized():
        return [value]
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
