"""New prompts side by side in one row, as documents of it, for their prefill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from model.cache import upload

ALIGNMENT = 128  # of prompts in a row: the largest tile of keys that a kernel reads


class Row(NamedTuple):
    """The tokens of new prompts, and where they are: tensors of the host, or of a device.

    tokens, positions  (1, n) int64       in the row, and in their sequences
    last               (slots,) int64     where in the row each slot's prompt ends
    lengths            (slots,) int64     of the prompts; 0 for slots without a new one
    cu_seqlens         (slots + 1,) int32 bounds of the prompts and the padding between; tokens may follow the last
    starts             (1, n) int32       where each token's document begins; None: the row is one prompt, no more
    """

    tokens: Tensor
    positions: Tensor
    last: Tensor
    lengths: Tensor
    cu_seqlens: Tensor
    starts: Tensor | None

    def on(self, device: torch.device) -> Row:
        """The same on a device, without waiting for it."""
        moved = {name: upload(x, device) for name, x in self._asdict().items() if x is not None}
        return self._replace(**moved)


def padded(tokens: int) -> int:
    """The room that a prompt takes in a row with others."""
    return -(-tokens // ALIGNMENT) * ALIGNMENT


def lay_out(prompts: Mapping[int, Sequence[int]], slots: int, length: int) -> Row:
    """The row of prompts, by their slots.

    length  of the row; 0: the length of the only prompt, without padding

    Padding before each prompt makes it end with a tile, so that a kernel computes it in the same way wherever it lies.
    The padding is a separate document, and does not enter the cache, because it precedes the sequence's first token.
    """
    spare = length - sum(padded(len(prompt)) for prompt in prompts.values())
    tokens: list[int] = []
    positions: list[int] = []
    starts: list[int] = []
    bounds, last, lengths = [0], [0] * slots, [0] * slots
    for slot in range(slots):
        if slot in prompts:
            prompt = prompts[slot]
            padding = spare + -len(prompt) % ALIGNMENT if length else 0
            spare = 0
            starts += [len(tokens)] * padding + [len(tokens) + padding] * len(prompt)
            tokens += [0] * padding + [*prompt]
            positions += [0] * padding + [*range(len(prompt))]
            last[slot], lengths[slot] = len(tokens) - 1, len(prompt)
        bounds.append(len(tokens))
    return Row(
        torch.tensor([tokens]),
        torch.tensor([positions]),
        torch.tensor(last),
        torch.tensor(lengths),
        torch.tensor(bounds, dtype=torch.int32),
        torch.tensor([starts], dtype=torch.int32) if length else None,
    )
