"""attention=<file>.py:<name>: an attention trains, resumes and samples without a line in the repository."""

import hashlib
import shutil
from pathlib import Path

import pytest
import torch

import sample
from attention import AttentionConfig, Score, UnsupportedAttention, build_attention
from attention.check.subject import find
from recipe.run.compose import checked, jobs, to_config
from recipe.run.config import ConfigError
from recipe.training.checkpoint import newest_valid, read_manifest
from tests.programs import losses, rewrite, train

FUNCTION = """
import torch
from helper import visible


def attend(q, k, v, causal=True, window=None):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    s = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~visible(q.shape[2], causal, window), -torch.inf)
    return s.softmax(dim=-1) @ v
"""
HELPER = """
import torch


def visible(T, causal, window):
    distance = torch.arange(T)[:, None] - torch.arange(T)
    return ((distance >= 0) | (not causal)) & (distance < (window or T))
"""
SMALL = [
    "data=text", "data.path=text.txt", "data.cache=cache", "seq_len=24", "device=cpu", "tracking=disabled",
    "model.n_layers=1", "model.n_embd=16", "model.n_heads=2", "training.batch_size=2", "training.steps=2",
    "training.log_every=1", "training.eval_batches=1", "training.sample_tokens=0", "schedule.warmup_steps=0",
]  # fmt: skip


@pytest.fixture
def folder(here):
    """The working directory: a text, and the function in a folder."""
    Path("text.txt").write_text("to be or not to be, that is the question\n" * 200)
    Path("lib").mkdir()
    Path("lib/mine.py").write_text(FUNCTION)
    Path("lib/helper.py").write_text(HELPER)
    return here


def test_a_function_has_the_features_of_its_parameters(folder):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 9, 8) for heads in (4, 2, 2))
    of_file, naive = (build_attention(AttentionConfig(name)) for name in ("lib/mine.py:attend", "naive"))
    for score in (Score(), Score(window=3), Score(causal=False)):
        torch.testing.assert_close(of_file(q, k, v, score=score).out, naive(q, k, v, score=score).out)
    assert find("lib/mine.py:attend").features == find("lib.mine:attend").features
    with pytest.raises(UnsupportedAttention, match="does not support soft_cap"):
        of_file(q, k, v, score=Score(soft_cap=5.0))
    for wrong, sentence in (
        (AttentionConfig("lib/mine.py:attend", dropout=0.1), "has no dropout"),
        (AttentionConfig("lib/mine.py:other"), "cannot be imported: AttributeError"),
        (AttentionConfig("nowhere.py:attend"), "there is no file nowhere.py"),
        (AttentionConfig("lib/mine.py:torch"), "is module; name a class or a function"),
    ):
        with pytest.raises(UnsupportedAttention, match=sentence):
            build_attention(wrong)


def test_a_file_may_import_from_the_current_folder(folder):
    Path("nearby.py").write_text(HELPER)
    Path("lib/far.py").write_text(FUNCTION.replace("helper", "nearby"))
    assert build_attention(AttentionConfig("lib/far.py:attend")).exact


def test_a_function_claims_the_same_in_a_run_and_in_a_check(folder):
    Path("lib/other.py").write_text(FUNCTION + "attend.exact = False\n")
    for name, exact in (("lib/mine.py:attend", True), ("lib/other.py:attend", False)):
        assert build_attention(AttentionConfig(name)).exact == find(name).exact == exact


def test_the_name_works_in_sweeps_and_as_a_path(folder):
    swept = jobs(["attention=naive,lib/mine.py:attend", *SMALL])
    assert [to_config(checked(job)).attention.name for job in swept] == ["naive", "lib/mine.py:attend"]
    cfg = checked([f"attention={folder}/lib/mine.py:attend"])
    assert (cfg.attention.name, cfg.hydra.run.dir[-6:]) == (f"{folder}/lib/mine.py:attend", "attend")


def test_a_run_trains_as_naive_does_and_goes_on_with_the_same_file_alone(folder, refused, capsys):
    for name, run in (("naive", "naive"), ("lib/mine.py:attend", "run")):
        assert train(*SMALL, f"attention={name}", f"hydra.run.dir={run}") == 0
    expected, found = ([loss for _, loss, _ in losses(Path(run))[1:]] for run in ("naive", "run"))
    assert found == pytest.approx(expected, rel=1e-5)
    assert Path("run/mine.py").read_text() == FUNCTION
    checkpoint, _ = newest_valid(Path("run/checkpoints"))
    assert read_manifest(checkpoint).metadata["attention_file"] == hashlib.sha256(FUNCTION.encode()).hexdigest()

    asked = ["run=run", "tokens=2", "prompt=to", "device=cpu"]
    for other in ([], ["attention=lib/other.py:attend"]):
        with pytest.raises(ConfigError, match=r"use attention=lib/mine\.py:attend"):
            sample.main([*asked, *other])
    capsys.readouterr()
    sample.main([*asked, "attention=lib/mine.py:attend"])
    assert capsys.readouterr().out.startswith("to")

    assert train("resume=run", "training.steps=3") == 0
    Path("lib/mine.py").write_text(FUNCTION + "changed = True\n")
    said = "lib/mine.py is not the attention of run/checkpoints/step-00000003"
    assert said in refused("resume=run", "training.steps=4")
    with pytest.raises(ConfigError, match=said):
        sample.main([*asked, "attention=lib/mine.py:attend"])
    assert train("resume=run", "training.steps=4", "attention=naive") == 0


def test_the_copy_in_a_run_folder_is_not_imported(folder, refused):
    assert train(*SMALL, "attention=lib/mine.py:attend", "hydra.run.dir=run") == 0
    for file in ("config.yaml", "overrides.yaml"):  # as a stranger might have written them
        rewrite(Path("run/.hydra", file), "lib/mine.py", "run/mine.py")
    shutil.move("lib/helper.py", "helper.py")
    for again in ([], ["attention=run/mine.py:attend"]):
        said = refused("resume=run", *again, "training.steps=3")
        assert "run/mine.py:attend lies in run, and nothing in a run folder is run" in said
    said = refused(*SMALL, "attention=lib/mine.py:attend", "hydra.run.dir=lib")
    assert "lib/mine.py:attend lies in lib, and nothing in a run folder is run" in said
