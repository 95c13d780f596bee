"""Generation on a GPU: replayed graphs, packed prompts and fixed slots, against the whole text through the model."""

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch

from attention import AttentionConfig, ProductPrecision, build_attention
from attention.gpu import capturing
from model.gpt import GPT, Computation
from model.options import GPTConfig, Positions
from model.score import ScoreConfig
from recipe.infer.generation import Engine, Request, Sampling
from tests.gpu.needs import A_HOPPER_GPU
from tests.parts import prompts, randomize

LEARNED = GPTConfig(n_layers=2, n_heads=4, n_embd=128, bias=True)
GROUPED = replace(LEARNED, n_kv_heads=2, positions=Positions.rotary)
MANY = ScoreConfig(window=70, soft_cap=5.0, sinks=True)
WINDOWS = ScoreConfig(layers=[{"window": 20}, {"window": 70}])
VOCABULARY = 100


def build(config, score, name, device, precision=ProductPrecision.inputs, dtype=torch.float32, seq_len=512):
    torch.manual_seed(0)
    attend = build_attention(AttentionConfig(name, precision=precision))
    model = GPT(config, VOCABULARY, seq_len, attend, Computation(device=device, dtype=dtype), score=score)
    randomize(model, 0.2)
    return model.eval().to(device)


def served(model, given, sampling, limit=60, **options: Any):
    engine = Engine(model, [Request(prompt, limit) for prompt in given], sampling, **options)
    for _ in engine.run():
        pass
    return [request.tokens for request in engine.requests]


@torch.no_grad()
def shortfalls(model, prompt, found):
    """The distance of each generated token's logit from the largest, with the whole text through the model."""
    logits = model(torch.tensor([[*prompt, *found[:-1]]], device="cuda"))[0, len(prompt) - 1 :].float()
    return logits.amax(dim=1) - logits.gather(1, torch.tensor(found, device="cuda")[:, None])[:, 0]


@pytest.mark.parametrize(("config", "score"), [(LEARNED, None), (GROUPED, MANY)], ids=["learned", "rotary-grouped"])
@pytest.mark.parametrize("slots", [1, 4])
def test_greedy_tokens_are_those_of_the_whole_text_through_the_model(config, score, slots):
    model, given = build(config, score, "flash", "cuda"), prompts(5, 130, 33, 64, 1, 90)
    for prompt, found in zip(given, served(model, given, Sampling(0.0), slots=slots), strict=True):
        assert shortfalls(model, prompt, found).max() < 1e-4  # rounding may decide between equals


@pytest.mark.parametrize("slots", [1, 3])
def test_where_every_layer_has_a_window_the_cache_slides_beyond_seq_len(slots):
    """By 500 tokens and more, as one replayed graph; the reference has room for them, and no cache."""
    given, limit = prompts(75, 80, 76, 75), 505
    model = build(GROUPED, WINDOWS, "flash", "cuda", seq_len=80)
    longer = build(GROUPED, WINDOWS, "naive", "cuda", seq_len=80 + limit)
    engine = Engine(model, [Request(prompt, limit) for prompt in given], Sampling(0.0), slots=slots)
    assert engine.steps.graph is not None
    assert engine.steps.cache.size.pages == 3 * slots  # a window's 70 keys span two or three pages
    for _ in engine.run():
        pass
    for prompt, request in zip(given, engine.requests, strict=True):
        assert len(request.tokens) == limit
        assert shortfalls(longer, prompt, request.tokens).max() == 0


def test_the_same_tokens_are_drawn_as_on_a_cpu():
    sampling = Sampling(0.8, top_k=30, top_p=0.9, seed=3)
    given = prompts(5, 130, 33)
    found, expected = (
        served(build(GROUPED, MANY, name, device), given, sampling, slots=2)
        for name, device in (("flash", "cuda"), ("naive", "cpu"))
    )
    assert found == expected


def test_in_as_many_slots_a_prompt_gets_the_same_tokens_whatever_is_beside_it():
    model, given = build(LEARNED, None, "flash", "cuda"), prompts(5, 130, 33, 64, 1, 90, 250, 7)
    sampling = Sampling(1.0, seed=3)
    options: dict[str, Any] = {"slots": 3, "dtype": torch.bfloat16, "limit": 200}
    among = served(model, given, sampling, **options)
    assert among == [served(model, [prompt], sampling, **options)[0] for prompt in given]


@pytest.mark.parametrize("slots", [1, 3])
def test_the_host_waits_for_the_tokens_that_it_reads_and_for_nothing_else(slots):
    """For them it waits for an event, which torch does not report; all else that waits is an error here."""
    requests = [Request(prompt, 40) for prompt in prompts(5, 130, 33, 64, 1, 90)]
    model, sampling = build(GROUPED, MANY, "flash", "cuda"), Sampling(0.8, top_k=30, top_p=0.9, seed=3)
    engine = Engine(model, requests, sampling, slots=slots)

    def tokens():
        for request in requests:
            request.tokens, request.finished = [], False
        for _ in engine.run():
            pass
        return [request.tokens for request in requests]

    first = tokens()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            engine.steps.tokens[0].item()
        again = tokens()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert again == first


@A_HOPPER_GPU
def test_a_prompt_in_8_bits_is_continued_nearly_as_in_the_inputs_precision():
    heads_of_64, (prompt,), dtype = replace(LEARNED, n_heads=2), prompts(300), torch.bfloat16
    model, narrow = (build(heads_of_64, None, "flash", "cuda", precision, dtype) for precision in ProductPrecision)
    (found,) = served(narrow, [prompt], Sampling(0.0), dtype=dtype)
    with torch.no_grad(), torch.autocast("cuda", dtype):
        of_prompt, in_8_bits = (gpt(torch.tensor([prompt], device="cuda"))[0, -1] for gpt in (model, narrow))
        logits = model(torch.tensor([[*prompt, *found[:-1]]], device="cuda"))[0, len(prompt) - 1 :].float()
    assert not torch.equal(of_prompt, in_8_bits)
    chosen = logits.gather(1, torch.tensor(found, device="cuda")[:, None])[:, 0]
    assert (logits.amax(dim=1) - chosen).max() < 0.25 * logits.std()


def test_a_graph_that_is_garbage_outlives_the_capture_of_another():
    """Its destruction would end that with an error, and Python destroys what refers to itself when it likes."""
    graphs, stream, x = [torch.cuda.CUDAGraph() for _ in range(2)], torch.cuda.Stream(), torch.zeros(1, device="cuda")
    gc.collect()
    with capturing(graphs[0], stream):
        x.add_(1)
    before = gc.get_threshold()
    gc.set_threshold(100)
    try:
        with capturing(graphs[1], stream):
            garbage: list[Any] = [graphs.pop(0)]
            garbage.append(garbage)
            del garbage
            kept = [[n] for n in range(1000)]  # Python counts new objects, and collects the youngest
            x.add_(len(kept))
    finally:
        gc.set_threshold(*before)
    graphs[0].replay()
    assert x.item() == 1000
