"""One dropout mask for every implementation: Philox 4x32-7, addressed by the coordinates of an attention weight.

A kept weight is a pure function of (seed, step, layer, sequence, head, query position, key position).
The way the work is cut (tile sizes, micro-batches, ranks, devices) does not enter. So naive, tiled and
flash drop exactly the same weights, and the backward pass draws the mask again instead of storing it.

The generator is Philox 4x32 with 7 rounds, the fewest that pass BigCrush (Salmon, Moraes, Dror, Shaw:
"Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011). It maps a 128-bit counter and a 64-bit key to
128 random bits. Every coordinate has its own field, so no two weights ever share random bits:

    key      k0 = seed                    k1 = step
    counter  c0 = sequence                c2 = layer << 16 | head
             c1 = column group C(j)       c3 = row group R(i)

One call serves 16 weights, a byte each, of query rows {i, i + 8} and eight key columns 8 apart. On a
tensor core one thread holds exactly these weights of a 16 x 64 piece of a score tile. With the bits of a
query row i and a key column j numbered from 0:

    R(i) = i without bit 3                   = (i >> 4) * 8 + (i & 7)
    C(j) = j without bits 3, 4, 5            = (j >> 6) * 8 + (j & 7)
    word = bits 4 and 5 of j                 = (j >> 4) & 3
    byte = 3 - (2 * bit3(i) + bit3(j))         (the most significant byte is byte 3)

So the thread that computes 16 bytes is the one that needs them, in tiles whose rows start at multiples
of 16 and whose columns start at multiples of 64. Rows enter in c3 and columns in c1, which Philox's first
round only xors. The first three of seven rounds then work on rows and columns separately, and only the
last four cost one evaluation for each pair.

A weight is kept iff its byte >= round(256 p): p is realised in steps of 1/256, and kept weights are
rescaled by the exact inverse of the realised keep probability, so the expectation is unbiased.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

N_ROUNDS = 7
RATES = "0 or between 1/256 and 255/256, because the mask is realised in steps of 1/256"

# The multipliers less 2**32: a product with 32 bits then never overflows int64, which would be undefined behaviour.
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53 - 2**32, 0xCD9E8D57 - 2**32
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_UINT32 = 0xFFFFFFFF


@dataclass(frozen=True)
class DropoutKey:
    """Everything that determines the masks of one call; each field is an int or a 0-dim int64 tensor.

    seed             of the run, below 2**32
    step             of training, below 2**32
    layer            below 2**16
    first_sequence   index in the global batch of the call's first sequence, below 2**32
    first_head       index of the call's first query head in the layer
    first_query      position in its sequence of the call's first query, a multiple of 16
    first_key        position in its sequence of the call's first key, a multiple of 64

    Tensors let the key change every step without recompiling and without a host synchronisation. The last three fields
    are for a call on a part of the heads, queries or keys: it draws this part of the whole call's mask.
    """

    seed: int | Tensor
    step: int | Tensor
    layer: int | Tensor
    first_sequence: int | Tensor
    first_head: int | Tensor = 0
    first_query: int | Tensor = 0
    first_key: int | Tensor = 0

    def at_layer(self, layer: int) -> DropoutKey:
        """The same key for another layer."""
        return replace(self, layer=layer)

    def pack_layers(self, n_layers: int, device: torch.device) -> Tensor:
        """(n_layers, 7) int64 on `device`: the packed key of each layer, made once for all of them."""
        # Rows of eight numbers: then a kernel finds every layer's key at the same alignment.
        keys = torch.empty(n_layers, 8, dtype=torch.int64, device=device)[:, : len(fields(self))]
        keys.copy_(self.at_layer(0).pack(device))
        keys[:, 2] = torch.arange(n_layers, device=device)
        return keys

    def pack(self, device: torch.device) -> Tensor:
        """(7,) int64 on `device`: the fields in their order. Kernels read it from there.

        Raises ValueError for a number that is out of range, or not the required multiple.
        """
        for name, bits in (("seed", 32), ("step", 32), ("layer", 16), ("first_sequence", 32)):
            if isinstance(value := getattr(self, name), int) and not 0 <= value < 2**bits:
                raise ValueError(f"{name}={value} of a dropout key must lie between 0 and 2**{bits} - 1.")
        for name, position, unit in (("first_query", self.first_query, 16), ("first_key", self.first_key, 64)):
            if isinstance(position, int) and position % unit:
                raise ValueError(f"{name}={position} of a dropout key must be a multiple of {unit}.")
        # Each part is a launch on a GPU, so equal numbers that follow one another make one part.
        parts: list[tuple[int | Tensor, int]] = []  # a value, and how many times in a row it comes
        for field in fields(self):
            value = getattr(self, field.name)
            if parts and isinstance(value, int) and isinstance(parts[-1][0], int) and parts[-1][0] == value:
                parts[-1] = value, parts[-1][1] + 1
            else:
                parts.append((value, 1))
        return torch.cat(
            [
                x.to(device, torch.int64).reshape(1)
                if isinstance(x, Tensor)
                else torch.full((count,), x, dtype=torch.int64, device=device)
                for x, count in parts
            ]
        )


FIELDS = tuple(field.name for field in fields(DropoutKey))  # a constant: torch.compile cannot read a class's fields


def moved(key: Tensor, **values: int) -> Tensor:
    """A packed key in which some fields have new values, on its device."""
    parts = list(key.split(1))
    for name, value in values.items():
        i = FIELDS.index(name)
        parts[i] = torch.full_like(parts[i], value)
    return torch.cat(parts)


def is_valid_rate(p: float) -> bool:
    """Whether the mask can drop with probability p: whether p is one of RATES."""
    return p == 0 or 1 / 256 <= p <= 255 / 256


def drop_threshold(p: float) -> int:
    """The number of the 256 byte values that are dropped at probability p: round(256 p)."""
    return round(256 * p)


def keep_scale(p: float) -> float:
    """The factor of kept weights: the inverse of the realised keep probability."""
    return 256 / (256 - drop_threshold(p))


def philox(counter: Sequence[Tensor], key: Sequence[Tensor], rounds: int = N_ROUNDS) -> list[Tensor]:
    """Philox 4x32: four words of counter and two of key to four random words.

    All are int64 tensors that hold values in [0, 2**32), of shapes that broadcast together.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        # c * (M - 2**32) = c * M - c * 2**32 has the low word of c * M, and its high word less c.
        product_0, product_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (
            (product_1 >> 32) + c2 ^ c1 ^ k0,
            product_1 & _UINT32,
            (product_0 >> 32) + c0 ^ c3 ^ k1,
            product_0 & _UINT32,
        )
        k0, k1 = k0 + _WEYL_0 & _UINT32, k1 + _WEYL_1 & _UINT32
    return list(torch.broadcast_tensors(c0, c1, c2, c3))


