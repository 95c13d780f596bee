"""Sharded ranks begin with the weights of one process, and none of them has ever had them all."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.machine import ROOT
from tests.recipe.distributed.test_ranks import free_port


def built(folder: Path, ranks: int) -> list[dict[str, Any]]:
    """The report of each rank on building a sharded trainer on a CPU."""
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(ranks)}
    command = [sys.executable, "-m", "tests.recipe.distributed.building", "cpu", str(folder)]
    started = [
        subprocess.Popen(command, cwd=ROOT, env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]
    assert [process.wait(120) for process in started] == [0] * ranks
    return [json.loads((folder / f"{rank}-of-{ranks}.json").read_text()) for rank in range(ranks)]


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_rank_takes_memory_for_its_shards_and_has_the_weights_of_one_process(tmp_path):
    """The first rank, whose host draws the weights, has them all there; the other one has half."""
    (alone,), (first, second) = built(tmp_path, 1), built(tmp_path, 2)
    assert first["digest"] == second["digest"] == alone["digest"]
    assert alone["taken"] > 0.9 * alone["size"]
    assert second["taken"] < 0.75 * alone["size"]
