"""Generation with a cache against the whole text through the model (tests/recipe/infer/from_scratch.py)."""

import gc
import math
import weakref
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from attention import AttentionConfig
from model.cache import PAGE_SIZE
from model.gpt import GPT
from model.options import GPTConfig, Positions
from model.score import ScoreConfig
from recipe.infer.generation import Engine, GenerationError, Request, Sampling, engine, generate
from recipe.infer.generation.sampling import Noise
from tests.equal import assert_equal
from tests.own_attention import ScalableSoftmax
from tests.parts import EVERYTHING, GEMMA, LLAMA, built, prompts
from tests.recipe.infer.from_scratch import expected, logits_of

LEARNED = GPTConfig(n_layers=2, n_heads=4, n_embd=32, bias=True)
UNPLACED = replace(LEARNED, positions=Positions.none)
GROUPED = replace(LEARNED, n_kv_heads=2, positions=Positions.rotary, qk_norm=True)
HYBRID = replace(GROUPED, n_layers=4, layers=["gdn", "mamba2", "retnet", "attention"])
WINDOWS = ScoreConfig(layers=[{"window": 20}, {"window": 70}])
VOCABULARY = 100
TOKENS = 130  # with a prompt of 70 more than three pages


def build(
    config: GPTConfig = LEARNED, score: ScoreConfig | None = None, seq_len: int = 256, name: str = "naive"
) -> GPT:
    return built(config, seq_len, VOCABULARY, name, spread=0.2, score=score).eval()


def drained(engine: Engine) -> list[list[int]]:
    """The tokens that the engine yields for each request, checked against the request's list."""
    received: dict[Request, list[int]] = {request: [] for request in engine.requests}
    for request, token in engine.run():
        received[request].append(token)
        assert received[request] == request.tokens
        assert request.finished == (len(request.tokens) == request.limit)
    return list(received.values())


