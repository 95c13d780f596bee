"""Many prompts at a time through one model, token by token, with a cache.

A sequence has a slot from its first token to its last, then the next prompt gets it ("continuous batching": Yu et al.
2022, "Orca"). Prompts come in by a *prefill*: several in one row, as documents of it, that leave their keys and values
in the cache. Then all slots *decode* one token at a time, whether or not they hold a sequence: the work of a token
always has the same shapes. On a GPU it is one replayed CUDA graph, and the host reads tokens while the device computes
the next ones.

A prompt's tokens do not depend on the prompts beside it, up to rounding; with the same number of slots not at all.
Products then have the same shapes, and on a GPU all rows of prompts are as long and each prompt lies alike in the tiles
of attention.

The model's positions end at seq_len. Beyond, no cache helps, as every token has another position after each step: a
token is computed from scratch from the last seq_len tokens. But where positions are rotary and every layer has a
window, sequences just go on, and the pages behind the window serve again.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from heapq import nlargest

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention import IMPLEMENTATIONS, Attention, AttentionConfig, Layout, build_attention, documents
from generation.errors import GenerationError
from generation.memory import check_memory
from generation.sampling import Noise, Sampling
from model.blocks import rotation_table
from model.cache import CacheSize, Decode, KVCache, Prefill, furthest_look, pages_of, upload
from model.config import Positions
from model.gpt import GPT

# Tokens of a prefill on a GPU. Fewer leave it idle; more take memory, and keep running sequences waiting.
ROW = 4096
ALIGNMENT = 128  # of prompts in a row: the largest tile of keys that a kernel reads
WARMUP_CALLS = 3  # before a CUDA graph is captured, which must not contain compilation
NOISE_ROWS = 8  # for a single slot: no other sequence needs the ones before

Owners = list["Request | None"]  # which request each slot belongs to


@dataclass(eq=False)
class Request:
    """A prompt to continue.

    prompt    its tokens, at least one
    limit     tokens to add at most
    tokens    those that have been added
    finished  no more will be. Set it to have none after those received
    """

    prompt: Sequence[int]
    limit: int
    tokens: list[int] = field(default_factory=list)
    finished: bool = False


@dataclass(frozen=True)
class Launched:
    """Tokens (slots,) that the device computes, and for whom; `event` tells when the host can read them."""

    tokens: Tensor
    owners: Owners
    event: torch.cuda.Event | None

    def read(self) -> Iterator[tuple[int, Request, int]]:
        """Slot, request and token, but for requests that have finished in the meantime. Waits for the device."""
        if self.event is not None:
            self.event.synchronize()
        for slot, (request, token) in enumerate(zip(self.owners, self.tokens.tolist(), strict=True)):
            if request is not None and not request.finished:
                yield slot, request, token


class Engine:
    """A model, a cache, and the requests that they serve together."""

    def __init__(
        self,
        model: GPT,
        requests: Sequence[Request],
        sampling: Sampling,
        *,
        slots: int = 1,
        dtype: torch.dtype = torch.float32,
        row: int | None = None,
        compile: bool = False,
    ) -> None:
        """Check the requests, and make room for them.

        slots    sequences at a time
        dtype    of the matrix products and of the cache; what autocast leaves in fp32 stays so
        row      tokens of a prefill at least; 0: each prompt alone. None: 4,096 on a GPU, 0 on a CPU
        compile  the work of a token, by torch.compile, which takes a minute

        Raises GenerationError for prompts that do not fit the model, and for a cache that does not fit the device.
        """
        self.requests, self.sampling, self.slots = requests, sampling, slots
        self.device, self.dtype = model.wte.weight.device, dtype
        self.vocab_size, self.seq_len = model.vocab_size, model.seq_len
        check_requests(requests, model.seq_len)
        rotary = model.config.positions is Positions.rotary
        self.window = furthest_look(model.scores) if rotary else None
        self.kept = {request: self.tokens_kept(request) for request in requests}
        pages = [pages_of(kept, self.window) for kept in self.kept.values()]
        longest = max(self.kept.values())
        contiguous = slots == 1 and longest <= self.seq_len
        size = CacheSize(slots, longest, None if contiguous else sum(nlargest(slots, pages)))
        check_memory(size, pages, model.config, dtype, self.device)

        self.model = copied(model, dtype)
        self.head = model.wte.weight.detach().to(dtype)
        self.decoder = decoding_attention(model.attend, self.device)
        self.cache = KVCache(model.config, size, self.device, dtype)
        self.rotation = None
        if rotary:
            cos, sin = rotation_table(max(longest, self.seq_len), model.config.n_embd // model.config.n_heads)
            self.rotation = (cos.to(self.device), sin.to(self.device))
        if row is None:
            row = ROW if self.device.type == "cuda" and slots > 1 and "documents" in model.attend.supports else 0
        self.row = row and max(row, *(padded(len(request.prompt)) for request in requests))
        self.noise = None
        if sampling.temperature > 0:
            rows = max(request.limit for request in requests)
            rows = min(rows, NOISE_ROWS) if slots == 1 else rows
            self.noise = Noise(sampling.seed, self.vocab_size, rows, self.device)

        # What a captured graph reads and writes.
        self.tokens = torch.zeros(slots, dtype=torch.int64, device=self.device)  # the newest of each sequence
        self.steps = torch.zeros(slots, dtype=torch.int64, device=self.device)  # how many it has added
        self.active = torch.zeros(slots, dtype=torch.int32, device=self.device)  # 1 where there is a sequence
        self.decode: Callable[[], None] = self.decode_step
        if compile:
            # A product with a single row then becomes a reduction that is fused with what surrounds it.
            tuned: dict[str, str | int | bool | Callable] = {"coordinate_descent_tuning": slots == 1}
            self.decode = torch.compile(self.decode_step, dynamic=False, options=tuned)
        if self.device.type == "cuda":
            self.decode = self.graphed(self.decode)

    def tokens_kept(self, request: Request) -> int:
        """How many tokens of a sequence the cache takes. The last one is seen by none."""
        tokens = len(request.prompt) + max(request.limit, 1) - 1
        return tokens if self.window is not None else min(tokens, self.seq_len)

    def tokens_decoded(self, request: Request) -> int:
        """How many of a request's tokens are computed with the cache."""
        return min(request.limit, self.kept[request] - len(request.prompt) + 1)

    def run(self) -> Iterator[tuple[Request, int]]:
        """Each request with its next token, as they come: then its `tokens` have it, and `finished` says if it is over.

        Runs once.
        """
        waiting = deque(request for request in self.requests if request.limit > 0)
        cut_off: list[Request] = []  # at the model's last position
        owners: Owners = [None] * self.slots
        computed = dict.fromkeys(self.requests, 0)  # tokens whose computation was launched
        launched: deque[Launched] = deque()
        while waiting or any(owners) or launched:
            if new := self.admit(waiting, owners):
                launched.append(self.launch_prefill(new))
            elif any(owners):
                launched.append(self.launch_decode(owners, 1 + max(computed[owner] for owner in owners if owner)))
            if any(owners):
                for slot, request in enumerate(launched[-1].owners):
                    if request is not None:
                        computed[request] += 1
                        if computed[request] == self.tokens_decoded(request):
                            self.leave(slot, owners)
            # A GPU has its next work before the host waits for the last.
            while len(launched) > (self.device.type == "cuda" and any(owners)):
                for slot, request, token in launched.popleft().read():
                    yield self.add(request, token)
                    if request.finished and owners[slot] is request:
                        self.leave(slot, owners)
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

    def admit(self, waiting: deque[Request], owners: Owners) -> dict[int, Request]:
        """Give free slots and pages to prompts that wait, in their order, as far as a row has room: slot -> request."""
        new: dict[int, Request] = {}
        room = self.row
        for slot in range(self.slots):
            if owners[slot] is not None or not waiting:
                continue
            P = len(waiting[0].prompt)
            if new and (self.row == 0 or padded(P) > room):
                break
            if not self.cache.reserve(slot, P, self.kept[waiting[0]], self.window):
                break
            owners[slot] = new[slot] = waiting.popleft()
            room -= padded(P)
        if new:
            self.publish(owners)
        return new

    def leave(self, slot: int, owners: Owners) -> None:
        """Free a slot. What was launched before still reads and writes its pages, before anything that comes later."""
        owners[slot] = None
        self.cache.release(slot)
        self.publish(owners)

    def publish(self, owners: Owners) -> None:
        """Tell the device which slots have sequences, and where these are."""
        self.cache.publish()
        active = torch.tensor([owner is not None for owner in owners], dtype=torch.int32)
        self.active.copy_(upload(active, self.device))

    def launch_prefill(self, new: dict[int, Request]) -> Launched:
        """Compute the keys, values and first tokens of prompts that have got slots.

        In a row of several, padding before each prompt makes it end with a tile. It is a document of its own, and the
        cache drops it, as it stands before the sequence's first token.
        """
        spare = max(self.row - sum(padded(len(request.prompt)) for request in new.values()), 0)
        tokens: list[int] = []
        starts: list[int] = []
        positions: list[int] = []
        bounds, last, lengths = [0], [0] * self.slots, [0] * self.slots
        for slot in range(self.slots):
            if slot in new:
                prompt = new[slot].prompt
                padding = spare + -len(prompt) % ALIGNMENT if self.row else 0
                spare = 0
                begin = len(tokens) + padding
                starts += [len(tokens)] * padding + [begin] * len(prompt)
                tokens += [0] * padding + [*prompt]
                positions += [0] * padding + [*range(len(prompt))]
                last[slot], lengths[slot] = len(tokens) - 1, len(prompt)
            bounds.append(len(tokens))
        layout = Layout()
        if self.row:
            layout = documents(upload(torch.tensor([starts], dtype=torch.int32), self.device))
        if self.noise is not None:
            self.noise.draw(1)
        row, places, ends, sizes = (
            upload(torch.tensor(x), self.device) for x in ([tokens], [positions], last, lengths)
        )
        cu_seqlens = upload(torch.tensor(bounds, dtype=torch.int32), self.device)
        self.prefill(row, places, ends, sizes, cu_seqlens, layout)
        return self.launched([new.get(slot) for slot in range(self.slots)])

    @torch.no_grad()
    def prefill(
        self, row: Tensor, positions: Tensor, last: Tensor, lengths: Tensor, cu_seqlens: Tensor, layout: Layout
    ) -> None:
        """The device's part of `launch_prefill`.

        row, positions  (1, n)        all prompts, one after the other
        last            (slots,)      where in the row each new prompt ends
        lengths         (slots,)      of new prompts; else 0
        cu_seqlens      (slots + 1,)  bounds of the prompts, padding included
        """
        fresh = lengths > 0
        self.cache.lengths.copy_(torch.where(fresh, lengths, self.cache.lengths))
        self.steps.masked_fill_(fresh, 0)
        attends = [Prefill(self.model.attend, layer, cu_seqlens) for layer in self.cache.layers]
        with self.on_device(), self.autocast():
            hidden = self.model.extend(row, positions, attends, layout, self.rotation)[0, last]  # (slots, C)
            picked = self.pick(hidden)
        self.tokens.copy_(torch.where(fresh, picked, self.tokens))
        self.steps.masked_fill_(fresh, 1)

    def launch_decode(self, owners: Owners, most: int) -> Launched:
        """Compute the next token of each sequence, which is at most its token number `most`."""
        if self.noise is not None:
            self.noise.draw(most)
        with self.on_device():
            self.decode()
        return self.launched(list(owners))

    @torch.no_grad()
    def decode_step(self) -> None:
        """The device's part of `launch_decode`. Without a sequence, a slot keeps length 0 and computes for nobody."""
        lengths = self.cache.lengths
        lengths.add_(1).mul_(self.active)
        positions = (lengths - 1).clamp(min=0).long()[:, None]  # (slots, 1)
        attends = [Decode(self.decoder, layer) for layer in self.cache.layers]
        with self.autocast():
            hidden = self.model.extend(self.tokens[:, None], positions, attends, Layout(), self.rotation)[:, 0]
            picked = self.pick(hidden)
        self.tokens.copy_(picked)
        self.steps.add_(1)

    def pick(self, hidden: Tensor) -> Tensor:
        """The next tokens (slots,) after hidden (slots, C)."""
        logits = F.linear(hidden, self.head)[:, : self.vocab_size].float()
        noise = None if self.noise is None else self.noise.table[self.steps % len(self.noise.table)]
        return self.sampling.pick(logits, noise)

    def launched(self, owners: Owners) -> Launched:
        """The tokens that are being computed, on their way to the host."""
        if self.device.type != "cuda":
            return Launched(self.tokens.clone(), owners, None)
        with self.on_device():
            host = torch.empty(self.slots, dtype=torch.int64, pin_memory=True)
            host.copy_(self.tokens, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        return Launched(host, owners, event)

    @torch.no_grad()
    def from_scratch(self, request: Request) -> int:
        """The next token, computed from the last seq_len."""
        row = torch.tensor([[*request.prompt, *request.tokens][-self.seq_len :]])
        step = len(request.tokens)
        if self.noise is not None:
            self.noise.draw(step + 1)
        self.steps.fill_(step)
        with self.on_device(), self.autocast():
            hidden = self.model.hidden(upload(row, self.device))[:, -1]  # (1, C)
            return int(self.pick(hidden.expand(self.slots, -1))[0])

    def graphed(self, function: Callable[[], None]) -> Callable[[], None]:
        """The same work as one CUDA graph. It runs here a few times, without sequences."""
        with self.on_device():
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARMUP_CALLS):
                    function()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                function()
        return graph.replay

    def on_device(self) -> AbstractContextManager[object]:
        """The engine's GPU as the current one."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def autocast(self) -> torch.autocast:
        """The engine's precision. The weights of products are in it already, so no casts need to be kept."""
        narrow = self.dtype is not torch.float32
        return torch.autocast(self.device.type, self.dtype, enabled=narrow, cache_enabled=False)


