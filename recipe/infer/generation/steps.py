"""The device's part of generation: prefilling prompts and decoding tokens, on buffers that keep their addresses.

All slots take part in a step, whether or not they hold a sequence, so that the work of a token always has the same
shapes: on a GPU it is one replayed CUDA graph. Only `from_scratch` waits for the device.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from attention import (
    IMPLEMENTATIONS,
    Ablation,
    Attention,
    AttentionConfig,
    Layout,
    ProductPrecision,
    build_attention,
    documents,
)
from attention.gpu import capturing
from model.cache import CacheSize, KVCache, upload
from model.gpt import GPT
from model.positions import position_tables
from recipe.infer.generation.sampling import Noise, Sampling, Stream

ALIGNMENT = 128  # of prompts in a row: the largest tile of keys that a kernel reads
WARMUP_CALLS = 3  # before a CUDA graph is captured, which must not contain compilation


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
        return self._replace(**{name: upload(x, device) for name, x in self._asdict().items() if x is not None})


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


class Steps:
    """A model, a cache, and the state of the sequence in each slot.

    tokens  (slots,) int64, its newest token, which is not in the cache yet
    steps   (slots,) int64, the number of its generated tokens
    active  (slots,) int32, 1 where there is a sequence
    """

    def __init__(
        self, model: GPT, sampling: Sampling, size: CacheSize, noise_rows: int, dtype: torch.dtype = torch.float32
    ) -> None:
        """See Engine for the arguments; noise_rows: of Noise."""
        self.device, self.dtype, self.sampling = model.wte.weight.device, dtype, sampling
        by_column = self.device.type == "cpu" and size.slots == 1
        self.model = copied(model, dtype, by_column)
        self.head = laid_out(model.head.detach().to(dtype), by_column)
        self.decoder = decoding_attention(model, self.device)
        self.cache = KVCache(model.config, size, self.device, dtype)
        self.tables = position_tables(model.config, max(size.longest, model.seq_len)).to(self.device)
        self.noise = None
        if sampling.temperature > 0:
            self.noise = Noise(sampling.seed, model.vocab_size, noise_rows, size.slots, self.device)
        self.tokens, self.steps = (torch.zeros(size.slots, dtype=torch.int64, device=self.device) for _ in range(2))
        self.active = torch.zeros(size.slots, dtype=torch.int32, device=self.device)
        self.graph = self.graphed() if self.device.type == "cuda" and self.decoder is not None else None

    def set_active(self, active: list[bool]) -> None:
        """Set the active slots and the page table on the device, for all later launches."""
        self.cache.publish()
        self.active.copy_(upload(torch.tensor(active, dtype=torch.int32), self.device))

    def begin_stream(self, slot: int, stream: Stream) -> None:
        """Give the next sequence in a slot its stream of random numbers."""
        if self.noise is not None:
            self.noise.begin(slot, stream)

    def draw_noise(self, count: int) -> None:
        """Draw the random numbers for tokens up to number `count` of a sequence."""
        if self.noise is not None:
            self.noise.draw(count)

    @torch.no_grad()
    def prefill(self, row: Row) -> None:
        """Compute the keys, values and first tokens of new prompts. Other sequences do not change."""
        self.draw_noise(1)
        with self.on_device():
            row = row.on(self.device)
            layout = Layout() if row.starts is None else documents(row.starts)
            fresh = row.lengths > 0
            self.cache.lengths.copy_(torch.where(fresh, row.lengths, self.cache.lengths))
            self.steps.masked_fill_(fresh, 0)
            attends = self.cache.prefill(self.model.attend, row.cu_seqlens, fresh)
            with self.autocast():
                hidden = self.model.extend(row.tokens, row.positions, attends, layout, self.tables)[0, row.last]
                picked = self.choose(hidden)  # of (slots, C)
            self.tokens.copy_(torch.where(fresh, picked, self.tokens))
            self.steps.masked_fill_(fresh, 1)

    def decode(self, most: int) -> None:
        """Compute the next token of each sequence, the `most`-th generated one at the latest."""
        self.draw_noise(most)
        with self.on_device():
            self.decode_step() if self.graph is None else self.graph.replay()

    @torch.no_grad()
    def decode_step(self) -> None:
        """The device's part of `decode`. A slot without a sequence keeps length 0, and its token is ignored."""
        assert self.decoder is not None
        lengths = self.cache.lengths
        lengths.add_(1).mul_(self.active)
        positions = (lengths - 1).clamp(min=0).long()[:, None]  # (slots, 1)
        attends = self.cache.decode(self.decoder)
        with self.autocast():
            x = self.model.extend(self.tokens[:, None], positions, attends, Layout(), self.tables)  # (slots, 1, C)
            self.tokens.copy_(self.choose(x[:, 0]))
        self.steps.add_(1)

    @torch.no_grad()
    def from_scratch(self, tokens: Tensor, step: int, stream: Stream) -> int:
        """The token after tokens (1, n), the last `step` of which were generated, once no sequence uses the cache."""
        self.draw_noise(step + 1)
        self.begin_stream(0, stream)
        self.steps.fill_(step)
        with self.on_device(), self.autocast():
            hidden = self.model.hidden(upload(tokens, self.device))[:, -1]  # (1, C)
            return int(self.choose(hidden.expand(len(self.steps), -1))[0])

    def choose(self, hidden: Tensor) -> Tensor:
        """The next tokens (slots,) after hidden (slots, C)."""
        logits = self.model.logits(hidden, self.head)  # (slots, V) in the precision of products
        return self.sampling.pick(logits.float(), None if self.noise is None else self.noise.of(self.steps))

    def copy_to_host(self) -> tuple[Tensor, torch.cuda.Event | None]:
        """The newest tokens for the host and, on a GPU, the event after which they are there."""
        if self.device.type != "cuda":
            return self.tokens.clone(), None
        with self.on_device():
            host = torch.empty(len(self.tokens), dtype=torch.int64, pin_memory=True)
            host.copy_(self.tokens, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        return host, event

    def graphed(self) -> torch.cuda.CUDAGraph:
        """`decode_step` as one CUDA graph, which runs alone. Here it runs a few times, without sequences."""
        with self.on_device():
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARMUP_CALLS):
                    self.decode_step()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # The graph gets a separate workspace for cuBLAS: other code may free the shared one.
            torch._C._cuda_clearCublasWorkspaces()
            with capturing(graph, stream):
                self.decode_step()
            torch._C._cuda_clearCublasWorkspaces()
        return graph

    def on_device(self) -> AbstractContextManager[object]:
        """The engine's GPU as the current one."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def autocast(self) -> torch.autocast:
        """Autocast in the engine's precision, without a cache of casts: the products' weights have this precision."""
        return torch.autocast(
            self.device.type, self.dtype, enabled=self.dtype is not torch.float32, cache_enabled=False
        )


def decoding_attention(model: GPT, device: torch.device) -> Attention | None:
    """The attention that reads the cache: the model's if it supports one, else flash on a GPU and naive on a CPU.

    Its products are in the precision of q, k and v. None where no such attention computes the model's scores, or where
    the scores read tensors of each token: tokens are then computed without a cache.
    """
    attend = model.attend
    ablated = attend.config.ablate is not Ablation.none
    if model.made_tensors() or ablated or ("cache" not in attend.supports and not attend.exact):
        return None
    if "cache" in attend.supports:
        narrow = attend.config.precision is not ProductPrecision.inputs
        return build_attention(replace(attend.config, precision=ProductPrecision.inputs)) if narrow else attend
    asked = {"cache"}.union(*(score.features() for score in model.scores))
    name = "flash" if device.type == "cuda" and asked <= IMPLEMENTATIONS["flash"].supports else "naive"
    return build_attention(AttentionConfig(name))


def copied(model: GPT, dtype: torch.dtype, by_column: bool = False) -> GPT:
    """The model in evaluation mode, with the weights of its matrix products in `dtype`; all else is shared.

    by_column  lay these weights out for products with a single row on a CPU

    It has no second head, and a separate first one stays as it is: `Steps` has a copy of that.
    """
    shared: dict[int, object] = {id(model.attend): model.attend, id(model.further): None}
    unused = set() if model.further is None else set(model.further.modules())
    for module in set(model.modules()) - unused:
        for x in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            narrow = isinstance(module, nn.Linear) and module is not model.lm_head
            weights = laid_out(x.detach().to(dtype), by_column) if narrow else x
            shared[id(x)] = x if weights.data_ptr() == x.data_ptr() else nn.Parameter(weights, requires_grad=False)
    return copy.deepcopy(model, shared).eval()


def laid_out(weight: Tensor, by_column: bool) -> Tensor:
    """The same weight (out, in), column by column if asked to and out > in.

    On a CPU, where memory limits products of GPT-2's size, its product with one row then takes 60 to 75 % of the time.
    """
    wide = weight.ndim == 2 and weight.shape[0] > weight.shape[1]
    return weight.T.contiguous().T if by_column and wide else weight
