"""The sweeps that bench.arena measures, by name."""

from __future__ import annotations

from typing import NamedTuple

QUIET = (
    "tracking=disabled device=cpu training.checkpoint_every=0 training.sample_tokens=0 schedule.warmup_steps=20 "
    "training.log_every=10"
)
TOY = "model.n_layers=2 model.n_embd=64 model.n_heads=4 seq_len=64 training.batch_size=8 training.steps=300"
TINY = (
    "model.n_layers=2 model.n_embd=32 model.n_heads=2 seq_len=32 training.batch_size=16 training.steps=100 "
    "training.eval_every=100"
)
SMALLEST = (
    "model.n_layers=1 model.n_embd=32 model.n_heads=2 seq_len=16 training.batch_size=2 training.steps=10 "
    "training.eval_every=10 training.eval_batches=2"
)


class Seeds(NamedTuple):
    """Configurations by name, each trained with the same seeds in one process. The first is the baseline."""

    seeds: int
    configurations: dict[str, str]


SEEDS = {
    "itself": Seeds(400, {"": f"{QUIET} {TOY} training.eval_every=50"}),
    "planted": Seeds(
        24, {"better": f"{QUIET} {TINY} optimizer.lr=1e-3", "worse": f"{QUIET} {TINY} optimizer.lr=9.75e-4"}
    ),
    "equivalents": Seeds(
        2,
        {
            name: f"{QUIET} {SMALLEST} {overrides}"
            for name, overrides in {
                "naive": "attention=naive",
                "window": "attention=naive score=window score.window=16",
                "tiled": "attention=tiled",
                "flash": "attention=flash",  # with TRITON_INTERPRET=1
            }.items()
        },
    ),
    "rankings": Seeds(
        6,
        {
            name: f"{QUIET} {TOY} training.eval_every=50 {overrides}"
            for name, overrides in {
                "causal": "score=causal",
                "alibi": "score=alibi",
                "sinks": "score=sinks",
                "qk_norm": "model.qk_norm=true",
                "soft_cap": "score=soft_cap score.soft_cap=15",
            }.items()
        },
    ),
}
SWEEPS = {
    "recall-needle": "experiment=recall data=needle arena.seeds=2 training.steps=300",
    "ladder": (
        "experiment=ladder arena.seeds=2 ladder.width=16 ladder.head=16 seq_len=64 training.batch_size=4 "
        "training.steps=150"
    ),
}