def recorded_logits(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """A list that gets the logits (V,) of each token that the engine will choose for its only slot."""
    recorded: list[Tensor] = []
    logits_after = engine.steps.model.logits

    def recording(hidden, head):
        logits = logits_after(hidden, head)
        recorded.append(logits[0].float().clone())
        return logits

    monkeypatch.setattr(engine.steps.model, "logits", recording)
    return recorded


def check_greedy(engine: Engine, model: GPT, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the tokens of the engine's request with the whole text through the model, and so their logits."""
    recorded = recorded_logits(engine, monkeypatch)
    (found,) = drained(engine)
    prompt = engine.requests[0].prompt
    logits = logits_of(model, [*prompt, *found[:-1]], len(prompt))
    assert len(found) == TOKENS
    assert found == logits.argmax(-1).tolist()
    assert_close(torch.stack(recorded), logits, rtol=0, atol=1e-5 * logits.abs().max().item())


@pytest.mark.parametrize(
    ("name", "config", "score"),
    [
        ("naive", LEARNED, ScoreConfig()),
        ("sdpa", LLAMA, ScoreConfig()),
        ("naive", LEARNED, ScoreConfig(layers=[{"window": 20}, {}])),
        ("tiled", GROUPED, ScoreConfig(window=70, soft_cap=5.0, sinks=True)),
        ("tiled", UNPLACED, ScoreConfig(alibi=True)),
        ("naive", GEMMA, ScoreConfig(window=20, soft_cap=5.0, layers=[{}, {"window": None}])),
        ("naive", HYBRID, ScoreConfig()),
    ],
    ids=["learned", "llama", "window", "capped-sinks", "alibi", "gemma", "hybrid"],
)
def test_greedy_tokens_and_logits_are_those_of_the_whole_text_through_the_model(name, config, score, monkeypatch):
    model = build(config, score, seq_len=300, name=name)
    (prompt,) = prompts(70)
    check_greedy(Engine(model, [Request(prompt, TOKENS)], Sampling(0.0)), model, monkeypatch)


@pytest.mark.parametrize(("config", "slots"), [(LEARNED, 1), (GROUPED, 3)], ids=["learned", "rotary-grouped"])
def test_an_attention_that_no_cache_fits_computes_each_token_from_the_whole_text(config, slots):
    model = build(config, seq_len=60)
    model.attend = ScalableSoftmax(AttentionConfig(ScalableSoftmax.name))
    asked = [Request(prompt, 40) for prompt in prompts(30, 5, 60)]
    for request, found in zip(asked, drained(Engine(model, asked, Sampling(0.0), slots=slots)), strict=True):
        assert found == expected(model, request.prompt, found)
        assert found != expected(build(config, seq_len=60), request.prompt, found)


@pytest.mark.parametrize(
    ("config", "score", "name", "pages"),
    [
        (GROUPED, WINDOWS, "tiled", 3),  # a window's 70 keys span two or three pages
        (GROUPED, WINDOWS, "sdpa", 3),
        (replace(UNPLACED, layers=["kda"]), None, "naive", 1),
    ],
    ids=["tiled", "sdpa", "states"],
)
def test_windows_slide_and_states_go_on_beyond_seq_len(config, score, name, pages, monkeypatch):
    model, longer = (build(config, score, seq_len, name) for seq_len in (80, 300))
    engine = Engine(model, [Request(prompts(75)[0], TOKENS)], Sampling(0.0))
    assert engine.steps.cache.size.pages == pages
    check_greedy(engine, longer, monkeypatch)


@pytest.mark.parametrize("config", [LEARNED, GROUPED], ids=["learned", "rotary"])
def test_beyond_seq_len_a_token_is_computed_from_the_last_seq_len_tokens(config):
    model = build(config, seq_len=24)
    requests = [Request(prompt, 20) for prompt in prompts(10, 24, 3)]
    for request, found in zip(requests, drained(Engine(model, requests, Sampling(0.7, seed=5), slots=2)), strict=True):
        assert len(found) == 20
        assert found == expected(model, request.prompt, found, 0.7, seed=5)


@pytest.mark.parametrize(
    ("config", "score", "row"),
    [(EVERYTHING, None, 256), (GROUPED, WINDOWS, 0), (GROUPED, WINDOWS, 256), (HYBRID, None, 0)],
    ids=["parts-packed", "sliding-alone", "sliding-packed", "hybrid"],
)
def test_prompts_that_share_slots_and_pages_get_the_tokens_they_get_alone(config, score, row):
    model = build(config, score)
    requests = [
        Request(prompt, limit)
        for prompt, limit in zip(prompts(5, 130, 33, 64, 1, 90), (40, 9, 1, 70, 22, 40), strict=True)
    ]
    engine = Engine(model, requests, Sampling(0.8, top_k=30, seed=3), slots=2, row=row)
    for request, found in zip(requests, drained(engine), strict=True):
        assert len(found) == request.limit
        assert found == expected(model, request.prompt, found, 0.8, 30, seed=3)
    assert sorted(engine.steps.cache.free) == list(range(engine.steps.cache.size.pages or 0))
    again = [request.tokens.copy() for request in requests]
    for request in requests:
        request.tokens.clear()
        request.finished = False
    assert drained(engine) == again


def test_a_request_that_is_finished_early_makes_room_for_the_next():
    model = build()
    requests = [Request(prompt, 60) for prompt in prompts(8, 9, 10)]
    for request, _ in Engine(model, requests, Sampling(0.0), slots=1).run():
        request.finished |= len(request.tokens) == 3
    for request in requests:
        assert len(request.tokens) == 3
        assert request.tokens == expected(model, request.prompt, request.tokens)


def test_an_engine_that_is_dropped_leaves_its_cache_at_once():
    """Its memory is freed without waiting for Python's garbage collection."""
    engine = Engine(build(), [Request([1, 2, 3], 2)], Sampling(1.0))
    drained(engine)
    cache = weakref.ref(engine.steps.cache)
    gc.disable()
    try:
        del engine
        assert cache() is None
    finally:
        gc.enable()


def test_streams_of_random_numbers_are_exponential_and_independent():
    V, steps, slots = 500, 40, 4
    noise = Noise(seed=7, vocab_size=V, rows=steps, slots=slots, device=torch.device("cpu"))
    for slot, stream in enumerate([(0, 0), (0, 1), (1, 0), (2**40, 3)]):
        noise.begin(slot, stream)
    noise.draw(steps)
    e = torch.stack([noise.of(torch.full((slots,), t)) for t in range(steps)], dim=1).double()  # (slots, steps, V)
    n = steps * V
    generator = torch.Generator().manual_seed(7)
    alone = torch.stack([torch.empty(V).exponential_(generator=generator) for _ in range(steps)])
    assert_close(e[0].float(), alone)
    for slot in range(slots):
        cdf, _ = (1 - torch.exp(-e[slot].flatten())).sort()
        apart = (cdf - torch.linspace(0, 1, n, dtype=torch.float64)).abs().max()
        assert apart < 1.95 / math.sqrt(n)  # Kolmogorov-Smirnov, p = 0.001
    uniform = 1 - torch.exp(-e)
    for t in range(steps):
        assert (torch.corrcoef(uniform[:, t]) - torch.eye(slots)).abs().max() < 4.5 / math.sqrt(V)
    noise.begin(1, (0, 0))
    assert_close(noise.of(torch.zeros(slots, dtype=torch.int64))[1].double(), e[0, 0])


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_p": 0.3}, {1}),
        ({"top_p": 0.41}, {1, 3}),
        ({"top_p": 0.7}, {1, 3}),
        ({"top_p": 0.71}, {1, 3, 4}),
        ({"top_p": 1.0}, {0, 1, 2, 3, 4}),
        ({"top_k": 2}, {1, 3}),
    ],
    ids=str,
)
def test_top_p_draws_from_the_fewest_tokens_that_have_this_probability_and_top_k_from_so_many(options, kept):
    p = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15])
    noise = torch.empty(1000, 5).exponential_(generator=torch.Generator().manual_seed(0))
    assert set(Sampling(**options).pick(p.log().expand(1000, 5), noise).tolist()) == kept


