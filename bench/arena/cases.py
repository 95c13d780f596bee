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
}
# Published changes, each to GPT-2's block with rotary positions. A soft cap of 50 is never reached at this size.
RANKED = (
    "base: model.positions=rotary | alibi: model.positions=none score=alibi | "
    "sinks: model.positions=rotary score=sinks | "
    "qk_norm: model.positions=rotary model.qk_norm=true | "
    "soft_cap: model.positions=rotary score=soft_cap score.soft_cap=15 | "
    "relu2: model.positions=rotary model.mlp=relu2 | gate: model.positions=rotary model.gate=head | "
    "value_residual: model.positions=rotary model.value_residual=true"
)
# A layer without positions cannot count; the last arm has two.
COUNTERS = (
    "rotary: model.positions=rotary | learned: model.positions=learned | "
    "window: model.positions=rotary score=window score.window=16 | alibi: model.positions=none score=alibi | "
    "none: model.positions=none | none_two_layers: model.positions=none model.n_layers=2"
)
FAR = "none: model.positions=none | alibi: model.positions=none score=alibi"
SWEEPS = {
    "toy": (
        f"experiment=arena arena.arms='causal | window: score=window score.window=16 | alibi | sinks' {QUIET} {TOY} "
        "training.time_attention=false"
    ),
    "rankings": (
        f"experiment=arena arena.arms='{RANKED}' arena.looks=1 arena.lr_seeds=1 optimizer.lr=6e-3 {QUIET} {TOY} "
        "training.steps=600 training.eval_every=200 training.time_attention=false"
    ),
    "recall-mqar": f"experiment=recall data=mqar arena.seeds=2 {QUIET}",
    "recall-counting": (
        f"experiment=recall data=counting arena.arms='{COUNTERS}' arena.seeds=2 model.n_layers=1 model.n_heads=4 "
        f"{QUIET}"
    ),
    # One layer, as two can pass the needle on from token to token. ALiBi takes up to 32 nats from it.
    "recall-needle": (
        f"experiment=recall data=needle arena.arms='{FAR}' arena.seeds=2 model.n_layers=1 seq_len=1024 "
        f"training.batch_size=4 training.steps=400 training.eval_every=200 {QUIET}"
    ),
    "formulas": f"experiment=formulas {QUIET}",
    "parts": "experiment=speedrun hydra.launcher.jobs=2 tracking=disabled",
}
