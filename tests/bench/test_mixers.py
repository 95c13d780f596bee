"""The pages of mixers: half-lives of known decays, and the table of a GPU's result."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.autotuner import Autotuner

from bench.decays import draw, half_lives, main
from bench.mixers import first_configurations, times, verdict
from model.options import GPTConfig, Positions
from recipe.drawing import Chart, render_png
from tests.parts import built


@triton.autotune([triton.Config({"FACTOR": factor}) for factor in (3, 5)], key=[])
@triton.jit
def tuned_kernel(x, FACTOR: tl.constexpr):
    """Two numbers of x times a factor."""
    places = x + tl.arange(0, 2)
    tl.store(places, FACTOR * tl.load(places))


def test_half_lives_are_those_of_the_decays():
    config = GPTConfig(n_layers=3, n_embd=32, positions=Positions.none, layers=["retnet", "gla", "attention"])
    model = built(config, 32).eval()
    text = SimpleNamespace(encode_ordinary=lambda text: [1, 2, 3] * 20)
    trained: Any = SimpleNamespace(model=model, tokenizer=text)
    retnet, gla = half_lives(trained, "")
    expected = [math.log(0.5) / math.log(1 - 2.0 ** (-5 - head)) for head in range(4)]
    for percentile in retnet:
        assert percentile.tolist() == pytest.approx(expected, rel=1e-4)
    assert gla.shape == (3, 4)
    assert (gla[0] < gla[2]).all()
    assert render_png(Chart("decays", "", "", lambda figure: draw(figure, [retnet, gla]))).startswith(b"\x89PNG")


def test_a_folder_that_is_no_run_is_refused_in_a_sentence(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["decays", str(tmp_path)])
    with pytest.raises(SystemExit):
        main()
    assert "is not a run folder" in capsys.readouterr().err


def test_kernels_take_their_first_configuration_without_being_tuned(monkeypatch):
    """Here as on a GPU pytest has frozen what was imported, and the collector does not find it any more."""
    for name in ("_bench", "check_disk_cache"):
        monkeypatch.setattr(Autotuner, name, vars(Autotuner)[name])  # so that it is put back
    first_configurations()
    x = torch.ones(4)
    tuned_kernel[(1,)](x)
    assert tuned_kernel.best_config.kwargs == {"FACTOR": 3}
    assert x.tolist() == [3, 3, 1, 1]


def test_the_verdict_has_the_first_wrong_group_or_the_refusal():
    right = {"status": "ok", "group": "lengths", "detail": ""}
    wrong = {"status": "FAIL", "group": "decays", "detail": "dq is off"}
    refused = {"status": "skip", "group": "states", "detail": "refused: no states"}
    assert verdict({"lines": [right, wrong]}) == "wrong in 1 of 2 groups; decays: dq is off"
    assert verdict({"lines": [right, refused]}) == "right in 1 groups"
    assert verdict({"lines": [refused]}) == "states: refused: no states"


def test_the_times_of_a_layer_have_a_ratio():
    rows = []
    for way, ms in (("package", 2.0), ("fla", 2.1), ("fla, compiled", 1.5), ("chunked", 30.0)):
        rows.append({"part": "layer", "mixer": "gdn", "way": way, "tokens": 8192, "ms": ms})
    assert times(rows).splitlines()[-1] == (
        "| `gdn`, 8,192 tokens | 2.00 ms (1.00) | 2.10 ms (1.05) | 1.50 ms (0.75) | 30.00 ms (15.00) |"
    )
