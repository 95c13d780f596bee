"""A call alike is replayed: it computes the same bits as one that Triton launches, on any stream, thread and GPU."""

from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from attention import AttentionConfig, DropoutKey, Layout, Score, build_attention
from attention.decode.cache import Cache
from attention.flash import launch
from tests.equal import assert_equal
from tests.gpu.needs import COMMON_SIZES, TWO_GPUS

CALLS: dict[str, tuple[float, dict[str, Any]]] = {
    "causal": (0.0, {}),
    "full": (0.0, {"score": Score(causal=False)}),
    "window": (0.0, {"score": Score(window=100)}),
    "ALiBi": (0.0, {"score": Score(alibi=True), "slopes": torch.tensor([0.5, 0.25])}),
    "sinks": (0.0, {"score": Score(sinks=True), "sinks": torch.tensor([0.5, 0.25])}),
    "dropout": (0.25, {"dropout_key": DropoutKey(1, 2, 3, 4)}),
    "positions": (0.0, {"layout": Layout(q_start=40, k_start=0)}),
}


def results(name, D, seed=0):
    """out and gradients."""
    rate, options = CALLS[name]
    options = {key: x.cuda() if isinstance(x, Tensor) else x for key, x in options.items()}
    generator = torch.Generator().manual_seed(seed)
    q, k, v, do = (torch.randn(2, 2, 300, D, generator=generator).cuda().bfloat16() for _ in range(4))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = build_attention(AttentionConfig("flash", dropout=rate))(*inputs, **options).out
    return [out.detach(), *torch.autograd.grad(out, inputs, do)]


@COMMON_SIZES
@pytest.mark.parametrize("name", CALLS)
def test_the_third_call_is_replayed_and_computes_the_same_bits(name, D, monkeypatch):
    monkeypatch.setattr(launch, "CALLS", known := launch.Known())
    first, second, third = (results(name, D, seed) for seed in (1, 0, 1))
    assert_equal(first, third)
    assert_equal(second, results(name, D))
    written = [x for _, kept in chain(*known.found.values()) for x in kept.values() if x and x.__name__ == "replay"]
    assert len(written) == (1 if name in ("sinks", "positions") else 2)  # whose backward does more than launch


def test_where_a_profiler_has_a_hook_triton_launches():
    for _ in range(3):
        results("causal", 64)
    launches: list[Any] = []
    hook = triton.knobs.runtime.launch_enter_hook
    hook.add(launches.append)
    try:
        results("causal", 64)
    finally:
        hook.remove(launches.append)
    assert len(launches) == 3


def test_gradients_are_the_same_however_their_tensors_lie():
    """Saved tensors that come back from the CPU are contiguous, which queries here are not."""
    attend = build_attention(AttentionConfig("flash"))
    q = torch.randn(2, 300, 2, 64, device="cuda").bfloat16().transpose(1, 2).requires_grad_()
    do = torch.randn_like(q)

    def gradient(do):
        return torch.autograd.grad(attend(q, q, q).out, q, do)

    expected = gradient(do)
    for x in (do, do, do.contiguous(), do.contiguous(), do):
        assert_equal(gradient(x), expected)
    with torch.autograd.graph.save_on_cpu():
        assert_equal(gradient(do), expected)


@COMMON_SIZES
def test_a_cache_that_is_made_anew_for_each_token_is_replayed(D):
    attend, q = build_attention(AttentionConfig("flash")), torch.randn(2, 4, 1, D, device="cuda").bfloat16()
    k, v = torch.randn(2, 2, 2, 600, D, device="cuda").bfloat16()
    for n in range(1, 600):
        lengths = torch.full((2,), n, dtype=torch.int32, device="cuda")
        grown = Cache(k[:, :, :n].clone(), v[:, :, :n].clone(), lengths)
        assert_equal(attend.decode(q, grown, return_lse=True), attend.decode(q, Cache(k, v, lengths), return_lse=True))
    found = chain(*attend.known.found.values())
    recorded = [x for _, alike in found for x in alike.replays.values() if x]
    assert all(replay.__name__ == "replay" for replay in recorded)
    assert len(recorded) == 10  # for 5 units of keys, and each for lengths that 16 divides and for others


@TWO_GPUS
def test_another_gpu_computes_the_same_bits():
    expected = [results("dropout", 64) for _ in range(3)][-1]
    with torch.cuda.device(1):
        for _ in range(3):
            assert_equal(results("dropout", 64), expected, check_device=False)
    assert_equal(results("dropout", 64), expected)


def test_a_tensor_of_the_score_may_start_anywhere():
    q = torch.randn(1, 3, 256, 64, device="cuda", dtype=torch.bfloat16)
    attend, slopes = build_attention(AttentionConfig("flash")), torch.rand(4, device="cuda")
    for x in (slopes[:3].clone(), slopes[1:]):
        expected = attend(q, q, q, score=Score(alibi=True), slopes=x.clone()).out
        assert torch.equal(attend(q, q, q, score=Score(alibi=True), slopes=x).out, expected)


def test_threads_and_streams_launch_at_the_same_time():
    expected = [results("dropout", 64, seed) for seed in range(4)]
    torch.cuda.synchronize()

    def in_a_stream(seed):
        with torch.cuda.stream(torch.cuda.Stream()):
            found = [results("dropout", 64, seed) for _ in range(10)]
        torch.cuda.synchronize()
        for x in found:
            assert_equal(x, expected[seed])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(in_a_stream, range(4)))  # raises what they raise
