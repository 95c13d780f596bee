"""Options of earlier versions: what to do instead, and recorded configurations that still have them."""

from __future__ import annotations

import json
from typing import Any

# An option, or the options that begin with a prefix such as "ladder." -> what to do instead.
REMOVED: dict[str, str] = {
    "experiment=ladder": "an arena trains its arms at several sizes: experiment=arena arena.sizes=[1,2,4]",
    "ladder.": "an arena trains its arms at several sizes: experiment=arena arena.sizes=[1,2,4]",
    "arena.match": "give an arm its own model.mlp_width, with which it has as many parameters as the baseline",
    "training.memory_snapshot": "training.profile=true shows the steps; torch.cuda.memory records allocations",
    "training.mlp_in_fp8": "leave it out: the MLP computes in training.precision",
}
# The default of each removed option, with which a recorded configuration computes what it computes today.
DEFAULTS: dict[str, Any] = {
    "ladder.depths": [1, 2, 3, 4],
    "ladder.next": 6,
    "ladder.width": 32,
    "ladder.head": 32,
    "ladder.depth": None,
    "arena.match": "none",
    "training.memory_snapshot": False,
    "training.mlp_in_fp8": False,
}


def refusal(key: str) -> str | None:
    """The sentence that refuses an override of a removed option; None for other options."""
    for removed, instead in REMOVED.items():
        if key == removed or (removed.endswith(".") and key.startswith(removed)):
            return f"{key} is no longer an option; {instead}."
    return None


def is_at_removed_default(line: str) -> bool:
    """Whether a recorded override sets a removed option to its default."""
    key, _, value = line.lstrip("+").partition("=")
    return key in DEFAULTS and value.replace(" ", "") == json.dumps(DEFAULTS[key], separators=(",", ":")).strip('"')


def without_removed(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A recorded configuration without the removed options that have their default."""
    remaining: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if key in DEFAULTS and value == DEFAULTS[key]:
            continue
        rest = without_removed(value, f"{key}.") if isinstance(value, dict) else value
        if rest != {} or value == {}:
            remaining[name] = rest
    return remaining


def removed_options(values: dict[str, Any], prefix: str = "") -> list[str]:
    """A sentence for each removed option of a recorded configuration."""
    sentences: list[str] = []
    for name, value in values.items():
        if (sentence := refusal(f"{prefix}{name}")) is not None:
            sentences.append(sentence)
        elif isinstance(value, dict):
            sentences += removed_options(value, f"{prefix}{name}.")
    return sentences
