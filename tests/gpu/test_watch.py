"""`watch` in the trainer of a model of transformers, GPT-2 124M with 8 x 1,024 tokens in bf16."""

import statistics
import time
from typing import Any

import pytest
import torch

from attention.watch import watch

transformers = pytest.importorskip("transformers")


@pytest.mark.slow
@pytest.mark.whole_gpu  # it measures a time
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_every_hundredth_step_is_right_and_costs_a_hundredth_of_the_time_at_most(dropout, capsys):
    """The tenth steps are watched here, so that there are enough of them, in turns with steps that are not, because a
    GPU's clock changes."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    config = transformers.GPT2Config(attn_pdrop=dropout, attn_implementation="sdpa")
    model = transformers.GPT2LMHeadModel(config).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(config.vocab_size, (8, 1024), device="cuda")

    def step():
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - start)

    rounds, lines = list[tuple[list[float], list[float]]](), list[dict[str, Any]]()
    for _ in range(7):
        alone = [step() for _ in range(20)]
        with watch(every=10, log=lines.append):
            rounds.append((alone, [step() for _ in range(20)]))
    del rounds[0]  # the first ones compile
    usual = statistics.median(ms for alone, _ in rounds for ms in alone)
    watched = statistics.median(ms for _, times in rounds for ms in times[::10])
    between = statistics.median(ms for _, times in rounds for n, ms in enumerate(times) if n % 10)
    cost = (watched - between) / 100 / usual
    with capsys.disabled():
        print(f"\nalone {usual:.1f} ms, between {between:.1f}, watched {watched:.1f}: {cost:.2%} at every=100")
    assert cost <= 0.01
    assert between <= 1.03 * usual
    assert len(lines) == 14
    assert all(line["watch/error"] <= 1 and "watch/wrong" not in line for line in lines)
