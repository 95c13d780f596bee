"""torch's FlexAttention, compiled: the comparison for windows, documents, biases, caps and sinks.

Its mask and score functions, and the block masks that skip invisible tiles, come from the same Score and Layout that
the other implementations read. It has no dropout, and no backward pass on a CPU.

Dong et al. 2024, "Flex Attention: A Programming Model for Generating Optimized Attention Kernels".
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from ..errors import Option, UnsupportedAttention, listed, no_dropout
from ..formula.call import visible_distances
from ..formula.evaluate import ProgramInputs, full_index, run
from ..interface import FEATURES, Attention, AttentionOutput, AttentionShape, Call
from ..layout import Layout
from ..options import AttentionConfig
from ..score import Score
from ..scores.sinks import join_sinks
from ..tensors import version

Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # of sequence, head, query and key

MASKS_KEPT = 16


class FlexAttention(Attention):
    """Attention by torch's compiler, for a CUDA GPU. Caches the most recent block masks."""

    name = "flex"
    supports = FEATURES - {"cache"}
    exact = True

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        if config.dropout > 0:
            raise no_dropout("flex", config.dropout)
        self.aux = AuxRequest(lse=True)
        self.compiled = torch.compile(flex_attention, dynamic=False)
        # Keys: the tensor of documents, its version (it may change in place), and the other properties of a mask.
        self.block_masks: dict[tuple, tuple[Tensor | None, object, BlockMask]] = {}

    def check(self, shape: AttentionShape) -> None:
        super().check(shape)
        if shape.device.type == "cpu" and shape.training:
            raise no_backward_on_a_cpu()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> AttentionOutput:
        on_cpu = q.device.type == "cpu"
        if on_cpu and torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
            raise no_backward_on_a_cpu()
        (T, S), score, layout = (q.shape[2], k.shape[2]), call.spec.score, call.layout
        # On a CPU compiling would take longer than it saves.
        attend: Callable[..., Any] = flex_attention if on_cpu else self.compiled
        out, aux = attend(
            q,
            k,
            v,
            score_mod=score_function(call, T, S),
            block_mask=self.block_mask(score, layout, q.shape[0], T, S, q.device),
            scale=call.spec.scale,
            enable_gqa=q.shape[1] != k.shape[1],
            return_aux=self.aux,
        )
        lse = aux.lse
        if score.sinks:
            out, lse = join_sinks(out, lse, call.tensors["sinks"])
        return AttentionOutput(out, lse)

    def block_mask(
        self, score: Score, layout: Layout, B: int, T: int, S: int, device: torch.device
    ) -> BlockMask | None:
        """The blocks to visit, built again only when documents or sizes have changed; None: all."""
        mask = mask_function(score, layout, T, S)
        if mask is None:
            return None
        starts = layout.document_starts
        rows = None if starts is None else B
        create = partial(create_block_mask, mask, rows, None, T, S, device=device)
        if torch.compiler.is_compiling():
            return create()
        key = (score, layout.query_start(T, S), layout.k_start, rows, T, S, device)
        latest = version(starts)
        cached = self.block_masks.pop(key, None)
        if cached is None or cached[0] is not starts or cached[1] != latest:
            cached = (starts, latest, create())
        self.block_masks[key] = cached
        if len(self.block_masks) > MASKS_KEPT:
            del self.block_masks[next(iter(self.block_masks))]
        return cached[2]


def no_backward_on_a_cpu() -> UnsupportedAttention:
    """The refusal of a training call on a CPU."""
    template, names = listed(["tiled", "sdpa"])
    sentence = f"{{}} has no backward pass on a CPU; choose {template}, or a GPU."
    return UnsupportedAttention(sentence, Option("attention", "flex"), *names)


def mask_function(score: Score, layout: Layout, T: int, S: int) -> Mask | None:
    """A function: whether query i of sequence b sees key j; None where every query sees every key."""
    q_start, k_start, starts = layout.query_start(T, S), layout.k_start, layout.document_starts
    if not score.causal and starts is None:
        return None

    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        query, key = i + q_start, j + k_start
        seen = key <= query if score.causal else j >= 0
        if score.window is not None:
            seen = seen & (key > query - score.window)
        if starts is not None:  # a document's start identifies it; before the row there is none
            seen = seen & (query >= 0) & (starts[b, query.clamp(min=0)] == starts[b, key])
        return seen

    return mask


def score_function(call: Call, T: int, S: int) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] | None:
    """A function: the changed score of query i and key j in head h; None where scores do not change."""
    layout, steps = call.layout, call.spec.score.steps()
    if steps is None or steps.is_identity:
        return None
    first, low = layout.query_start(T, S), visible_distances(call.spec.score, layout, T, S)[0]
    hoisted, tables = call.formula[: len(steps.hoisted)], call.formula[len(steps.hoisted) :]

    def change(s: Tensor, b: Tensor, h: Tensor, t: Tensor, c: Tensor) -> Tensor:
        i, j = t + first, c + layout.k_start
        places = {"head": 0 * t, "row": t, "column": c}
        inputs = ProgramInputs({"s": s, "i": i, "j": j, "h": h, "b": b}, s.dtype, [], [])
        for (stage, *_), x in zip(steps.hoisted, hoisted, strict=True):
            place = places[stage] if stage in places else (i - j - low).clamp(0, x.shape[-1] - 1)
            at = (t, c) if stage == "pair" else (place,)
            inputs.hoisted.append(x[(b if x.shape[0] > 1 else 0 * b, h if x.shape[1] > 1 else 0 * h, *at)])
        for (_, index), x in zip(steps.tables, tables, strict=True):
            inputs.tables.append(x[tuple(full_index(x, run(index, inputs), b))].to(s.dtype))
        return run(steps.value, inputs)[0]

    return change