def keep_mask(
    key: DropoutKey | Tensor,
    p: float,
    B: int,
    H: int,
    T: int,
    S: int,
    *,
    rows: tuple[int, int] | None = None,
    columns: tuple[int, int] | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """The attention weights that dropout keeps: (B, H, T, S) bool, True with probability 1 - round(256 p) / 256.

    `rows` and `columns`, each (start, stop), cut a tile out of the mask without computing the rest; the tile may start
    anywhere. `key` may be packed, then on `device`. The result is the same bits on every device.

    Raises ValueError for a p that the mask cannot realise.
    """
    if not is_valid_rate(p):
        raise ValueError(f"p={p} must be {RATES}.")
    row_start, row_stop = rows or (0, T)
    column_start, column_stop = columns or (0, S)
    packed = key if isinstance(key, Tensor) else key.pack(torch.device(device or "cpu"))
    seed, step, layer, first_sequence, first_head, first_query, first_key = packed.unbind()

    # The smallest aligned piece that covers the tile: 16 rows and 64 columns a call.
    first_row, first_column = row_start // 16 * 16, column_start // 64 * 64
    R = first_query // 2 + torch.arange(first_row // 2, -(-row_stop // 16) * 8, device=device)
    C = first_key // 8 + torch.arange(first_column // 8, -(-column_stop // 64) * 8, device=device)

    sequence = first_sequence + torch.arange(B, device=device)
    head = (layer << 16) + first_head + torch.arange(H, device=device)
    words = philox(
        (sequence[:, None, None, None], C, head[:, None, None], R[:, None]),
        (seed, step),
    )  # 4 x (B, H, R, C)
    random_bytes = torch.stack([word.to(torch.int32) for word in words], dim=-1).view(torch.uint8)  # (B, H, R, C, 16)

    # Bytes lie in memory from the least significant, where both bits 3 are set, to the most: hence the flip.
    keep = (random_bytes >= drop_threshold(p)).view(B, H, len(R) // 8, 8, len(C) // 8, 8, 4, 2, 2).flip(-1, -2)
    #   (B, H, i >> 4, i & 7, j >> 6, j & 7, bits 5-4 of j, bit 3 of i, bit 3 of j) -> rows x columns
    keep = keep.permute(0, 1, 2, 7, 3, 4, 6, 8, 5).reshape(B, H, 2 * len(R), 8 * len(C))
    return keep[
        :, :, row_start - first_row : row_stop - first_row, column_start - first_column : column_stop - first_column
    ]
