"""The attention benchmark, end to end at sizes that a CPU does in a second."""

import gc
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import bench.attention.__main__
from attention import UnsupportedAttention
from bench.attention.__main__ import main, with_ratios
from bench.attention.peers import VARIANTS, Candidate, Problem, candidates, from_package
from bench.record import read

SMALL = ["--device", "cpu", "--heads", "8", "--masks", "causal"]
CPU = torch.device("cpu")
PROBLEM = Problem(B=2, H=3, T=32, D=8, variant="causal", dropout=0.0, dtype=torch.float32, device=CPU)


def run(folder, *arguments):
    """The rows of the result file after a measurement."""
    main([*SMALL, "--results", str(folder), "--name", "some", *arguments])
    (path,) = folder.glob("some-*.json")
    return read(path)


@pytest.fixture(scope="module", autouse=True)
def quick():
    """Times are short. Keep the collector, which runs after each candidate, off what other tests have left."""
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bench.attention.__main__.SECONDS", 0.001)
        yield


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    names = ["naive", "tiled", "sdpa-math", "sdpa-cudnn"]
    folder = tmp_path_factory.mktemp("bench")
    return run(folder, "--lengths", "32", "64", "--dropout", "0", "0.1", "--only", *names)


@pytest.mark.skipif("fa4" in candidates(), reason="FlashAttention-4 is installed")
def test_a_peer_that_is_not_installed_is_refused_by_name(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(tmp_path, "--only", "naive", "fa4")
    assert "--only fa4: FlashAttention-4 is not installed here; pip install flash-attn-4" in capsys.readouterr().err


def test_every_cell_is_measured_or_says_why_not(rows):
    assert len(rows) == 2 * 2 * 4
    for row in rows:
        assert (row["batch"] * row["length"], row["heads"] * row["head_size"]) == (64, 16)
        if row["name"] == "sdpa-cudnn":
            assert row["status"] == "refused"
            assert "attention.backend=cudnn" in row["message"]
            continue
        assert (row["status"], row["path"]) == ("measured", None)
        flops = 4 * row["batch"] * row["heads"] * row["length"] ** 2 * row["head_size"] / 2
        for direction, factor in (("forward", 1.0), ("backward", 2.5)):
            timing = row[direction]
            assert timing["low"] <= timing["ms"] <= timing["high"]
            assert timing["tflops"] == pytest.approx(factor * flops / timing["ms"] / 1e9)
        if row["name"] == "sdpa-math" and row["dropout"]:  # with another mask
            assert row["error"] is None
        else:
            assert set(row["error"]) == {"out", "dq", "dk", "dv"}
            assert max(row["error"].values()) < 1e-5


def test_a_wrong_implementation_shows_in_its_error_and_a_greedy_one_is_a_result(tmp_path, monkeypatch, capsys):
    def build_greedy(problem):
        def attend(q, k, v):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 PiB. More words.")

        return attend

    def build_wrong(problem):
        right = candidates()["naive"].build(problem)
        return lambda q, k, v: right(q, k * 1.1, v)

    def build_broken(problem):
        raise KeyError("surprise")

    field = {
        "wrong": Candidate("wrong", build_wrong),
        "greedy": Candidate("greedy", build_greedy),
        "broken": Candidate("broken", build_broken),
    }
    monkeypatch.setattr(bench.attention.__main__, "candidates", lambda: field)
    rows = {row["name"]: row for row in run(tmp_path, "--lengths", "32", "--dropout", "0")}
    assert rows["wrong"]["error"]["out"] > 0.01
    assert (rows["greedy"]["status"], rows["greedy"]["message"]) == ("out of memory", "CUDA out of memory")
    assert rows["broken"]["status"] == "failed"
    assert "broken: KeyError: 'surprise'" in capsys.readouterr().out


def test_flops_are_those_of_the_products_in_the_formula():
    problem = replace(PROBLEM, variant="full")
    (q, k, v), dout = problem.tensors()
    with FlopCounterMode(display=False) as counter:
        out = candidates()["naive"].build(problem)(q, k, v)
    forward, backward = problem.flops()
    assert counter.get_total_flops() == forward
    with FlopCounterMode(display=False) as counter:
        out.backward(dout)
    assert counter.get_total_flops() == 2 * forward  # FlashAttention's fifth product computes the scores again
    assert backward == 2 * forward + forward / 2


def test_flops_count_visible_keys_alone():
    def forward(variant):
        return replace(PROBLEM, B=1, H=1, T=4096, D=1, variant=variant).flops()[0]

    assert forward("causal") == forward("alibi") == 4 * 4096**2 / 2
    assert forward("window") == 4 * (1024 * 4096 - 1024**2 / 2)
    assert forward("documents") == 4 * (4 * 1024**2 / 2)


@pytest.mark.slow
def test_every_variant_is_compared_with_its_formula(tmp_path):
    variants = ["--masks", *VARIANTS, "--dropout", "0.1"]
    rows = run(tmp_path, "--lengths", "32", "--only", "naive", "tiled", "flex", *variants)
    assert {row["variant"] for row in rows} == set(VARIANTS)
    for row in rows:
        if row["name"] == "flex":
            assert row["status"] == "refused"
        else:
            assert max(row["error"].values()) < 1e-5


def test_ratios_are_to_the_fastest_of_the_others():
    rows = [
        {"name": name, "ours": name == "flash", "forward": {"tflops": speed}, "backward": {"tflops": 1.0}}
        for name, speed in {"flash": 300.0, "sdpa": 200.0, "flex": 150.0}.items()
    ]
    assert [row["forward"]["of_fastest_peer"] for row in with_ratios(rows)] == [1.5, 1.0, 0.75]


PACKAGE = """
def flash_attn_func(q, k, v, **options):
    called.update(options, shape=q.shape)
    return q + k + v, None

called = {}
"""


def test_a_package_is_called_in_its_layout_and_refuses_dropout_that_it_lacks(tmp_path, monkeypatch):
    (tmp_path / "stand_in_for_flash_attn.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    problem = replace(PROBLEM, T=16)
    (q, k, v), _ = problem.tensors()
    out = from_package("stand_in_for_flash_attn", has_dropout=False)(problem)(q, k, v)
    assert torch.equal(out, q + k + v)
    called = import_module("stand_in_for_flash_attn").called
    assert called == {"causal": True, "softmax_scale": pytest.approx(8**-0.5), "shape": (2, 16, 3, 8)}
    from_package("stand_in_for_flash_attn", has_dropout=True, deterministic=True)(problem)(q, k, v)
    assert (called["dropout_p"], called["deterministic"]) == (0.0, True)
    with pytest.raises(UnsupportedAttention, match="stand_in_for_flash_attn has no dropout"):
        from_package("stand_in_for_flash_attn", has_dropout=False)(replace(problem, dropout=0.1))


def test_selections_do_not_overwrite_the_whole_result():
    names = [
        bench.attention.__main__.parse(["--device", "cpu", *more]).name
        for more in ([], ["--only", "flash"], ["--only", "flash", "--name", "mine"])
    ]
    assert names == ["attention", "attention-selection", "mine"]


def test_a_row_names_the_kernels_that_ran():
    problem = replace(PROBLEM, B=1, H=2, T=4096, D=128, dtype=torch.bfloat16)
    assert candidates()["flash"].path(problem) == "plain"  # the interpreter's
