"""The next token from the logits and random numbers.

    token = argmax_j p_j / e_j,      e_j ~ Exp(1),      p = softmax(logits / temperature)

takes token j with probability p_j: it is the exponential race that torch.multinomial runs on a CPU, with the same
numbers e = -log(1 - u). The uniform numbers u are drawn on the CPU from the seed, for the first token, the second and
so on. Each further prompt and sample has a separate stream, which costs one row of numbers: stream n uses the
fractional part of u + s_n (Cranley and Patterson 1976), with s_n uniform. At each step the numbers of two streams are
independent. So a prompt's tokens depend on the seed and its number, neither on the prompts beside it nor on the device,
up to rounding of the logits.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from model.cache import upload
from recipe.errors import UserError

Stream = tuple[int, int]  # the number of a prompt, and of its sample
FIRST_STREAM = (0, 0)
MANTISSA = 53  # random bits of a double in [0, 1)
SMALLEST_TEMPERATURE = 1e-6  # logits divided by it stay finite in fp32


class GenerationError(UserError, ValueError):
    """Prompts, sampling options or files that cannot be used, or text that does not fit in memory; the message says
    what to change."""


@dataclass(frozen=True)
class Sampling:
    """The options for choosing tokens.

    temperature  divides the logits; 0 always takes the likeliest token
    top_k        draw among the k likeliest tokens only; None: all
    top_p        draw among the likeliest tokens that together have this probability; None: all. Holtzman et al. 2020,
                 "The Curious Case of Neural Text Degeneration"
    seed         of the draws

    Raises GenerationError.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature != 0 and not SMALLEST_TEMPERATURE <= self.temperature < math.inf:
            raise GenerationError(
                f"temperature={self.temperature} must be 0, which takes the likeliest token, or a number from "
                f"{SMALLEST_TEMPERATURE} on."
            )
        if self.top_k is not None and self.top_k < 1:
            raise GenerationError(f"top_k={self.top_k} must be at least 1; null draws among all tokens.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise GenerationError(f"top_p={self.top_p} must be above 0 and at most 1; null draws among all tokens.")
        if not -(2**63) <= self.seed < 2**64:
            raise GenerationError(f"seed={self.seed} must lie between -2**63 and 2**64 - 1.")

    def pick(self, logits: Tensor, noise: Tensor | None) -> Tensor:
        """The next token of each row.

        logits  (B, V) fp32
        noise   (B, V) fp32, the numbers e above; None at temperature 0

        Returns (B,) int64. Does not look at values.
        """
        if noise is None:
            return logits.argmax(dim=-1)
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            logits = logits.masked_fill(logits < logits.topk(self.top_k).values[:, -1:], -torch.inf)
        p = (logits / self.temperature).softmax(dim=-1)
        if self.top_p is not None and self.top_p < 1:
            likeliest, order = p.sort(dim=-1, descending=True, stable=True)
            before = likeliest.cumsum(dim=-1) - likeliest
            p = torch.zeros_like(p).scatter(-1, order, likeliest.masked_fill(before >= self.top_p, 0.0))
        return (p / noise).argmax(dim=-1)


class Noise:
    """Random numbers for each token of the vocabulary; row t decides the choice after t generated tokens.

    table   (rows, V) fp64, uniform, on the device: the last rows that were drawn. Row t lies at t modulo rows
    shifts  (slots, V) fp64, s_n of the stream in each slot; 0 for the first stream
    """

    def __init__(self, seed: int, vocab_size: int, rows: int, slots: int, device: torch.device) -> None:
        self.seed, self.generator = seed, torch.Generator().manual_seed(seed)
        self.table = torch.zeros(rows, vocab_size, dtype=torch.float64, device=device)
        self.shifts = torch.zeros(slots, vocab_size, dtype=torch.float64, device=device)
        self.drawn = 0

    def begin(self, slot: int, stream: Stream) -> None:
        """Give a slot the stream of its next sequence."""
        if stream == FIRST_STREAM:
            self.shifts[slot].zero_()
            return
        seed = np.random.SeedSequence((self.seed % 2**64, *stream)).generate_state(1, np.uint64)[0]
        self.shifts[slot].copy_(self._uniform(torch.Generator().manual_seed(int(seed))))

    def of(self, steps: Tensor) -> Tensor:
        """(slots, V) fp32: the numbers e of each slot for its next token, after `steps` (slots,) generated ones."""
        return -torch.log1p(-(self.table[steps % len(self.table)] + self.shifts).frac()).float()

    def draw(self, count: int) -> None:
        """Draw the first `count` rows; the table holds the last ones. Does not wait for the device."""
        if count <= self.drawn - len(self.table):
            self.generator.manual_seed(self.seed)
            self.drawn = 0
        while self.drawn < count:
            self.table[self.drawn % len(self.table)] = self._uniform(self.generator)
            self.drawn += 1

    def _uniform(self, generator: torch.Generator) -> Tensor:
        """The next (V,) numbers in [0, 1), as Tensor.exponential_ draws them before it takes their logarithms."""
        bits = torch.empty(self.table.shape[1], dtype=torch.int64).random_(generator=generator)
        return (upload(bits, self.table.device) & ((1 << MANTISSA) - 1)).double() * 2.0**-MANTISSA
