"""Attention to a cache on a GPU: accuracy in every precision, CUDA graphs and torch.compile, without host syncs."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from attention import Cache, Score
from tests.attention.reference import build
from tests.attention.test_decode import SCORES as SMALL
from tests.attention.test_decode import assert_exact, contiguous, extras, paged, part, queries
from tests.gpu.graphs import captured
from tests.gpu.needs import COMMON_SIZES

OURS = pytest.mark.parametrize("name", ["naive", "tiled", "flash"])
LENGTHS = [1500, 0, 1, 64, 65, 1024, 777]
SCORES = {
    name: replace(score, window=score.window and 300, soft_cap=score.soft_cap and 3.0) for name, score in SMALL.items()
}
CASES = [
    (64, torch.bfloat16, "plain"),
    (128, torch.bfloat16, "plain"),
    (128, torch.bfloat16, "everything"),
    (64, torch.float16, "everything"),
    (64, torch.float32, "everything"),
    (128, torch.float32, "plain"),
    (80, torch.bfloat16, "plain"),
    (111, torch.float32, "everything"),
    (256, torch.bfloat16, "everything"),
]


def flash():
    return build("flash")


def tensors(H, H_kv, T, D, dtype):
    """Queries, and a cache of LENGTHS whose other slots hold NaN."""
    k, v, lengths, _ = contiguous(LENGTHS, 1536, H_kv, D, dtype)
    return queries(len(LENGTHS), H, T, D, dtype).cuda(), Cache(k.cuda(), v.cuda(), lengths.cuda())


def cloned(cache):
    pages = None if cache.pages is None else cache.pages.clone()
    return Cache(cache.k.clone(), cache.v.clone(), cache.lengths.clone(), pages)


@pytest.mark.parametrize(("D", "dtype", "name"), CASES, ids=[f"{D}-{dtype}-{name}" for D, dtype, name in CASES])
def test_error_in_every_precision(D, dtype, name):
    assert_accurate(8, 2, D, dtype, SCORES[name])


@pytest.mark.parametrize(
    ("name", "H", "H_kv"), [("full", 8, 1), ("window", 4, 4), ("soft_cap", 8, 1), ("alibi", 4, 4), ("sinks", 8, 1)]
)
def test_error_of_every_score(name, H, H_kv):
    assert_accurate(H, H_kv, 64, torch.bfloat16, SCORES[name])


def assert_accurate(H, H_kv, D, dtype, score):
    for T in (1, 3):
        q, cache = tensors(H, H_kv, T, D, dtype)
        assert_exact(q, cache, score, flash().decode(q, cache, **extras(score, q)).out)


@COMMON_SIZES
def test_neither_pages_nor_the_batch_nor_the_capacity_change_a_bit(D):
    q, cache = tensors(8, 2, 1, D, torch.bfloat16)
    options = extras(SCORES["everything"], q)
    out = flash().decode(q, cache, **options).out
    for size in (16, 128, 256):
        assert torch.equal(out, flash().decode(q, paged(cache, size), **options).out)
    for b in (0, 3, 6):
        one = slice(b, b + 1)
        assert torch.equal(out[one], flash().decode(q[one], part(cache, one), **options).out)
    # A batch so large that each sequence need not be split to keep the GPU busy.
    many = Cache(cache.k.repeat(40, 1, 1, 1), cache.v.repeat(40, 1, 1, 1), cache.lengths.repeat(40))
    assert torch.equal(out.repeat(40, 1, 1, 1), flash().decode(q.repeat(40, 1, 1, 1), many, **options).out)
    larger = Cache(F.pad(cache.k, (0, 0, 0, 20_000)), F.pad(cache.v, (0, 0, 0, 20_000)), cache.lengths)
    assert torch.equal(out, flash().decode(q, larger, **options).out)
    # Without a window there are splits, and terms of the join, for all keys that a cache has room for.
    out = flash().decode(q, cache).out
    assert torch.equal(out, flash().decode(q, larger).out)
    fits = cache.lengths <= 1024
    smaller = cache._replace(k=cache.k[:, :, :1024], v=cache.v[:, :, :1024])
    assert torch.equal(out[fits], flash().decode(q[fits], part(smaller, fits)).out)


@OURS
@pytest.mark.parametrize("size", [None, 16])
def test_a_replayed_graph_follows_lengths_and_pages_and_waits_for_nothing(name, size):
    """One graph writes a token and attends from it; it is replayed on the contents of two caches of the same shapes."""
    attend = build(name)
    q, cache = tensors(8, 2, 1, 64, torch.bfloat16)
    new_k, new_v = torch.randn(2, len(LENGTHS), 2, 1, 64, dtype=torch.bfloat16, device="cuda")
    cache = cache._replace(k=cache.k.nan_to_num(), v=cache.v.nan_to_num())
    if size is not None:  # pages for the tokens to come, too
        full = cache._replace(lengths=torch.full_like(cache.lengths, cache.k.shape[2]))
        cache = paged(full, size)._replace(lengths=cache.lengths)

    def run(cache):
        cache.write(new_k, new_v)
        return attend.decode(q, cache, score=Score(window=300)).out

    graph, results = captured(lambda: run(cache))
    for n in (40, 1535):
        cache.lengths.copy_(torch.tensor([n, n // 2, 0, 1, n - 1, 33, 1024]))
        if cache.pages is not None:
            cache.pages.copy_(cache.pages.roll(1, 0))
        other = cloned(cache)
        graph.replay()
        torch.cuda.set_sync_debug_mode("error")
        try:
            expected = run(other)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(results, expected)
        assert torch.equal(cache.k, other.k)
        assert torch.equal(cache.v, other.v)


@OURS
def test_a_compiled_function_is_one_graph(name):
    attend = build(name)
    q, cache = tensors(8, 2, 1, 64, torch.bfloat16)
    new = torch.randn(2, len(LENGTHS), 2, 1, 64, dtype=torch.bfloat16, device="cuda")

    def step(q, cache, new):
        cache.write(new[0], new[1])
        return attend.decode(2 * q, cache).out + 1

    other = cloned(cache)
    compiled, expected = torch.compile(step, fullgraph=True)(q, cache, new), step(q, other, new)
    assert (compiled - expected).norm() <= 0.01 * expected.norm()  # the compiler rounds less often
    assert torch.equal(cache.k.nan_to_num(), other.k.nan_to_num())
