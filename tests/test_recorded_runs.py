"""Run folders of version 0.2 (commit 550ba45) still resume, sample, evaluate and compare.

tests/fixtures/runs-0.2.tar.xz holds small ones of several kinds, the text they train on, and in expected.json what that
commit made of them: the losses of further steps, the loss on the whole validation split, and a text.
"""

import contextlib
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

import compare
import eval
import sample
from recipe.run.config import ConfigError
from recipe.run.launch import prepare
from tests.programs import ROOT, completed, losses, rewrite, summary, train

ARCHIVE = ROOT / "tests" / "fixtures" / "runs-0.2.tar.xz"
KINDS = ["causal", "formula", "documents", "muon", "ema", "scores", "sharded"]
# alibi and soft_cap may round differently from one version to the next.
ROUNDED = {"scores"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The archive's content, which is also the current folder."""
    unpacked = tmp_path_factory.mktemp("runs")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(unpacked, filter="data")
    with contextlib.chdir(unpacked):
        yield unpacked


@pytest.fixture(scope="module")
def recorded(folder):
    content: dict[str, Any] = json.loads((folder / "expected.json").read_text())
    return content


def this_machine() -> dict[str, Any]:
    """What the last bits of sums depend on: the processor and torch."""
    info: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        info.setdefault(name.strip(), value.strip())
    return {"cpu": [info.get(name) for name in ("model name", "cpu family", "model")], "torch": torch.__version__}


def assert_same(found: list[Any], recorded: dict[str, Any], kind: str, of: str) -> None:
    """Equal to the bit on a machine of the kind that recorded them, else to 1e-5."""
    expected = recorded["kinds"][kind][of]
    if recorded["machine"] == this_machine() and kind not in ROUNDED:
        assert found == expected
    else:
        assert [step for step, _ in found] == [step for step, _ in expected]
        assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected], rel=1e-5)


def assert_continued(run: Path, recorded: dict[str, Any], kind: str) -> None:
    """The further steps have the losses that 550ba45 gets for them."""
    lines = [line for line in losses(run) if line[0] > recorded["steps"]]
    assert_same([[step, loss] for step, loss, _ in lines if loss is not None], recorded, kind, "losses")
    assert_same([[step, loss] for step, _, loss in lines if loss is not None], recorded, kind, "val")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_it_resumes_with_the_same_losses(kind, folder, recorded):
    run = shutil.copytree(folder / kind, folder / f"{kind}-resumed", symlinks=True)
    # One rank computes what the two that began it compute.
    ranks = ["parallel.data=replicate"] if kind == "sharded" else []
    assert train(f"resume={run.name}", f"training.steps={recorded['more']}", *ranks) == 0
    assert_continued(run, recorded, kind)


def test_a_sweep_does_not_go_on_with_other_defaults(folder):
    sweep = shutil.copytree(folder / "sweep", folder / "sweep-again", symlinks=True)
    shutil.rmtree(sweep / "3")
    common = json.loads((sweep / "sweep.json").read_text())["jobs"][0][2:]
    again = ["-m", "attention=naive,tiled", "seed=1,2", *common, f"hydra.sweep.dir={sweep}"]
    assert callable(prepare(again))  # what trains
    rewrite(sweep / "1" / ".hydra" / "config.yaml", "positions: learned", "positions: rotary")
    with pytest.raises(ConfigError, match=r"sweep-again/1 has other defaults .* \(model\.positions='rotary'\), "):
        prepare(again)


@pytest.mark.slow
def test_a_sharded_run_resumes_on_as_many_ranks(folder, recorded, forked):
    run = shutil.copytree(folder / "sharded", folder / "sharded-again", symlinks=True)
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    resume = [f"resume={run.name}", f"training.steps={recorded['more']}"]
    completed(*ranks, ROOT / "train.py", *resume, folder=folder)
    assert_continued(run, recorded, "sharded")


@pytest.mark.parametrize("kind", KINDS)
def test_it_continues_a_prompt(kind, folder, recorded, capsys):
    sample.main([f"run={kind}", "tokens=16", "temperature=0", "prompt=to be", "device=cpu"])
    assert capsys.readouterr().out == recorded["kinds"][kind]["sample"]


@pytest.mark.parametrize("kind", KINDS)
def test_its_loss_is_the_recorded_one(kind, folder, recorded):
    expected = recorded["kinds"][kind]["eval"]
    for name in expected:
        eval.main([f"run={kind}", "device=cpu", *name.split()[1:]])
    measured = summary(folder / kind)["eval"]
    assert {name: result["loss"] for name, result in measured.items()} == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("kind", "names"), [("sweep", ("naive", "tiled")), ("arena", ("causal", "near"))])
def test_its_runs_are_compared(kind, names, folder):
    compare.main([kind, "wandb=disabled", "out=page"])
    page = (folder / "page" / "index.html").read_text()
    assert all(name in page for name in names)


@pytest.mark.slow
def test_an_arena_goes_on_with_further_seeds(folder, forked):
    """The runs that it has are not trained again."""
    before = [(folder / "arena" / str(n) / "summary.json").read_bytes() for n in range(4)]
    arguments = json.loads((folder / "arena" / "arena.json").read_text())["arguments"]
    arguments.remove("training.time_attention=false")  # no longer an option, and refused as an override
    completed(ROOT / "train.py", *arguments, "arena.seeds=3", "hydra.sweep.dir=arena", folder=folder)
    assert [(folder / "arena" / str(n) / "summary.json").read_bytes() for n in range(4)] == before
    assert len(list((folder / "arena").glob("*/summary.json"))) == 6
    plan = json.loads((folder / "arena" / "arena.json").read_text())
    assert [look["seeds"] for look in plan["looks"]] == [2, 3]
