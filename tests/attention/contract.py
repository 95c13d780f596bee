"""The implementations that the contract's tests check, the features that each supports, and the cases.

All registered implementations are tested, and none is named here. Features that an implementation refuses, such as
dropout or a log-sum-exp, are not tested; test_contract.py lists the features that this repository's must support.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from attention import IMPLEMENTATIONS, Attention, AttentionConfig, AttentionShape, UnsupportedAttention, build_attention
from tests.attention.reference import Case

NO_BACKWARD_ON_A_CPU = {"flex"}  # and on a GPU it compiles for each shape; test_score.py holds its forward
BLOCKS = {"block_q": 32, "block_k": 48}  # small, for implementations that take them

# Lengths around the kernels' tiles of 64, and head sizes that are no power of two.
CASES = {
    "square": Case(1, 2, 2, 113, 113, 59),
    "grouped": Case(1, 4, 2, 70, 70, 40),
    "multi_query": Case(1, 3, 1, 64, 64, 16),
    "more_keys": Case(1, 2, 1, 61, 139, 64),
    "more_queries": Case(1, 2, 1, 139, 61, 96),
    "one_query": Case(2, 2, 2, 1, 139, 80),
    "one_token": Case(3, 2, 2, 1, 1, 16),
    "few_keys": Case(1, 2, 2, 99, 3, 32),
}
SQUARE = Case(1, 1, 1, 150, 150, 16)
EVERYTHING: Any = {"window": 70, "soft_cap": 3.0, "alibi": True, "sinks": True}
SCORE_CASES = {
    "window": replace(SQUARE, window=20),
    "window_of_one": replace(SQUARE, window=1),
    "window_of_tiles": replace(SQUARE, window=64),
    "soft_cap": replace(SQUARE, soft_cap=1.5, spread=2.0),
    "soft_cap_full": replace(SQUARE, causal=False, soft_cap=1.5),
    "alibi": replace(SQUARE, H=3, alibi=True),
    "sinks_full": replace(SQUARE, H=2, causal=False, sinks=True),
    "documents": replace(SQUARE, B=2, documents=(64, 1, 35, 50)),
    "documents_full": replace(SQUARE, B=2, causal=False, documents=(64, 1, 35, 50)),
    "everything": replace(SQUARE, H=2, **EVERYTHING, documents=(30, 120)),
    "everything_more_keys": Case(2, 4, 2, 61, 140, 24, **EVERYTHING, documents=(70, 70)),
    "everything_more_queries": Case(2, 4, 1, 140, 61, 24, **EVERYTHING, documents=(21, 40)),
    "everything_one_query": Case(2, 2, 2, 1, 75, 16, **EVERYTHING, documents=(40, 35)),
}


def build(name: str, **options: Any) -> Attention:
    """An implementation, with small tiles where it takes them."""
    blocks = {option: size for option, size in BLOCKS.items() if option in IMPLEMENTATIONS[name].options}
    return build_attention(AttentionConfig(name, **(blocks | options)))


def accepts(ask: Callable[[], object]) -> bool:
    """Whether an implementation does not refuse."""
    try:
        ask()
    except UnsupportedAttention:
        return False
    return True


def trains_on(name: str, device: str, dtype: torch.dtype = torch.float32) -> bool:
    """Whether an implementation has gradients for tensors on a device."""
    return accepts(lambda: build(name).check(AttentionShape(16, 2, 2, dtype, torch.device(device), training=True)))


def device_of(name: str) -> str:
    """Where to test it: on the CPU if it runs there."""
    return "cpu" if trains_on(name, "cpu") else "cuda"


# Those that take fp32, which most tests need; tests/gpu/test_peers.py has those that take 16 bits alone.
NAMES = [
    name
    for name in IMPLEMENTATIONS
    if name not in NO_BACKWARD_ON_A_CPU
    and (trains_on(name, "cpu") or (torch.cuda.is_available() and trains_on(name, "cuda")))
]
REPLAYING = [name for name in NAMES if accepts(partial(build, name, dropout=0.1))]
RETURNING_LSE = [name for name in NAMES if IMPLEMENTATIONS[name].returns_lse]


def supporting(*features: str) -> list[str]:
    """The implementations that have all these features of a score or a layout."""
    return [name for name in NAMES if IMPLEMENTATIONS[name].supports.issuperset(features)]
