"""Many prompts at a time through one model, token by token, with a cache.

A sequence has a slot from its first token to its last, then the next prompt gets it ("continuous batching": Yu et al.
2022, "Orca"). Prompts come in by a *prefill*: several in one row, that leave their keys and values in the cache. Then
all slots *decode* one token at a time. On a GPU the host reads tokens while the device computes the next ones.

A prompt's tokens depend on the prompts beside it only by rounding, and with the same number of slots not at all,
because matrix products then have the same shapes. On a GPU all rows of prompts have the same length, and each prompt
ends with a tile of attention.

The model's positions end at seq_len. Beyond it no cache helps, because every step moves all tokens to other positions:
a token is computed from scratch from the last seq_len tokens. But where positions are not learned and every layer has a
window, sequences simply continue, and the pages before the window are reused. With an attention that reads no cache,
and that no other may replace, every token but a sequence's first is computed from scratch.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import accumulate

import torch
from torch import Tensor

from model.cache import PAGE_SIZE, CacheSize, bytes_per_token, longest_window, pages_of
from model.gpt import GPT
from model.options import Positions
from recipe.infer.generation.sampling import FIRST_STREAM, GenerationError, Sampling, Stream
from recipe.infer.generation.steps import Steps, decoding_attention, lay_out, padded
from recipe.training.device import free_memory

# Tokens of a prefill on a GPU. Fewer leave it idle; more take memory, and keep running sequences waiting.
ROW = 4096
NOISE_ROWS = 8  # for a single slot: no other sequence needs the ones before
SHARE = 0.9  # of the free memory; the rest is for the model's work
ROWS_OF_LOGITS = 10  # fp32, for each sequence, with its random numbers, while a token is chosen


@dataclass(eq=False)
class Request:
    """A prompt to continue.

    prompt    its tokens, at least one
    limit     tokens to add at most
    stream    of random numbers that decide between them
    tokens    the added tokens
    finished  no more tokens will follow. Set it to stop the sequence
    """

    prompt: Sequence[int]
    limit: int
    stream: Stream = FIRST_STREAM
    tokens: list[int] = field(default_factory=list)
    finished: bool = False


@dataclass(frozen=True)
class Launched:
    """Tokens (slots,) that the device computes, and the request of each slot; after `event` the host can read them."""

    owners: list[Request | None]
    tokens: Tensor
    event: torch.cuda.Event | None

    def read(self) -> Iterator[tuple[int, Request, int]]:
        """Slot, request and token, but for requests that have finished in the meantime. Waits for the device."""
        if self.event is not None:
            self.event.synchronize()
        for slot, (request, token) in enumerate(zip(self.owners, self.tokens.tolist(), strict=True)):
            if request is not None and not request.finished:
                yield slot, request, token


class Engine:
    """A model, a cache, and the requests that share them."""

    def __init__(
        self,
        model: GPT,
        requests: Sequence[Request],
        sampling: Sampling,
        *,
        slots: int = 1,
        dtype: torch.dtype = torch.float32,
        row: int | None = None,
    ) -> None:
        """Check the requests, and make room for them.

        slots  sequences at a time; on a CPU no more than there are requests
        dtype  of the matrix products and of the cache; what autocast leaves in fp32 stays so
        row    the fewest tokens of a prefill; 0: each prompt alone, as always where a layer has a mixer. None: 4,096 on
               a GPU, 0 on a CPU

        Raises GenerationError for prompts that do not fit the model, and for a cache that does not fit the device.
        """
        check_requests(requests, model.seq_len)
        device = model.wte.weight.device
        if device.type == "cpu":
            slots = min(slots, len(requests))
        self.requests, self.slots, self.seq_len = requests, slots, model.seq_len
        self.window = None if model.config.positions is Positions.learned else longest_window(model.scores)
        self.cached = decoding_attention(model, device) is not None
        self.cached_tokens = {request: self.tokens_to_cache(request) for request in requests}
        pages = [pages_of(count, self.window) for count in self.cached_tokens.values()]
        longest = max(self.cached_tokens.values())
        contiguous = slots == 1 and longest <= self.seq_len
        size = CacheSize(slots, longest, None if contiguous else sum(nlargest(slots, pages)))
        limit = max(request.limit for request in requests)
        noise_rows = min(limit, NOISE_ROWS) if slots == 1 else limit
        check_memory(size, pages, noise_rows if sampling.temperature else 0, model, dtype, device)
        self.ahead = int(device.type == "cuda")  # launches whose tokens the host has not read
        if row is None:
            row = ROW if device.type == "cuda" and slots > 1 and "documents" in model.attend.supports else 0
        if model.config.mixers:  # their states are those behind a row's last token
            row = 0
        self.row = row and max(row, *(padded(len(request.prompt)) for request in requests))
        self.steps = Steps(model, sampling, size, noise_rows, dtype)
        self.owners: list[Request | None] = [None] * slots  # the request that each slot belongs to

    def tokens_to_cache(self, request: Request) -> int:
        """The most tokens of a sequence that the cache holds: all but the last one, which no query sees."""
        tokens = len(request.prompt) + (max(request.limit, 1) - 1 if self.cached else 0)
        return tokens if self.window is not None else min(tokens, self.seq_len)

    def tokens_decoded(self, request: Request) -> int:
        """Number of a request's tokens that are computed with the cache."""
        return min(request.limit, self.cached_tokens[request] - len(request.prompt) + 1)

    def run(self) -> Iterator[tuple[Request, int]]:
        """Yield each request with its next token, which `tokens` has by then; `finished` says whether it was the last.

        To run again, empty each request's `tokens` and unset `finished`.
        """
        waiting = deque(request for request in self.requests if request.limit > 0)
        cut_off: list[Request] = []  # at the model's last position
        computed = dict.fromkeys(self.requests, 0)  # tokens whose computation was launched
        launched: deque[Launched] = deque()
        while waiting or any(self.owners) or launched:
            if new := self.admit(waiting):
                self.steps.prefill(lay_out({slot: x.prompt for slot, x in new.items()}, self.slots, self.row))
                launched.append(Launched([new.get(slot) for slot in range(self.slots)], *self.steps.copy_to_host()))
            elif any(self.owners):
                self.steps.decode(1 + max(computed[owner] for owner in self.owners if owner))
                launched.append(Launched(list(self.owners), *self.steps.copy_to_host()))
            if any(self.owners):
                for slot, request in enumerate(launched[-1].owners):
                    if request is not None:
                        computed[request] += 1
                        if computed[request] == self.tokens_decoded(request):
                            self.leave(slot)
            # A GPU has its next work before the host waits for the previous one.
            while len(launched) > (self.ahead if any(self.owners) else 0):
                for slot, request, token in launched.popleft().read():
                    yield self.add(request, token)
                    if request.finished and self.owners[slot] is request:
                        self.leave(slot)
                    elif not request.finished and len(request.tokens) == self.tokens_decoded(request):
                        cut_off.append(request)
        for request in cut_off:
            while not request.finished:
                yield self.add(request, self.from_scratch(request))

    def add(self, request: Request, token: int) -> tuple[Request, int]:
        """Give a request its next token."""
        request.tokens.append(token)
        request.finished |= len(request.tokens) == request.limit
        return request, token

    def admit(self, waiting: deque[Request]) -> dict[int, Request]:
        """Give free slots and pages to waiting prompts, in order, while the row has room: slot -> request."""
        new: dict[int, Request] = {}
        room = self.row
        for slot in range(self.slots):
            if self.owners[slot] is not None or not waiting:
                continue
            P = len(waiting[0].prompt)
            if new and (self.row == 0 or padded(P) > room):
                break
            if not self.steps.cache.reserve(slot, P, self.cached_tokens[waiting[0]], self.window):
                break
            self.owners[slot] = new[slot] = waiting.popleft()
            self.steps.begin_stream(slot, new[slot].stream)
            room -= padded(P)
        if new:
            self.update_active()
        return new

    def leave(self, slot: int) -> None:
        """Free a slot. Work launched before still uses its pages, and ends before any later work begins."""
        self.owners[slot] = None
        self.steps.cache.release(slot)
        self.update_active()

    def update_active(self) -> None:
        """Update the device's list of active slots."""
        self.steps.set_active([owner is not None for owner in self.owners])

    def from_scratch(self, request: Request) -> int:
        """The next token, computed from the last seq_len."""
        tokens = [*request.prompt, *request.tokens][-self.seq_len :]
        return self.steps.from_scratch(torch.tensor([tokens]), len(request.tokens), request.stream)


def generate(
    model: GPT, prompt: Sequence[int], limit: int, sampling: Sampling, dtype: torch.dtype = torch.float32
) -> Iterator[int]:
    """Continue one prompt by `limit` tokens, one at a time; see Engine for the arguments and errors."""
    engine = Engine(model, [Request(list(prompt), limit)], sampling, dtype=dtype)
    return (token for _, token in engine.run())


def check_requests(requests: Sequence[Request], seq_len: int) -> None:
    """Raise GenerationError for the first prompt that a model of seq_len tokens cannot continue, or for none."""
    if not requests:
        raise GenerationError("There are no prompts; give at least one.")
    for number, request in enumerate(requests, 1):
        name = f"Prompt {number}" if len(requests) > 1 else "The prompt"
        if not request.prompt:
            raise GenerationError(f"{name} has no tokens; give at least one.")
        if len(request.prompt) > seq_len:
            raise GenerationError(
                f"{name} has {len(request.prompt)} tokens, and the model sees seq_len={seq_len}; shorten it."
            )


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