def generate(
    model: GPT, prompt: Sequence[int], limit: int, sampling: Sampling, dtype: torch.dtype = torch.float32
) -> Iterator[int]:
    """Continue one prompt by `limit` tokens, one at a time; see Engine for the arguments and what is raised."""
    engine = Engine(model, [Request(list(prompt), limit)], sampling, dtype=dtype)
    return (token for _, token in engine.run())


def check_requests(requests: Sequence[Request], seq_len: int) -> None:
    """Raise GenerationError for the first prompt that a model of seq_len tokens cannot continue."""
    for number, request in enumerate(requests, 1):
        name = f"Prompt {number}" if len(requests) > 1 else "The prompt"
        if not request.prompt:
            raise GenerationError(f"{name} has no tokens; give at least one.")
        if len(request.prompt) > seq_len:
            raise GenerationError(
                f"{name} has {len(request.prompt)} tokens, and the model sees seq_len={seq_len}; shorten it."
            )


def padded(tokens: int) -> int:
    """The room that a prompt takes in a row with others."""
    return -(-tokens // ALIGNMENT) * ALIGNMENT


def decoding_attention(attend: Attention, device: torch.device) -> Attention:
    """What reads the cache: `attend` or, where it has no way to, flash on a GPU and naive on a CPU."""
    if "cache" in attend.supports:
        return attend
    name = "flash" if device.type == "cuda" and "cache" in IMPLEMENTATIONS["flash"].supports else "naive"
    return build_attention(AttentionConfig(name))


def copied(model: GPT, dtype: torch.dtype) -> GPT:
    """The model in evaluation mode, with the weights of its matrix products in `dtype`; all else is shared."""
    shared: dict[int, object] = {id(model.attend): model.attend}
    for module in model.modules():
        for x in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            cast = isinstance(module, nn.Linear) and x.dtype is not dtype
            shared[id(x)] = nn.Parameter(x.detach().to(dtype), requires_grad=False) if cast else x
    return copy.deepcopy(model, shared).eval()
