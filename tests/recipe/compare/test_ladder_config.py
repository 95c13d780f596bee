"""The rule of a ladder, and the command lines that it refuses."""

from __future__ import annotations

import pytest
import torch

from attention import AttentionConfig, build_attention
from model.config import GPTConfig
from model.counting import flops_per_token
from model.gpt import GPT
from recipe.compare.ladder.config import LadderConfig, rule
from recipe.compare.queue.ladder import flops_at_depth
from recipe.run.config import ConfigError
from recipe.run.launch import prepare

VALUES = {"model.n_layers": "3", "model.n_embd": "96", "model.n_heads": "3", "training.batch_tokens": "768"}


def test_depth_decides_width_heads_batch_and_learning_rate() -> None:
    found = dict(line.split("=") for line in rule(LadderConfig(), 3, batch_size=2, seq_len=128, lr=3e-3, n_embd=128))
    assert float(found.pop("optimizer.lr")) == pytest.approx(3e-3 * (128 / 96) ** 0.5, rel=1e-3)
    assert found == VALUES


def test_the_operations_of_the_next_size_follow_from_those_of_four() -> None:
    def flops(depth: int) -> float:
        with torch.device("meta"):
            config = GPTConfig(n_layers=depth, n_heads=depth, n_embd=32 * depth)
            model = GPT(config, 256, 128, build_attention(AttentionConfig()))
        return flops_per_token(model, 128, causal=True)

    assert flops_at_depth(6, [1, 2, 3, 4], [flops(n) for n in (1, 2, 3, 4)]) == pytest.approx(flops(6), rel=1e-9)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["ladder.depths=[1,2,3]"], "ladder.depths=[1, 2, 3] has 3 sizes, and a law of three parameters needs 4"),
        (["ladder.depths=[1,2,4,3]"], "must hold different depths above 0, the smallest first."),
        (["ladder.depths=[1,x]"], "ladder.depths has x; write a list of whole numbers, such as [1,2,3,4]."),
        (["ladder.next=4"], "ladder.next=4 must be larger than the depths that are fitted (4)."),
        (["ladder.head=48"], "ladder.width=32 must be a multiple of ladder.head=48"),
        (["model.n_embd=64"], "model.n_embd=64 would be replaced, as ladder.width and ladder.head decide"),
        (["arena.arms=a: model.n_layers=2"], "model.n_layers=2 would be replaced"),
        (["arena.lr=[1,2]"], "arena.lr has no effect on a ladder; leave it out."),
        (["arena.seeds=1"], "arena.seeds=1 shows no spread"),
        (["ladder.head=1", "model.positions=rotary"], "are odd; use model.positions=learned."),
    ],
)
def test_a_ladder_that_cannot_predict_is_refused_before_it_runs(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        prepare(["experiment=ladder", "device=cpu", *overrides])
    assert sentence in str(error.value)


def test_options_of_a_ladder_need_the_experiment() -> None:
    with pytest.raises(ConfigError, match=r"ladder\.\* has no effect .* add experiment=ladder"):
        prepare(["ladder.next=8", "device=cpu"])
