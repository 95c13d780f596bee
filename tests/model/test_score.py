"""Layers whose attention differs, normalised queries and keys, learned sinks, and documents within a row."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from attention import Layout, Score, ScoreError
from model.attention import Surroundings
from model.counting import flops_per_token
from model.options import Positions
from model.score import ScoreConfig, describe_score, layer_scores, score_mistakes
from recipe.errors import sentence_of
from recipe.training.optimizer import OPTIMIZERS, OptimizerConfig
from tests.parts import SMALL, built, window

TOKENS, _ = window()
EACH_IMPLEMENTATION = pytest.mark.parametrize("name", ["naive", "tiled"])
WINDOW_AND_FULL = ScoreConfig("gemma2", window=3, soft_cap=20.0, layers=[{}, {"window": None}])


def test_a_pattern_is_repeated_over_the_layers():
    windowed, full = Score(window=3, soft_cap=20.0), Score(soft_cap=20.0)
    assert layer_scores(WINDOW_AND_FULL, 4) == (windowed, full, windowed, full)
    assert layer_scores(replace(WINDOW_AND_FULL, layers=None), 2) == (windowed, windowed)
    assert describe_score(WINDOW_AND_FULL) == "gemma2 (window=3, soft_cap=20.0, layers=[{}, {window: null}])"
    assert describe_score(ScoreConfig()) == "causal"


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (ScoreConfig(layers=[{}, {}, {}]), r"score.layers has 3 entries, which do not divide model.n_layers=4"),
        (ScoreConfig(layers=[]), r"score.layers has 0 entries"),
        (ScoreConfig(layers=[{"windows": 3}]), r"score.layers has windows=3; an entry takes window, soft_cap,"),
        (ScoreConfig(layers=[{"window": "all"}]), r'window="all" must be a whole number'),
        (ScoreConfig(layers=[{"window": 0}]), r"window=0 must be at least 1"),
        (ScoreConfig(window=-1), r"window=-1 must be at least 1"),
    ],
)
def test_scores_that_fit_no_model_are_refused(config, complaint):
    with pytest.raises(ScoreError, match=complaint):
        layer_scores(config, 4)


def test_all_that_is_wrong_with_a_score_is_reported_once():
    config = ScoreConfig(window=0, layers=[{"soft_cap": -1.0}, {"span": 3}, {}, {"window": -2}])
    sentences = [sentence_of(error) for error in score_mistakes(config, 4)]
    starts = ["score.window=0 ", "score.soft_cap=-1.0 ", "score.layers has span=3", "score.window=-2 "]
    assert [s[: len(t)] for s, t in zip(sentences, starts, strict=True)] == starts


@EACH_IMPLEMENTATION
def test_keys_that_the_first_layer_does_not_see_arrive_through_the_second(name):
    """Two windows of three reach four tokens back; with a full second layer, to the start."""
    changed = TOKENS.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 100
    for score, reach in ((ScoreConfig(window=3), 4), (WINDOW_AND_FULL, 16)):
        model = built(name=name, score=score).eval()
        differs = (model(TOKENS) != model(changed)).any(-1).any(0)
        assert not differs[:4].any()
        assert differs[4 : min(4 + reach + 1, 16)].all()
        assert not differs[4 + reach + 1 :].any()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("dtype", "half"), [(torch.float32, True), (torch.float64, False)])
def test_queries_are_normalised_in_the_precision_of_the_weights(dtype, half):
    model, x, seen = built(replace(SMALL, qk_norm=True)).to(dtype), torch.randn(2, 16, 32, dtype=dtype), []

    def spy(q, k, v, **options):
        seen.append(q)
        return model.attend(q, k, v, **options)

    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        model.h[0](x, Surroundings(model.tables, Layout(), spy))
        norm, projection = (model.get_submodule(f"h.0.{name}") for name in ("ln_1", "attn.c_attn"))
        projected = projection(norm(x))[..., :32]
    q = projected.unflatten(-1, (4, 8)).transpose(1, 2).to(dtype)
    expected = (q * torch.rsqrt(q.square().mean(-1, keepdim=True) + 1e-6)).to(projected.dtype)
    assert_close(seen[0], expected, rtol=2**-8 if half else 1e-14, atol=0)


@EACH_IMPLEMENTATION
def test_sinks_are_learned_and_do_not_decay(name):
    model = built(name=name, score=ScoreConfig(sinks=True))
    model(TOKENS, TOKENS).backward()
    sinks = [model.get_parameter(f"h.{layer}.attn.sinks") for layer in (0, 1)]
    assert all(sink.shape == (4,) and sink.grad is not None and sink.grad.abs().min() > 0 for sink in sinks)
    optimizer = OPTIMIZERS["adamw"](model, OptimizerConfig())
    (group,) = [group for group in optimizer.param_groups if any(p is sinks[0] for p in group["params"])]
    assert group["weight_decay"] == 0


MIXED = replace(SMALL, positions=Positions.none, n_layers=5, layers=["gdn", "kda", "mamba2", "retnet", "attention"])


@pytest.mark.parametrize("config", [*(replace(SMALL, positions=positions) for positions in Positions), MIXED])
@EACH_IMPLEMENTATION
def test_documents_of_a_row_are_what_they_are_alone(name, config):
    """With positions that restart, each document of a packed row has the logits that it has alone."""
    model = built(config, name=name, documents=True, restart_positions=True).eval()
    starts = torch.tensor([[0] * 5 + [5] * 1 + [6] * 10, [0] * 16], dtype=torch.int32)
    packed = model(TOKENS, document_starts=starts)
    for row, first, last in ((0, 0, 5), (0, 5, 6), (0, 6, 16), (1, 0, 16)):
        assert_close(packed[row, first:last], model(TOKENS[row : row + 1, first:last])[0])
    masked = built(config, name=name, documents=True).eval()(TOKENS, document_starts=starts)
    assert_close(masked[0, :5], packed[0, :5])
    if config.positions is Positions.learned:  # rotary positions are relative
        assert not torch.allclose(masked[0, 6:], packed[0, 6:])


def test_flops_count_what_the_layers_see():
    causal, windowed = built(seq_len=64), built(seq_len=64, score=WINDOW_AND_FULL)
    none, full = flops_per_token(causal, 0, causal=True), flops_per_token(causal, 64, causal=False)
    assert flops_per_token(windowed, 64, causal=False) == full
    # One of the two layers sees half of the keys, the other a band of three.
    band = (3 * 64 - 3**2 / 2) / 64**2
    assert flops_per_token(windowed, 64, causal=True) == pytest.approx(none + (full - none) * (0.5 + band) / 2)
