"""On several GPUs the bits are those of one: replicated and sharded, compiled with a CUDA graph and eager."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipe.training.checkpoint import newest_valid
from tests.gpu.needs import TWO_GPUS
from tests.gpu.several_gpus import GROUPS
from tests.recipe.distributed.test_faults import ranks_of, steps_logged, wait_for

pytestmark = TWO_GPUS

ROOT = Path(__file__).parents[2]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.mark.parametrize("group", GROUPS)
def test_losses_norms_and_weights_on_two_gpus_are_those_on_one(group, tmp_path):
    """Replicated and sharded, compiled and eager. Replicated and sharded compile to different kernels."""
    command = [sys.executable, *TORCHRUN, "-m", "tests.gpu.several_gpus", str(tmp_path), group]
    subprocess.run(command, cwd=ROOT, check=True)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert list(ranks[0]) == GROUPS[group]
    for name, (alone, _) in ranks[0].items():
        assert [rank[name] for rank in ranks] == [[alone, alone]] * 2, name
    if group == "eager":
        for name in ("eager", "Muon, eager"):
            assert ranks[0][f"replicate, {name}"] == ranks[0][f"shard, {name}"]


def test_no_gpu_has_the_whole_model_that_it_shards(tmp_path):
    command = [sys.executable, *TORCHRUN, "-m", "tests.recipe.distributed.building", "cuda", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True)
    ranks = [json.loads((tmp_path / f"{rank}-of-2.json").read_text()) for rank in range(2)]
    assert ranks[0]["digest"] == ranks[1]["digest"]
    assert all(0.4 * rank["size"] < rank["taken"] < 0.75 * rank["size"] for rank in ranks), ranks


@pytest.mark.parametrize("override", ["parallel.data=replicate", "parallel.data=shard"])
def test_a_signal_to_one_rank_saves_and_ends_all_within_a_step_and_twenty_seconds(override, tmp_path):
    """GPT-2 124M with its moments: 1.5 GB."""
    shutil.copy(os.__file__, tmp_path / "text.txt")
    overrides = [
        "model=gpt2", "attention=flash", "seq_len=1024", "training.batch_size=8", "data=text", "data.path=text.txt",
        "data.cache=cache", "tracking=disabled", "hydra.run.dir=run", "training.steps=100000", "training.log_every=1",
        "training.eval_every=0", "training.checkpoint_every=100000", override,
    ]  # fmt: skip
    command = [sys.executable, *TORCHRUN, str(ROOT / "train.py"), *overrides]
    with subprocess.Popen(command, cwd=tmp_path) as torchrun:
        try:
            wait_for(lambda: steps_logged(tmp_path / "run") >= 20, torchrun)
            os.kill(ranks_of(torchrun)["1"], signal.SIGTERM)
            began = time.monotonic()
            torchrun.wait(120)
            seconds = time.monotonic() - began
        finally:
            torchrun.kill()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert newest_valid(tmp_path / "run" / "checkpoints")[0].name == f"step-{summary['step']:08d}"
    assert seconds < 20 + summary["median"]["throughput/step_ms"] / 1e3
