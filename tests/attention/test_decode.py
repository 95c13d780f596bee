"""Attention to a cache, against the formula in fp64, sequence by sequence; and writing keys and values to the cache."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attention import Attention, Cache, Layout, Score, UnsupportedAttention
from attention.check.calls import problem_of
from attention.decode import write_kernel
from attention.decode.cache import write as write_in_torch
from attention.flash.decode import choose_blocks
from tests.attention.reference import assert_rounding, build, published_slopes
from tests.equal import assert_equal

SCORES: dict[str, Score] = {
    "plain": Score(),
    "full": Score(causal=False),
    "window": Score(window=19),
    "soft_cap": Score(soft_cap=1.5),
    "alibi": Score(alibi=True),
    "sinks": Score(sinks=True),
    "everything": Score(window=40, soft_cap=1.5, alibi=True, sinks=True),
}
PAGE = torch.zeros(2, 1, dtype=torch.int32)
EACH_WRITE = pytest.mark.parametrize("write", [write_in_torch, write_kernel.write])


def contiguous(lengths: list[int], capacity: int, H_kv: int, D: int, dtype: torch.dtype = torch.float32) -> Cache:
    """A cache whose slots without a token hold NaN, as fresh memory may."""
    k, v = torch.randn(2, len(lengths), H_kv, capacity, D, generator=torch.Generator().manual_seed(1)).to(dtype)
    for x in (k, v):
        for b, n in enumerate(lengths):
            x[b, :, n:] = torch.nan
    return Cache(k, v, torch.tensor(lengths, dtype=torch.int32))


def paged(cache: Cache, size: int) -> Cache:
    """The same tokens in shuffled pages; pages that no token needs are not there, and their entries are -1."""
    (B, H_kv, L, D), device = cache.k.shape, cache.k.device
    n = -(-L // size)
    numbers = torch.randperm(B * n, generator=torch.Generator().manual_seed(2)).view(B, n).to(device)
    k, v = torch.full((2, B * n, H_kv, size, D), torch.nan, dtype=cache.k.dtype, device=device)
    for b in range(B):
        for i in range(n):
            rows = slice(i * size, min((i + 1) * size, L))
            k[numbers[b, i], :, : rows.stop - rows.start] = cache.k[b, :, rows]
            v[numbers[b, i], :, : rows.stop - rows.start] = cache.v[b, :, rows]
    needed = torch.arange(n, device=device) * size < cache.lengths[:, None]
    return Cache(k, v, cache.lengths, torch.where(needed, numbers, -1).int())


def part(cache: Cache, which: slice | Tensor) -> Cache:
    """Some sequences of a cache without pages."""
    return Cache(cache.k[which], cache.v[which], cache.lengths[which].clone())


def small_cache() -> Cache:
    """A cache for 32 tokens of two sequences, with two heads of 8 channels."""
    return Cache(torch.zeros(2, 2, 32, 8), torch.zeros(2, 2, 32, 8), torch.zeros(2, dtype=torch.int32))


def queries(B: int, H: int, T: int, D: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(B, T, H, D, generator=torch.Generator().manual_seed(3)).transpose(1, 2).to(dtype)


def extras(score: Score, q: Tensor) -> dict[str, Any]:
    """The score, and the sinks that it needs."""
    return {"score": score, "sinks": torch.linspace(-1.5, 2.0, q.shape[1], device=q.device) if score.sinks else None}


def assert_exact(q: Tensor, cache: Cache, score: Score, out: Tensor, lse: Tensor | None = None) -> None:
    """The check's judge finds nothing but rounding in each sequence alone."""
    slopes = torch.tensor(published_slopes(q.shape[1]), device=q.device)
    given = {"slopes": slopes, "sinks": extras(score, q)["sinks"]}
    for b, n in enumerate(cache.lengths.tolist()):
        one = slice(b, b + 1)
        inputs = q[one], cache.k[one, :, :n], cache.v[one, :, :n], torch.zeros_like(q[one])
        asked = problem_of(q[one], inputs[1], score=score, layout=Layout(), tensors=given)(slice(0, q.shape[1]))
        got = {"out": out[one].double()} | ({} if lse is None else {"lse": lse[one]})
        assert_rounding(inputs, asked, got, f"{score}, {n} tokens")


@pytest.fixture(params=["naive", "tiled", "flash"])
def attend(request) -> Attention:
    return build(request.param, block_k=32 if request.param == "tiled" else 64)