def test_the_model_is_left_as_it_was():
    model = build().train()
    before = deepcopy(model.state_dict())
    assert len(list(generate(model, [1], 3, Sampling(), dtype=torch.bfloat16))) == 3
    assert model.training
    assert_equal(model.state_dict(), before)


def test_weights_are_in_the_precision_of_products_and_tokens_are_those_of_autocast():
    model = build()
    (prompt,) = prompts(40)
    engine = Engine(model, [Request(prompt, 30)], Sampling(0.0), dtype=torch.bfloat16)
    assert engine.steps.model.get_parameter("h.0.mlp.c_fc.weight").dtype is torch.bfloat16
    (found,) = drained(engine)
    with torch.autocast("cpu", torch.bfloat16):
        agreeing = sum(a == b for a, b in zip(found, expected(model, prompt, found), strict=True))
    assert agreeing >= 27  # the products of one row and of many round differently


@pytest.mark.parametrize(
    ("lengths", "sampling", "sentence"),
    [
        ((0,), {}, "The prompt has no tokens"),
        ((3, 0), {}, "Prompt 2 has no tokens"),
        ((257,), {}, "The prompt has 257 tokens, and the model sees seq_len=256; shorten it"),
        ((3,), {"temperature": 1e-50}, "temperature=1e-50 must be 0, which takes .*, or a number from 1e-06 on"),
        ((3,), {"temperature": float("inf")}, "temperature=inf must be 0"),
        ((3,), {"temperature": float("nan")}, "temperature=nan must be 0"),
        ((3,), {"seed": 2**64}, r"seed=18446744073709551616 must lie between -2\*\*63 and 2\*\*64 - 1"),
        ((3,), {"top_k": 0}, "top_k=0 must be at least 1"),
        ((3,), {"top_p": 0.0}, "top_p=0.0 must be above 0 and at most 1"),
    ],
)
def test_impossible_requests_are_refused(lengths, sampling, sentence):
    with pytest.raises(GenerationError, match=sentence):
        Engine(build(), [Request(prompt, 3) for prompt in prompts(*lengths)], Sampling(**sampling))


@pytest.mark.parametrize(("gib", "advice"), [(1.0, "set batch=3, as that many fit"), (0.1, "not even one fits")])
def test_a_cache_that_does_not_fit_is_refused_with_the_number_of_sequences_that_would(monkeypatch, gib, advice):
    config = GPTConfig(n_layers=32, n_heads=8, n_embd=1024)  # 256 KiB a token
    free = int(gib * 2**30)
    monkeypatch.setattr(engine, "free_memory", lambda device: free)
    with torch.device("meta"):
        model = built(config, 1024)
    lengths: Sequence[int] = (16 * PAGE_SIZE, *[1000] * 8)  # 256 MiB each
    with pytest.raises(GenerationError, match=rf"batch=8 sequences of up to 1,024 tokens take 2.00 GiB, .*{advice}"):
        Engine(model, [Request([1] * n, 1) for n in lengths], Sampling(), slots=8)
