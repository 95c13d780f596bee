"""The calls that a check makes of a mixer: lengths around chunks, decays, beta, keys, documents and states."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from .recurrence import Decay, MixerInputs, Recurrence

B, H = 2, 2
LONG = 2048  # tokens over which the rounding of a state in 16 bits adds up
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
# What multiplies the state before a token: from -> to, drawn evenly in the logarithm.
DECAYS = {"usual": (0.5, 0.99), "strong": (1e-6, 1e-3), "weak": (0.9999, 0.99999), "mixed": (1e-6, 0.9999)}


@dataclass(frozen=True)
class Case:
    """One call; equal cases draw equal tensors.

    group     of the report
    lengths   of a row's documents, in reverse in the second row; a single one: without documents
    decay     one of DECAYS
    beta      usual: between 0 and 1; small: of that, half a percent; 0 or 2: at every other token, which the delta rule
              skips or reflects
    keys      unit: of length 1; long: of lengths from 0.3 to 1.4
    states    with an initial state, and a gradient of the last one
    scale     of the queries; None: K ** -0.5
    has_beta  whether there is a beta; else it is 1
    """

    group: str
    recurrence: Recurrence
    sizes: tuple[int, int]  # K, V
    lengths: tuple[int, ...]
    decay: str = "usual"
    beta: str = "usual"
    keys: str = "unit"
    states: bool = False
    scale: float | None = None
    has_beta: bool = True
    dtype: str = "fp32"

    def words(self) -> str:
        """For a report."""
        other = [
            f"{name}={getattr(self, name)}"
            for name in ("decay", "beta", "keys", "states", "scale")
            if getattr(self, name) != getattr(Case, name)
        ]
        tokens = f"{self.lengths[0]} tokens" if len(self.lengths) == 1 else f"documents of {self.lengths} tokens"
        return ", ".join([tokens, *other, self.dtype])


def cases(recurrence: Recurrence, sizes: tuple[int, int], chunk: int, takes: frozenset[str]) -> Iterator[Case]:
    """All cases in fp32 for a mixer with chunks of so many tokens.

    takes  of beta, scale, initial and documents, what the mixer has
    """
    C = chunk
    around = sorted({1, *(n * C + d for n in range(1, 5) for d in (-1, 0, 1))} - {0})
    some = Case("lengths", recurrence, sizes, (2 * C + 3,), has_beta="beta" in takes)
    yield from (replace(some, lengths=(n,)) for n in around)
    if recurrence.decay is not Decay.none:
        yield from (replace(some, group="decays", decay=decay) for decay in DECAYS)
    yield replace(some, group="long", lengths=(LONG,), decay="weak", beta="small")
    if "beta" in takes:
        yield from (replace(some, group="beta", beta=beta) for beta in ("0", "2"))
    yield replace(some, group="keys", keys="long")
    if "scale" in takes:
        yield replace(some, group="scale", scale=0.7)
    packed = [(1, C - 1, 1, C + 1, 2), (C, C, C), (2 * C + 1, 3, C - 1)] if "documents" in takes else []
    yield from (replace(some, group="documents", lengths=lengths) for lengths in packed)
    if "initial" in takes:
        yield from (replace(some, group="states", lengths=(n,), states=True) for n in (1, C, 2 * C + 1))
        yield from (replace(some, group="states", lengths=lengths, states=True) for lengths in packed[:1])


def draw(case: Case, device: torch.device) -> tuple[MixerInputs, tuple[Tensor, Tensor]]:
    """The inputs, and the gradients of the output (B, H, T, V) and of the last state (B, H, K, V).

    q, k, v and the output's gradient have the case's precision, all else fp32, or fp64 with it.
    """
    generator, (K, V), T = torch.Generator().manual_seed(0), case.sizes, sum(case.lengths)
    narrow = DTYPES[case.dtype]
    wide = torch.promote_types(narrow, torch.float32)

    randn, rand = (partial(draw, generator=generator, dtype=torch.float64) for draw in (torch.randn, torch.rand))
    k = F.normalize(randn(B, H, T, K), dim=-1)
    if case.keys == "long":
        k = k * (0.3 + 1.1 * rand(B, H, T, 1))
    q, k, v = (x.to(device, narrow) for x in (randn(B, H, T, K), k, randn(B, H, T, V)))
    log_decay = documents = None
    kind = case.recurrence.decay
    if kind is not Decay.none:
        low, high = (math.log(a) for a in DECAYS[case.decay])
        shape = (1, H, 1, 1) if kind is Decay.fixed else (B, H, T, K if kind is Decay.channel else 1)
        log_decay = (low + (high - low) * rand(*shape)).expand(B, H, T, -1).to(device, wide).contiguous()
    beta = rand(B, H, T)
    if case.beta == "small":
        beta *= 0.005
    elif case.beta != "usual":
        beta[:, :, ::2] = float(case.beta)
    initial = randn(B, H, K, V).to(device, wide) if case.states else None
    if len(case.lengths) > 1:
        rows = (case.lengths, case.lengths[::-1])
        documents = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in rows])
        documents = documents.to(device)
    given = MixerInputs(q, k, v, log_decay, beta.to(device, wide) if case.has_beta else None, initial, documents)
    return given, (randn(B, H, T, V).to(device, narrow), case.states * randn(B, H, K, V).to(device, wide))