@pytest.mark.parametrize(("name", "T"), [*((name, 3) for name in SCORES), ("plain", 1), ("everything", 1)])
def test_decoding_is_the_formula_of_each_sequence_alone(attend, name, T):
    score, lengths = SCORES[name], [96, 0, 2, 32, 33, 65]
    cache, q = contiguous(lengths, 100, 2, 16), queries(len(lengths), 8, T, 16)
    assert_exact(q, cache, score, *attend.decode(q, cache, **extras(score, q), return_lse=True))


@pytest.mark.parametrize(("H", "H_kv", "T", "score"), [(2, 2, 1, Score()), (8, 1, 2, SCORES["everything"])])
def test_kernels_join_the_splits_of_long_sequences(H, H_kv, T, score):
    """A sequence alone has the same bits as in a batch."""
    lengths = [0, 513, 256]
    cache, q = contiguous(lengths, 520, H_kv, 16), queries(len(lengths), H, T, 16)
    flash: Any = build("flash")
    out, lse = flash.decode(q, cache, **extras(score, q), return_lse=True)
    assert_exact(q, cache, score, out, lse)
    assert_equal(flash.decode(q, cache, **extras(score, q), return_lse=True), (out, lse))
    for which in (slice(1, 2), slice(None, None, 2)):
        assert torch.equal(flash.decode(q[which], part(cache, which), **extras(score, q)).out, out[which])


def test_splits_are_longer_where_a_gpu_has_no_room_for_more(monkeypatch):
    """At most four splits, for sequences of 5 units of keys, of 2, and of none."""
    monkeypatch.setattr("attention.flash.decode.choose_blocks", lambda *args: choose_blocks(*args)._replace(programs=4))
    lengths = [513, 130, 0]
    cache, q = contiguous(lengths, 520, 1, 16), queries(len(lengths), 2, 1, 16)
    assert_exact(q, cache, Score(), *build("flash").decode(q, cache))


@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize("score", [SCORES["plain"], SCORES["everything"]], ids=["plain", "everything"])
def test_shuffled_pages_decode_as_one_row_does_bitwise(attend, score, size):
    cache, q = contiguous([96, 0, 17], 100, 2, 16), queries(3, 8, 2, 16)
    in_rows, in_pages = (
        attend.decode(q, some, **extras(score, q), return_lse=True) for some in (cache, paged(cache, size))
    )
    assert_equal(in_pages, in_rows)


def test_pages_before_the_window_may_be_gone(attend):
    cache, q = contiguous([90], 96, 2, 16), queries(1, 8, 1, 16)
    everything, score = paged(cache, 16), Score(window=19)
    gone = torch.arange(6) < 4  # positions up to 63; the window begins at 71
    assert everything.pages is not None
    rest = everything._replace(pages=everything.pages.masked_fill(gone, -1))
    assert torch.equal(attend.decode(q, cache, score=score).out, attend.decode(q, rest, score=score).out)


@pytest.mark.parametrize("in_kernel", [False, True])
@pytest.mark.parametrize("size", [None, 32])
def test_new_tokens_follow_those_of_their_sequence(size, in_kernel, monkeypatch):
    """Each sequence writes a prompt, packed or left-padded, then three tokens one by one."""
    if in_kernel:
        monkeypatch.setattr("attention.decode.cache.write", write_kernel.write)
    prompts, more = [40, 0, 7], 3
    tokens = contiguous([n + more for n in prompts], 64, 2, 8)
    empty = emptied(tokens if size is None else paged(tokens, size))
    packed, padded = empty(prompts), empty(prompts)

    def taken(x, starts, ends):
        rows = [torch.arange(start, end) for start, end in zip(starts, ends, strict=True)]
        return [x[b][:, rows[b]] for b in range(3)]  # (H_kv, n, D); before the first token any values

    k, v = (torch.cat(taken(x, [0] * 3, prompts), dim=1)[None] for x in (tokens.k, tokens.v))
    packed.write(k, v, torch.tensor([0, *prompts]).cumsum(0))
    k, v = (torch.stack(taken(x, [n - max(prompts) for n in prompts], prompts)) for x in (tokens.k, tokens.v))
    padded.write(k, v)
    for cache in (packed, padded):
        for step in range(more):
            begin, end = [n + step for n in prompts], [n + step + 1 for n in prompts]
            cache = cache._replace(lengths=torch.tensor(end, dtype=torch.int32))
            cache.write(torch.stack(taken(tokens.k, begin, end)), torch.stack(taken(tokens.v, begin, end)))
        assert_equal(cache.read(0, 64), tokens.read(0, 64))


