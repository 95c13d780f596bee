"""The memory of the attention alone."""

import resource
from dataclasses import replace

import pytest
import torch

from attention import AttentionConfig, AttentionShape, Score, build_attention
from recipe.run.memory import AllocationMeter
from recipe.run.record import attention_peak
from recipe.training.device import cpu_memory_limit

SHAPE = AttentionShape(head_dim=16, n_heads=2, n_kv_heads=2, dtype=torch.float32, device=torch.device("cpu"))


def peak(name: str, T: int, dropout: float = 0.0, B: int = 1) -> int:
    return attention_peak(build_attention(AttentionConfig(name=name, dropout=dropout)), SHAPE, B, T)


def test_peak_is_what_is_alive_at_once():
    x = torch.ones(1000)
    with AllocationMeter() as meter:
        a = x + 1  # 4000 bytes
        b = a * 2  # 8000
        del a  # 4000
        c = (b + 1).double()  # 4000 + 4000 + 8000
        del b, c
    assert meter.peak == 16_000
    assert meter.live == 0


def test_views_and_in_place_operators_take_nothing():
    x = torch.ones(1000)
    with AllocationMeter() as meter:
        x.view(10, 100).T.add_(1)
        x[5:].mul_(2)
    assert meter.peak == 0


def test_naive_grows_with_the_square_of_the_sequence_and_tiled_with_the_sequence():
    assert peak("naive", 512) / peak("naive", 256) == pytest.approx(4, rel=0.1)
    first, second, third = (peak("tiled", T) for T in (512, 768, 1024))
    assert third - second == pytest.approx(second - first, rel=0.02)


def test_generators_are_left_alone():
    state = torch.get_rng_state()
    peak("naive", 64, dropout=0.1)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_memory_limit_on_a_cpu_holds_during_the_block_and_not_afterwards():
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with cpu_memory_limit(16):
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            torch.empty(20 * 2**30, dtype=torch.uint8)
        torch.empty(2**20, dtype=torch.uint8)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


@pytest.mark.parametrize("score", [Score(window=4), Score(alibi=True), Score(sinks=True)])
def test_every_score_is_measured(score):
    attend = build_attention(AttentionConfig())
    assert attention_peak(attend, replace(SHAPE, scores=(score,)), 1, 64) >= attention_peak(attend, SHAPE, 1, 64)
