"""Ranks find each other or name the missing one, and notice when one disappears."""

import os
import socket
import subprocess
import sys

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from recipe.distributed.ranks import RankError, _address, joined
from recipe.distributed.world import World
from recipe.errors import fail
from tests.programs import ROOT, started


def free_port() -> str:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return str(opened.getsockname()[1])


@pytest.fixture
def address(monkeypatch):
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", port)
    return f"127.0.0.1:{port}"


def join(world: World) -> None:
    with joined(world, torch.device("cpu"), timeout_s=0.5):
        raise AssertionError("nobody else is there")


def test_the_first_rank_names_those_that_did_not_come(address):
    with pytest.raises(RankError, match=rf"Rank 0 of 3 waited 0\.5 s at {address}, and ranks 1, 2 did not join"):
        join(World(0, 3))


def test_another_rank_reports_that_the_first_did_not_come(address, capfd):
    with pytest.raises(RankError, match=rf"Rank 1 of 2 waited 0\.5 s at {address}, and rank 0 did not join"):
        join(World(1, 2))
    assert "frame #" not in capfd.readouterr().err


def test_a_rank_without_an_address_is_refused_with_the_command_that_starts_ranks(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(RankError, match=r"RANK=1 of WORLD_SIZE=2 needs MASTER_ADDR.*torchrun"):
        join(World(1, 2))


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu7", "gpu7"), ("gpu[03-07,12],login1", "gpu03"), ("a1,b[2-3]", "a1"), ("rack2-gpu[9]", "rack2-gpu9")],
)
def test_the_tasks_of_a_slurm_step_meet_on_its_first_node(monkeypatch, nodes, first):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    slurm = {"PROCID": "5", "STEP_NUM_TASKS": "8", "LOCALID": "1", "JOB_ID": "123", "STEP_ID": "0"}
    for name, value in (slurm | {"STEP_NODELIST": nodes}).items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert World.from_environment() == World(5, 8, 1)
    assert _address() == (first, 22_300)


def test_a_process_outside_a_slurm_step_is_alone(monkeypatch):
    """The shell of an allocation has the job's variables but no task's."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert World.from_environment() == World()


LOST = """
import os, signal, sys, torch, torch.distributed as dist
from recipe.distributed.world import World
from recipe.distributed.ranks import joined
with joined(World.from_environment(), torch.device("cpu"), 20):
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(3))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_rank_that_is_killed_is_named_by_the_others():
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "3"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LOST], env=environment | {"RANK": str(rank)}, cwd=ROOT, stderr=subprocess.PIPE
        )
        for rank in range(3)
    ]
    said = [rank.communicate(timeout=60)[1].decode().strip().splitlines()[-1:] for rank in ranks]
    for rank in (0, 2):
        assert f"RankError: Rank {rank} lost rank 1 in the middle of the run" in said[rank][0]


def test_torchrun_ends_with_the_sentence_of_the_rank_that_failed(monkeypatch, tmp_path, capsys):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    with pytest.raises(SystemExit) as ended:
        fail(RankError("optimizer.lr=-1 must be positive.\nseed=-1 must be at least 0."))
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=int(str(ended.value)), error_file=str(file))
    expected = "error: optimizer.lr=-1 must be positive.\n  error: seed=-1 must be at least 0.\n==="
    assert expected in str(ChildFailedError("train.py", {0: failure}))
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("forked")
def test_under_torchrun_a_mistake_of_all_ranks_is_printed_once(tmp_path):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = started(*torchrun, ROOT / "train.py", "seq_len=abc", "device=cpu", folder=tmp_path)
    assert done.returncode != 0
    assert (done.stdout + done.stderr).count("seq_len=abc is not a whole number") == 1
    assert not list(tmp_path.iterdir())