def emptied(cache: Cache) -> Callable[[list[int]], Cache]:
    """Returns a function that makes caches with the same pages, filled with NaN."""

    def make(lengths):
        k, v = torch.full_like(cache.k, torch.nan), torch.full_like(cache.v, torch.nan)
        return Cache(k, v, torch.tensor(lengths, dtype=torch.int32), cache.pages)

    return make


@EACH_WRITE
def test_tokens_without_a_slot_are_dropped(write):
    k = torch.zeros(2, 1, 16, 4)
    cache = Cache(k, k.clone(), torch.tensor([18, 16], dtype=torch.int32), torch.tensor([[1], [-1]], dtype=torch.int32))
    write(*cache, torch.ones(2, 1, 3, 4), torch.ones(2, 1, 3, 4), None)
    assert cache.k.sum() == cache.v.sum() == 4  # one token: 15, of the first sequence
    assert (cache.k[1, 0, 15] == 1).all()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"v": torch.zeros(2, 2, 32, 4)}, "A cache's k and v are both"),
        ({"lengths": torch.zeros(2)}, r"lengths are \(B,\) int32; got \(2,\) torch.float32"),
        ({"lengths": torch.zeros(3, dtype=torch.int32)}, "A contiguous cache of 2 rows has 3 lengths; pass pages"),
        ({"pages": torch.zeros(3, 1, dtype=torch.int32)}, r"pages must be \(2, n\) int32"),
        ({name: torch.zeros(9, 2, 24, 8) for name in "kv"} | {"pages": PAGE}, "A page holds 16, 32, .* or 256 tokens"),
        ({name: torch.zeros(2, 3, 32, 8) for name in "kv"}, "8 query heads are not a multiple of 3"),
    ],
)
def test_a_cache_that_does_not_fit_is_refused(change, complaint):
    """Also after one that fits, though calls alike are looked at once."""
    cache, q, attend = small_cache(), torch.zeros(2, 8, 1, 8), build("flash")
    attend.decode(q, cache)
    with pytest.raises(ValueError, match=complaint):
        attend.decode(q, cache._replace(**change))


def test_new_tokens_that_do_not_fit_the_cache_are_refused():
    cache = small_cache()
    with pytest.raises(ValueError, match=r"for 2 sequences takes k and v \(2, 2, tokens, 8\); got \(2, 4, 1, 8\)"):
        cache.write(torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8))
    with pytest.raises(ValueError, match=r"cu_seqlens of shape \(2,\) must be \(3,\) for 2 sequences"):
        cache.write(torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 8), torch.tensor([0, 5]))


@EACH_WRITE
@pytest.mark.parametrize("lengths", [[5], [3, 5]])
def test_tokens_behind_the_last_sequence_change_no_sequence(write, lengths, monkeypatch):
    """Where they have slots, and where the cache ends with the sequence."""
    monkeypatch.setattr("attention.decode.cache.write", write)
    ends = [sum(lengths[:b]) for b in range(len(lengths) + 1)]
    for room in (8, 5):
        k, v = torch.zeros(2, len(lengths), 2, room, 8)
        new_k, new_v = torch.randn(2, 1, 2, ends[-1] + 3, 8)
        cache = Cache(k, v, torch.tensor(lengths, dtype=torch.int32))
        cache.write(new_k, new_v, torch.tensor(ends, dtype=torch.int32))
        for b, n in enumerate(lengths):
            assert torch.equal(k[b, :, :n], new_k[0, :, ends[b] : ends[b + 1]])
            assert torch.equal(v[b, :, :n], new_v[0, :, ends[b] : ends[b + 1]])


def test_an_implementation_without_a_cache_is_refused_by_name():
    with pytest.raises(UnsupportedAttention, match=r'name="sdpa" does not support a cache; .*name="naive"'):
        build("sdpa").decode(torch.zeros(2, 2, 1, 8), small_cache())


def test_a_compiled_function_does_not_write_into_a_view():
    k, v = torch.zeros(2, 1, 1, 16, 8)
    cache, new = Cache(k, v, torch.tensor([3], dtype=torch.int32)), torch.ones(1, 1, 1, 8)
    with pytest.raises(Exception, match="allocate a cache's k and v separately"):
        torch.compile(lambda: cache.write(new, new), backend="eager", fullgraph=True)()
    cache.write(new, new)
    assert v[0, 0, 2].eq(1).all()
