"""Ways of sharing the work that the ranks cannot are refused before anything is built."""

from __future__ import annotations

from dataclasses import replace

import pytest

from model.gpt import GPTConfig
from recipe.distributed.options import ParallelConfig
from recipe.run.config import Config
from recipe.run.mistakes import mistakes
from recipe.training.optimizer import ScheduleConfig

CONFIG = Config(device="cpu", seq_len=128, model=GPTConfig(n_heads=4, n_embd=32), schedule=ScheduleConfig())


@pytest.mark.parametrize(
    ("parallel", "ranks", "sentence"),
    [
        (
            ParallelConfig(context=4),
            1,
            "must divide the number of ranks, 1; use parallel.context=1, or start 4 ranks with",
        ),
        (
            ParallelConfig(context=3),
            4,
            "use parallel.context=2, or start 3 ranks with torchrun --nproc-per-node 3.",
        ),
        (
            ParallelConfig(context=4),
            6,
            "use parallel.context=3, or start 4 ranks with torchrun --nproc-per-node 4.",
        ),
        (ParallelConfig(context=0), 2, "parallel.context=0 must be at least 1"),
        (
            ParallelConfig(reshard_after_forward=False),
            2,
            "parallel.reshard_after_forward=false has no effect on parallel.data=replicate",
        ),
        (
            ParallelConfig(context=8),
            8,
            "seq_len=128 cannot be shared by parallel.context=8 ranks; use seq_len=256.",
        ),
    ],
)
def test_a_division_of_work_that_the_ranks_cannot_do_is_refused_in_one_sentence(
    parallel: ParallelConfig, ranks: int, sentence: str
) -> None:
    (said,) = mistakes(replace(CONFIG, parallel=parallel), ranks)
    assert sentence in said


@pytest.mark.parametrize("parallel", [ParallelConfig(), ParallelConfig(context=3)])
def test_three_ranks_can_train(parallel: ParallelConfig) -> None:
    assert not list(mistakes(replace(CONFIG, seq_len=288, parallel=parallel), 3))


def test_tokens_of_a_step_count_sequences_that_are_shared_once() -> None:
    training = replace(CONFIG.training, batch_size=2, batch_tokens=2 * 128 * 2)
    config = replace(CONFIG, training=training, parallel=ParallelConfig(context=2))
    assert not list(mistakes(config, 4))
    (said,) = mistakes(replace(config, parallel=ParallelConfig(context=1)), 4)
    assert "training.batch_tokens=512 is not a multiple of the 1024 tokens" in said
