"""Whether generation fits the memory, checked before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from model.cache import PAGE_SIZE, CacheSize, bytes_per_token
from model.gpt import GPT
from recipe.infer.generation.errors import GenerationError
from recipe.training.device import free_memory

SHARE = 0.9  # of the free memory; the rest is for the model's work
ROWS_OF_LOGITS = 10  # fp32, for each sequence, with its random numbers, while a token is chosen


def check_memory(
    size: CacheSize, pages: Sequence[int], noise_rows: int, model: GPT, dtype: torch.dtype, device: torch.device
) -> None:
    """Raise GenerationError where a cache, the logits and the random numbers take more memory than is free.

    pages       of each sequence, of which `size.slots` are there at a time
    noise_rows  of the random numbers that all sequences share, fp64
    """
    free, logits, noise = free_memory(device), ROWS_OF_LOGITS * 4 * model.vocab_size, noise_rows * 8 * model.vocab_size
    needed = size.bytes(model.config, dtype) + size.slots * logits + noise
    if needed <= SHARE * free:
        return
    per_page = PAGE_SIZE * bytes_per_token(model.config, dtype)
    totals = accumulate(per_page * n + logits for n in sorted(pages, reverse=True))
    fitting = sum(total + noise <= SHARE * free for total in totals)
    advice = f"set batch={fitting}, as that many fit" if fitting else "ask for fewer tokens, as not even one fits"
    raise GenerationError(
        f"The keys, values, logits and random numbers of batch={size.slots} sequences of up to {size.longest:,} tokens "
        f"take {needed / 2**30:.2f} GiB, and {free / 2**30:.2f} GiB are free on {device}; {advice}."
    )
