"""The options of a ladder, its rule, and their mistakes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

FEWEST_SIZES = 4  # one more than the law has parameters
RULED = ("model.n_layers", "model.n_embd", "model.n_heads", "model.n_kv_heads", "training.batch_tokens")


@dataclass
class LadderConfig:
    """The options under `ladder.*`, which experiment=ladder reads beside arena.arms, baseline, seeds and first_seed.

    depths  layers of the sizes that are fitted
    next    layers of the size that is predicted, and then run
    width   channels of a layer: the model has this times its depth
    head    channels of a head
    depth   set for each run of a ladder: its size
    """

    depths: list[int] = field(default_factory=lambda: [1, 2, 3, 4])
    next: int = 6
    width: int = 32
    head: int = 32
    depth: int | None = None


def rule(config: LadderConfig, depth: int, batch_size: int, seq_len: int, lr: float, n_embd: int) -> list[str]:
    """The overrides of a size: depth is the one dial.

    Width grows with the depth, and the heads keep their size. The tokens of a step grow with the depth, and the number
    of steps stays. The learning rate falls with the root of the width.

    batch_size, seq_len, lr, n_embd  of the configuration without the rule
    """
    width = config.width * depth
    return [
        f"model.n_layers={depth}",
        f"model.n_embd={width}",
        f"model.n_heads={width // config.head}",
        f"training.batch_tokens={depth * batch_size * seq_len}",
        f"optimizer.lr={float(f'{lr * (n_embd / width) ** 0.5:.4g}')!r}",
    ]


def ladder_mistakes(config: LadderConfig) -> Iterator[str]:
    """A sentence for each value of `ladder.*` that makes a prediction impossible."""
    depths = config.depths
    if len(set(depths)) < FEWEST_SIZES:
        yield (
            f"ladder.depths={depths} has {len(set(depths))} sizes, and a law of three parameters needs {FEWEST_SIZES} "
            "or more."
        )
    if depths != sorted(set(depths)) or (depths and depths[0] < 1):
        yield f"ladder.depths={depths} must hold different depths above 0, the smallest first."
    elif depths and config.next <= depths[-1]:
        yield f"ladder.next={config.next} must be larger than the depths that are fitted ({depths[-1]})."
    if config.head < 1 or config.width < 1 or config.width % config.head:
        yield f"ladder.width={config.width} must be a multiple of ladder.head={config.head}, both above 0."


def ruled(overrides: Sequence[str]) -> Iterator[str]:
    """A sentence for each override that the rule would replace."""
    for line in overrides:
        key = line.lstrip("+").partition("=")[0]
        if key in RULED:
            yield f"{line} would be replaced, as ladder.width and ladder.head decide {key} at each depth; leave it out."
