"""Each layer's attention alone: a run's probe detects errors in bf16 that the whole model's rounding hides."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import attention
from attention import Score
from attention.naive import NaiveAttention
from data.batches import Batch
from model.options import GPTConfig
from model.score import ScoreConfig
from recipe.compare.parity import alone_worst
from recipe.compare.sweeps import Cell
from recipe.compare.verdict import Verdict
from recipe.training.parity import summarise, wrong_alone
from recipe.training.parity_layers import check_layers, part
from tests.attention.faults import batches, probed, registered
from tests.parts import built, window
from tests.recipe.compare.reading import edit, runs_in
from tests.recipe.compare.synthetic import write_run
from tests.right_attention import RIGHT
from tests.wrong_attention import FAULTS, WRONG, Fault

# In bf16 the comparison of the whole model calls these equal to the reference.
HIDDEN = (
    "scale_off",
    "keep_scale_off",
    "last_key_gradient",
    "hidden_tile_edge",
    "rare_call",
    "evaluation_alone",
    "cap_without_derivative",
    "rare_branch",
    "last_tile_gradient",
    "sums_in_bf16",
    "alibi_off_by_one",
)


@pytest.fixture(autouse=True)
def known():
    with registered():
        yield


# The tests of the check and of the whole model's comparison show these.
SHOWN_ELSEWHERE = {
    *WRONG, "sink_without_gradient", "document_off_by_one", "window_off_by_one", "lse_in_base_two",
    "backward_ignores_window", "dropout_shifted_in_backward", "mask_shared_by_heads", "mask_ignores_step",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAULTS if name not in SHOWN_ELSEWHERE])
def test_a_fault_is_caught_in_bf16(name, caplog):
    count = 3 if name == "rare_call" else 1
    found = probed(FAULTS[name], "bf16", count=count, n_layers=2 if name == "rare_call" else 1)
    assert found["warned"] is not None
    assert "times as far from fp64 as rounding explains" in caplog.text
    if name in HIDDEN:
        assert not found["whole_model"]


FEW = ("naive", "tiled in small tiles", "base_two")  # in other precisions too
RIGHT_IN = [(name, "bf16") for name in RIGHT] + [(name, dtype) for name in FEW for dtype in ("fp32", "fp16")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), RIGHT_IN)
def test_correct_attention_is_not_accused(name, dtype):
    config = replace(RIGHT[name], dropout=0.0 if name == "sdpa" else 0.1)
    found = probed(Fault(config, Score(sinks=name != "sdpa")), dtype, seed=7, count=1, n_layers=1)
    assert found["warned"] is None, found


def scored(
    name: str, dtype: torch.dtype, score: ScoreConfig, dropout: float = 0.1, documents: bool = False
) -> dict[str, Any]:
    """The check of all layers of a small model with this score."""
    size = GPTConfig(n_layers=1, n_heads=4, n_kv_heads=2, n_embd=64)
    # With a spread, as a learned tensor begins at 0.
    model = built(size, 65, 65, name, dropout, spread=0.05, score=score, documents=documents)
    ((batch, key),) = batches(3, documents, 1)
    return check_layers(model, batch, key, dtype)


BY_FORMULA = {
    "factor": ScoreConfig(formula="a[h] * s", learned={"a": {"shape": ["h"], "init": 1}}),
    "one number": ScoreConfig(formula="a * s * log(n + 1)", learned={"a": {"shape": [], "init": 1}}),
    "bias": ScoreConfig(formula="s + bias[h, min(i - j, 15)]", learned={"bias": ["h", 16]}),
    "gates": ScoreConfig(formula="s + c[h, i] - c[h, j]", tensors={"c": "model.forget_gate"}),
    "cap": ScoreConfig(formula="5 * tanh(s / 5) - slope[h] * (i - j)", tensors={"slope": "alibi_slopes"}, sinks=True),
    "corner": ScoreConfig(formula="max(s, w[h] * s)", learned={"w": {"shape": ["h"], "init": 0.3}}, window=20),
}


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.bfloat16) for name in BY_FORMULA), ("gates", torch.float32)]
)
def test_attention_by_formula_is_judged_and_not_accused(name, dtype):
    found = scored("tiled", dtype, BY_FORMULA[name], documents=name == "bias")
    assert 0 < found["parity/attention_error"] < 1, found
    assert 0 < found["parity/attention_error_higher"] < 1, found
    assert "parity/attention_unseen" not in found


class Changes(NaiveAttention):
    """Computes with tensors, or returns their gradients, that are 0.2 % too large."""

    name = "changes"
    fault = ""

    def prepare(self, q, call, S):
        wrong = {
            name: x * 1.002 if self.fault == "tensor" else x.detach() + 1.002 * (x - x.detach())
            for name, x in call.tensors.items()
        }
        return super().prepare(q, call._replace(tensors=wrong), S)


@pytest.mark.parametrize(
    ("score", "fault", "result"),
    [
        ("bias", "tensor", "out"),
        ("bias", "gradient", "d(bias)"),
        ("gates", "gradient", "d(c)"),
        ("gates", "tensor", "out"),
    ],
)
def test_a_wrong_tensor_or_gradient_of_a_formula_is_caught(score, fault, result, monkeypatch):
    monkeypatch.setitem(attention.IMPLEMENTATIONS, "changes", Changes)
    monkeypatch.setattr(Changes, "fault", fault)
    found = scored("changes", torch.bfloat16, BY_FORMULA[score])
    assert found["parity/attention_error_higher"] > 10, found
    assert f": {result} of " in found["parity/attention_worst"] or result == "out"


def test_no_number_is_written_where_nothing_was_compared():
    found = scored("naive", torch.float32, ScoreConfig(formula="where(s < 0, s, 2 * s)"))
    sentence = "layer 0 (its formula compares s, and rounding decides on which side a score falls)"
    assert found == {"parity/attention_unseen": sentence}
    assert wrong_alone(found) is None


def test_attention_is_judged_with_the_scale_of_the_model():
    """Of model.scale_dim, in heads of another size: 1/sqrt(4), where that of the heads would be 1/sqrt(16)."""
    model = built(GPTConfig(n_layers=1, n_heads=2, n_embd=32, scale_dim=4), 16, 65, "tiled")
    found = check_layers(model, Batch(*window(vocab_size=65)), None, torch.float32)
    assert 0 < found["parity/attention_error"] < 1, found
    assert found["parity/attention_error_higher"] < 1, found


class TakesBf16Alone(NaiveAttention):
    """Refuses other precisions, and the log-sum-exp."""

    name = "takes_bf16_alone"

    def attend(self, q, k, v, call):
        if q.dtype is not torch.bfloat16:
            raise RuntimeError("only bf16 is supported")
        return super().attend(q, k, v, call)


def test_precisions_in_which_layers_were_not_compared_are_recorded(monkeypatch):
    monkeypatch.setitem(attention.IMPLEMENTATIONS, "takes_bf16_alone", TakesBf16Alone)
    found = scored("takes_bf16_alone", torch.bfloat16, ScoreConfig(), dropout=0.0)
    assert wrong_alone(found) is None
    assert found["parity/attention_unseen"] == "fp32 (only bf16 is supported)"
    assert "parity/attention_error_higher" not in found


def test_long_sequences_are_compared_in_part():
    cpu = torch.device("cpu")
    assert part(4, 32, cpu) == (4, 32)
    assert part(64, 128, cpu) == (4, 128)
    assert part(8, 4096, cpu) == (1, 256)


def test_an_error_above_what_rounding_explains_is_wrong():
    metrics = {"parity/attention_error": 0.4, "parity/attention_error_higher": float("inf")}
    assert wrong_alone(metrics | {"parity/attention_worst": "layer 1, training, fp32: dk"}) is not None
    assert wrong_alone({"parity/attention_error": 1.0}) is None
    assert wrong_alone({}) is None
    found = wrong_alone({"parity/attention_error": 1.36e149, "parity/attention_worst": "layer 1, training, fp64: out"})
    assert found == "layer 1, training, fp64: out is over a billion times as far from fp64 as rounding explains"


def test_the_page_claims_nothing_where_nothing_was_compared(tmp_path):
    folder = write_run(tmp_path / "flash", "flash", 1)

    def unseen(line):
        kept = {name: value for name, value in line.items() if not name.startswith("parity/")}
        older = {} if line["step"] else {"parity/attention_error": 0.0, "parity/attention_worst": ""}
        return kept | older | {"parity/attention_unseen": "layer 0 (it compares s)"}

    edit(folder, unseen)
    (run,) = runs_in(folder)
    alone = alone_worst([run])
    assert alone is not None
    assert (alone.errors, alone.agrees, alone.unseen) == ({}, None, ("layer 0 (it compares s)",))
    assert not Verdict("flash", Cell((run,), {run.name: "flash"}), alone=alone).agreements
    assert summarise(run.records) is None


def test_the_summary_and_the_report_keep_the_worst_of_every_check(tmp_path):
    (run,) = runs_in(write_run(tmp_path / "flash", "flash", 1, error="scale"))
    alone = alone_worst([run])
    assert alone is not None
    assert set(alone.errors) == {"bf16", "fp32"}
    assert not alone.agrees
    assert (alone.errors["fp32"], alone.step) == (40.0, 100)
    assert alone.where == "layer 3, training, fp32: dk of sequence 0, head 1, key 31"
    assert alone.unseen == ("the log-sum-exp (it is not returned)",)
    summary = summarise(run.records)
    assert summary is not None
    assert summary["worst_attention_error_higher"] == alone.errors["fp32"]
