"""Options of earlier versions: what to do instead, and recorded configurations that still have them."""

from collections.abc import Iterable, Iterator
from typing import Any

from recipe.wording import as_typed

# An option, or the options that begin with a prefix such as "ladder." -> what to do instead.
REMOVED: dict[str, str] = {
    "attention=fa4": "write `from flash_attn.cute import flash_attn_func as fa4` in fa4.py: attention=fa4.py:fa4",
    "experiment=ladder": "an arena trains its arms at several sizes: experiment=arena arena.sizes=[1,2,4]",
    "ladder.": "an arena trains its arms at several sizes: experiment=arena arena.sizes=[1,2,4]",
    "arena.match": "give an arm its own model.mlp_width, with which it has as many parameters as the baseline",
    "arena.baseline": "the first of arena.arms is the baseline: write it first",
    "arena.lr_seeds": "leave it out: learning rates are tried on two seeds",
    "model.log_scale": "score=scalable multiplies scores by a learned factor of log(n + 1)",
    "optimizer.eps": "leave it out: it is 1e-8",
    "parallel.context_by": "leave it out: ranks exchange heads where these divide evenly, else keys",
    "parallel.exact": "leave it out: any number of ranks adds gradients in a fixed order, a power of two in one rank's",
    "parallel.reshard_after_forward": "parallel.data=shard_grad_op keeps a block's weights until its backward pass",
    "parallel.timeout_s": "leave it out: a rank waits 10 minutes for another",
    "schedule.decay_fraction": "leave it out: schedule=wsd decays over the last fifth of the steps",
    "score.show": "leave it out: attention/flash/formula.py writes the code of a formula",
    "tracking=tensorboard": "choose tracking=offline, W&B in the run folder; metrics.jsonl has every metric",
    "tracking.mode=tensorboard": "choose tracking=offline, W&B in the run folder; metrics.jsonl has every metric",
    "training.cpu.products": "leave it out: linear layers take their products from torch",
    "training.cuda_graph": "leave it out: a compiled step is replayed as a CUDA graph wherever it can be",
    "training.loss": "leave it out: a large vocabulary's loss is computed in chunks on a GPU",
    "training.memory_snapshot": "training.profile=true shows the steps; torch.cuda.memory records allocations",
    "training.mlp_in_fp8": "leave it out: the MLP computes in training.precision",
    "training.time_attention": "training.profile=true shows the share of attention in a step",
}
# The values of each removed option with which a recorded configuration computes what it computes today.
IGNORED: dict[str, tuple[Any, ...]] = {
    "ladder.depths": ([1, 2, 3, 4],),
    "ladder.next": (6,),
    "ladder.width": (32,),
    "ladder.head": (32,),
    "ladder.depth": (None,),
    "arena.match": ("none",),
    "arena.baseline": (None,),
    "arena.lr_seeds": (2,),
    "arena.stage": (None, "lr", "seeds"),
    "arena.size": (None, *range(1, 1_000)),
    "model.log_scale": (False,),
    "optimizer.eps": (1e-8,),
    "parallel.context_by": ("auto",),
    "parallel.exact": (True, False),  # sums of the latter differed by rounding
    "parallel.reshard_after_forward": (True, False),  # the latter is faster, with the same bits
    "parallel.timeout_s": (600.0,),
    "schedule.decay_fraction": (0.2,),
    "score.show": (False, True),
    "tracking": ("tensorboard",),
    "tracking.mode": ("tensorboard",),
    "training.cpu.products": ("blas",),
    "training.cpu_products": ("blas",),  # its former name
    "training.cuda_graph": (True, False),
    "training.loss": ("auto", "chunked"),  # experiment=long_context had the latter, which auto takes there
    "training.memory_snapshot": (False, True),
    "training.mlp_in_fp8": (False,),
    "training.time_attention": (False, True),
}

# Options that have become entries of another one, and what they are now. A command line may say either.
MOVED = {
    "arena.first_seed": "arena.rules.first_seed",
    "arena.margin": "arena.rules.margin",
    "arena.looks": "arena.rules.looks",
    "data.hub_revision": "data.hub_rows.revision",
    "data.hub_subset": "data.hub_rows.subset",
    "data.hub_split": "data.hub_rows.split",
    "training.cpu_threads": "training.cpu.threads",
    "training.cpu_memory_gib": "training.cpu.memory_gib",
}


def moved(line: str) -> str:
    """An override under the name that its option has today."""
    key, equals, value = line.partition("=")
    return f"{MOVED.get(key, key)}{equals}{value}"


def as_today(recorded: Iterable[str]) -> list[str]:
    """Recorded overrides under today's names, without the ones that may be ignored."""
    return [moved(line) for line in recorded if not is_ignored(line)]


def config_as_today(values: dict[str, Any]) -> dict[str, Any]:
    """A recorded configuration under today's names, without the removed options whose value may be ignored."""
    values = without_removed(values)
    for old, new in MOVED.items():
        (part, name), (_, option, entry) = old.split("."), new.split(".")
        if isinstance(of_part := values.get(part), dict) and name in of_part:
            of_part[option] = of_part.get(option, {}) | {entry: of_part.pop(name)}
    return values


def refusal(key: str) -> str | None:
    """The sentence that refuses an override of a removed option; None for other options."""
    for removed, instead in REMOVED.items():
        if key == removed or (removed.endswith(".") and key.startswith(removed)):
            return f"{key} is no longer an option; {instead}."
    return None


def is_ignored(line: str) -> bool:
    """Whether a recorded override sets a removed option to a value without which the run computes the same."""
    key, _, value = line.lstrip("+").partition("=")
    text = value.replace(" ", "")
    try:
        return float(text) in IGNORED.get(key, ())
    except ValueError:
        return text in {str(as_typed(one)).replace(" ", "") for one in IGNORED.get(key, ())}


def without_removed(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A recorded configuration without the removed options whose value may be ignored."""
    remaining = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if value in IGNORED.get(key, ()):
            continue
        rest = without_removed(value, f"{key}.") if isinstance(value, dict) else value
        if rest != {} or value == {}:
            remaining[name] = rest
    return remaining


def removed_options(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """A sentence for each removed option of a recorded configuration."""
    for name, value in values.items():
        if (sentence := refusal(f"{prefix}{name}")) is not None:
            yield sentence
        elif isinstance(value, dict):
            yield from removed_options(value, f"{prefix}{name}.")
