"""The keys and values that a model has computed, so that a new token costs the work of one token.

Attention reads one layer's Cache at a time (attention/decode/cache.py). All layers share the sequences' lengths and the
page table, whose entry (b, i) is the page that holds sequence b's tokens from i * PAGE_SIZE on. Other sequences reuse
the pages of finished ones (Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with
PagedAttention").
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attention.decode.cache import Cache
from attention.interface import Attention, AttentionOutput
from attention.layout import Layout
from attention.score import Score
from mixers.layers import MixerState, build_mixer
from model.attention import Attend, Carry
from model.options import GPTConfig

PAGE_SIZE = 64  # tokens


@dataclass(frozen=True)
class CacheSize:
    """The capacity of a cache.

    slots    sequences at a time
    longest  tokens of the longest one
    pages    of all sequences together; None: each slot has room for the longest, without pages
    """

    slots: int
    longest: int
    pages: int | None = None

    def bytes(self, config: GPTConfig, dtype: torch.dtype) -> int:
        """Bytes of the keys and values of all layers, and of the mixers' states."""
        tokens = self.slots * self.longest if self.pages is None else self.pages * PAGE_SIZE
        states = mixer_states(config, self.slots, torch.device("meta"), dtype).values()
        of_states = sum(x.nbytes for state in states for x in state if x is not None)
        return tokens * bytes_per_token(config, dtype) + of_states


def bytes_per_token(config: GPTConfig, dtype: torch.dtype) -> int:
    """Bytes of a token's keys and values in all layers that have attention."""
    return 2 * len(config.attention_layers) * config.kv_heads * config.head_size * dtype.itemsize


def mixer_states(config: GPTConfig, slots: int, device: torch.device, dtype: torch.dtype) -> dict[int, MixerState]:
    """Layer -> the state of its mixer before the first token, for each slot."""
    with torch.device("meta"):
        mixers = {layer: build_mixer(name, config.n_embd, config.n_heads) for layer, name in config.mixers.items()}
    return {layer: mixer.new_state(slots, device, dtype) for layer, mixer in mixers.items()}


def pages_of(tokens: int, window: int | None = None) -> int:
    """Pages that a sequence needs. Where no query sees more than `window` keys, it reuses pages of older keys."""
    pages = -(-tokens // PAGE_SIZE)
    return pages if window is None else min(pages, -(-(window - 1) // PAGE_SIZE) + 1)


class KVCache:
    """Keys and values of the sequences in `size.slots` slots, or a mixer's states, for all layers of a model.

    The host keeps track of the free pages. `lengths` (slots,) int32 and the page table stay at their addresses, because
    a captured CUDA graph reads them there.
    """

    def __init__(self, config: GPTConfig, size: CacheSize, device: torch.device, dtype: torch.dtype) -> None:
        self.size = size
        self.lengths = torch.zeros(size.slots, dtype=torch.int32, device=device)
        self.table: Tensor | None = None
        rows, tokens = size.slots, size.longest
        if size.pages is not None:
            rows, tokens = size.pages, PAGE_SIZE
            self.host_table = torch.full((size.slots, pages_of(size.longest)), -1, dtype=torch.int32)
            self.table = self.host_table.to(device, copy=True)
        self.free = list(range(size.pages or 0))
        self.held: dict[int, list[int]] = {}  # slot -> its pages
        # Zeros, because a key that nobody sees still takes part with a weight of 0, and 0 times NaN is NaN.
        zeros = partial(torch.zeros, (rows, config.kv_heads, tokens, config.head_size), dtype=dtype, device=device)
        states = mixer_states(config, size.slots, device, dtype)
        self.layers = [
            states.get(layer) or Cache(zeros(), zeros(), self.lengths, self.table) for layer in range(config.n_layers)
        ]

    def prefill(self, attend: Attention, cu_seqlens: Tensor, fresh: Tensor) -> list[Attend]:
        """What each layer calls for new prompts in a row.

        cu_seqlens  (slots + 1,) where each slot's new tokens begin in the row; they are the last of `lengths`
        fresh       (slots,) which slots' prompts those are
        """
        return [
            Prefill(attend, layer, cu_seqlens) if isinstance(layer, Cache) else Carry(layer, fresh)
            for layer in self.layers
        ]

    def decode(self, attend: Attention) -> list[Attend]:
        """What each layer calls for one new token in each slot."""
        return [Decode(attend, layer) if isinstance(layer, Cache) else Carry(layer) for layer in self.layers]

    def reserve(self, slot: int, prompt: int, tokens: int, window: int | None = None) -> bool:
        """Take the pages for a sequence of `tokens`, the first `prompt` written at once; False where too few are free.

        window  keys that a query sees at most: pages further back are reused
        """
        if self.table is None:
            return True
        needed = pages_of(tokens, window)
        if needed > len(self.free):
            return False
        pages = self.held[slot] = [self.free.pop() for _ in range(needed)]
        overwritten = max(0, pages_of(prompt) - needed)  # by the prompt's end: these are never written
        row = [-1 if n < overwritten else pages[n % needed] for n in range(pages_of(tokens))]
        self.host_table[slot] = -1
        self.host_table[slot, : len(row)] = torch.tensor(row)
        return True

    def release(self, slot: int) -> None:
        """Give a slot's pages back."""
        self.free += self.held.pop(slot, [])
        if self.table is not None:
            self.host_table[slot] = -1

    def publish(self) -> None:
        """Copy the table to the device, after all work that was launched with the old one."""
        if self.table is not None:
            self.table.copy_(upload(self.host_table, self.table.device))


def upload(x: Tensor, device: torch.device) -> Tensor:
    """A copy of x on the device. The host does not wait for it, and may change x at once."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.clone()


@dataclass(frozen=True)
class Prefill:
    """A layer's attention to new prompts: it stores their keys and values, and attends as in training.

    cu_seqlens  (slots + 1,) where each slot's new tokens begin in the row; they are the last of `cache.lengths`
    """

    attend: Attention
    cache: Cache
    cu_seqlens: Tensor

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: object) -> AttentionOutput:
        self.cache.write(k.to(self.cache.k.dtype), v.to(self.cache.v.dtype), self.cu_seqlens)
        return self.attend(q, k, v, **options)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Decode:
    """A layer's attention to one new token in each slot, which sees the stored tokens and itself."""

    attend: Attention
    cache: Cache

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, layout: Layout, dropout_key: None, **options: Any
    ) -> AttentionOutput:
        self.cache.write(k, v)
        return self.attend.decode(q, self.cache, **options)  # of a score, its scale and its tensors


def longest_window(scores: Sequence[Score]) -> int | None:
    """The most keys that a query of any layer sees; None where a layer has no window."""
    windows = [score.window for score in scores]
    return None if None in windows else max((window for window in windows if window is not None), default=1)
