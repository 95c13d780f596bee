"""One sequence over several ranks: an attention that wraps another.

Each rank has the queries, keys and values of a part of every sequence, its `rows`. There are two ways to attend across
ranks:

    heads  All-to-all: a rank gets all rows of some of the heads, attends, and sends the results back. Jacobs et al.
           2023, "DeepSpeed Ulysses". Needs heads that the ranks can share evenly.
    keys   Every rank gets all keys and values, and attends with its own queries. A sequence is cut into 2 W parts, and
           rank r of W has the r-th part and the r-th from the end, so that causal work is shared evenly.

Dropout keys hold the place of a rank's part in the whole call, so masks are the same as in one process.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

# torch.compile traces the functional collectives only; their module has no public name yet.
from torch.distributed import _functional_collectives as collectives

from attention.dropout import moved
from attention.errors import Option, UnsupportedAttention
from attention.formula.axes import from_head
from attention.interface import Attention, AttentionOutput, AttentionShape, Call
from attention.precision import accum_dtype
from attention.score import Range, Score

# Its name from torch 2.13 on, else the earlier one.
all_gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor

ROWS_MULTIPLE = 16  # where a part may start: dropout's counters number rows in groups of 16


class ContextBy(Enum):
    """The tensors that ranks exchange to attend to one sequence."""

    heads = "heads"
    keys = "keys"


def shared_by(n_heads: int, n_kv_heads: int, ranks: int) -> ContextBy:
    """What the ranks exchange: heads where they divide evenly, else keys."""
    return ContextBy.heads if n_heads % ranks == 0 and n_kv_heads % ranks == 0 else ContextBy.keys


def rows_of(rank: int, ranks: int, T: int, by: ContextBy) -> tuple[Range, ...]:
    """The positions that a rank has of a sequence of T tokens; T is a multiple of `rows_unit`."""
    if by is ContextBy.heads:
        part = T // ranks
        return ((rank * part, (rank + 1) * part),)
    part = T // (2 * ranks)
    return tuple((i * part, (i + 1) * part) for i in (rank, 2 * ranks - 1 - rank))


def rows_unit(ranks: int, by: ContextBy) -> int:
    """The number that divides every sequence length the ranks can share."""
    return ROWS_MULTIPLE * ranks * (1 if by is ContextBy.heads else 2)


class ContextAttention(Attention):
    """Base of both ways: the interface of the attention they wrap, which supports the same except for `lacks`."""

    by: ClassVar[ContextBy]
    lacks: ClassVar[frozenset[str]]

    def __init__(self, inner: Attention, group: dist.ProcessGroup) -> None:
        self.inner, self.group = inner, group
        self.rank, self.ranks = group.rank(), group.size()
        self.name, self.supports, self.operators = inner.name, inner.supports, inner.operators  # type: ignore[misc]
        self.config, self.dropout, self.options_of_spec = inner.config, inner.dropout, inner.options_of_spec

    def check(self, shape: AttentionShape) -> None:
        self.inner.check(shape)

    def add_score(self, score: Score, n_heads: int) -> None:
        """Get ready for calls with a score, which torch.compile cannot. Raises FormulaError."""

    def prepare(self, q: Tensor, call: Call, S: int) -> tuple[Tensor, Call]:
        """Prepare nothing: the wrapped attention does, where it knows the positions."""
        return q, call

    @abstractmethod
    def shared(self, q: Tensor, k: Tensor, v: Tensor, call: Call, return_lse: bool = False) -> AttentionOutput:
        """q (B, H, T / W, D), k and v (B, H_kv, T / W, D) of this rank's rows."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> AttentionOutput:
        return self.shared(q, k, v, call)

    def lse(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        lse = self.shared(q, k, k, call, return_lse=True).lse
        assert lse is not None
        return lse

    def call_inner(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, score: Score, tensors: Mapping[str, Tensor],
        return_lse: bool, **place: int,
    ) -> AttentionOutput:  # fmt: skip
        """The wrapped attention, with the dropout masks of a `place` in the whole call."""
        key = call.dropout_key
        return self.inner(
            *(q, k, v),
            score=score,
            layout=call.layout,
            scale=call.spec.scale,
            dropout_key=None if key is None else moved(key, **place),
            tensors=tensors,
            return_lse=return_lse,
        )

    def check_features(self, features: Mapping[str, Option]) -> None:
        self.inner.check_features(features)
        for feature, asked_by in features.items():
            if feature in self.lacks:
                raise UnsupportedAttention(
                    f"Ranks that share a sequence by {self.by.value} do not support {{}}; leave it out, or use "
                    "parallel.context=1.",
                    asked_by,
                )


class HeadParallel(ContextAttention):
    """All rows of H / W heads on each of W ranks."""

    by = ContextBy.heads
    lacks = frozenset({"offsets"})  # every rank's rows have positions already

    def __init__(self, inner: Attention, group: dist.ProcessGroup) -> None:
        super().__init__(inner, group)
        self.scores: dict[tuple[Any, ...], Score] = {}  # of this rank's heads, by the values of the whole

    def add_score(self, score: Score, n_heads: int) -> None:
        if score.formula is not None:
            first = self.rank * (n_heads // self.ranks)
            self.scores[score.values] = replace(score, formula=from_head(score.formula, first))

    def shared(self, q: Tensor, k: Tensor, v: Tensor, call: Call, return_lse: bool = False) -> AttentionOutput:
        W, H = self.ranks, q.shape[1]
        heads, kv_heads = H // W, k.shape[1] // W
        B, _, T, D = q.shape
        # To rank r go its heads of q, k and v side by side: (W, B, T / W, heads + 2 kv_heads, D)
        packed = torch.cat([x.unflatten(1, (W, -1)) for x in (q, k, v)], dim=2).permute(1, 0, 3, 2, 4)
        received = exchanged(packed, self.group)  # from rank r its rows
        qkv = received.transpose(0, 1).reshape(B, W * T, heads + 2 * kv_heads, D)
        q, k, v = (x.transpose(1, 2) for x in qkv.split([heads, kv_heads, kv_heads], dim=2))
        score = call.spec.score
        if score.formula is not None and score.values not in self.scores:
            self.add_score(score, H)
        tensors = {name: self._of_heads(x, score.tensors()[name], heads) for name, x in call.tensors.items()}
        of_heads = self.scores.get(score.values, score)
        out, lse = self.call_inner(q, k, v, call, of_heads, tensors, return_lse, first_head=self.rank * heads)
        return AttentionOutput(self._spread(out), None if lse is None else self._spread(lse[..., None])[..., 0])

    def _of_heads(self, x: Tensor, axes: tuple[str, ...], heads: int) -> Tensor:
        """The part of a score's tensor that belongs to this rank's heads."""
        if "head" not in axes:
            return x
        return x.narrow(x.ndim - len(axes) + axes.index("head"), self.rank * heads, heads)

    def _spread(self, out: Tensor) -> Tensor:
        """(B, H / W, T, D) of this rank's heads to (B, H, T / W, D) of its rows."""
        packed = out.unflatten(2, (self.ranks, -1)).permute(2, 0, 3, 1, 4)  # (W, B, T / W, H / W, D)
        received = exchanged(packed, self.group)  # from rank r its heads
        return received.permute(1, 0, 3, 2, 4).flatten(1, 2)


def exchanged(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-to-all: x[r] goes to rank r, and entry r of the result comes from it. Gradients travel the other way."""
    # The operator itself: torch 2.11's all_to_all_single_autograd has an autograd.Function around it, whose tensors
    # stay in memory where a compiled block is recomputed.
    flat, even = x.contiguous().view(len(x), -1), [1] * len(x)
    received = torch.ops._c10d_functional_autograd.all_to_all_single(flat, even, even, group.group_name)
    return collectives.wait_tensor(received).view(x.shape)


class KeyGather(ContextAttention):
    """All keys on every rank, whose rows are two parts of the sequence: see `rows_of`."""

    by = ContextBy.keys
    lacks = frozenset({"offsets", "full"})  # a part attends to the keys up to its end

    def shared(self, q: Tensor, k: Tensor, v: Tensor, call: Call, return_lse: bool = False) -> AttentionOutput:
        part, outputs = q.shape[2] // 2, []
        reaches = [(i + 1) * part for i in (self.rank, 2 * self.ranks - 1 - self.rank)]
        gathered = GatherKeys.apply(torch.stack([k, v]), self.group, *reaches)
        for queries, (keys, values), reach in zip(q.split(part, dim=2), gathered, reaches, strict=True):
            # Queries and keys end at the same position, as they do by default.
            of_call = call, call.spec.score, call.tensors, return_lse
            outputs.append(self.call_inner(queries, keys, values, *of_call, first_query=reach - part))
        lse = torch.cat([o.lse for o in outputs if o.lse is not None], dim=2) if return_lse else None
        return AttentionOutput(torch.cat([o.out for o in outputs], dim=2), lse)


class GatherKeys(torch.autograd.Function):
    """Every rank's keys and values in the order of positions, up to two reaches; their gradients added in fp32."""

    @staticmethod
    def forward(ctx: Any, kv: Tensor, group: dist.ProcessGroup, near: int, far: int) -> tuple[Tensor, Tensor]:
        """kv (2, B, H_kv, T / W, D) to (2, B, H_kv, near, D) and (2, B, H_kv, far, D)."""
        W = group.size()
        ctx.group, ctx.shape, ctx.dtype = group, kv.shape, kv.dtype
        every = collectives.wait_tensor(all_gather(kv.contiguous()[None], 0, group))  # (W, 2, B, H_kv, T / W, D)
        parts = [part for rank in every.unbind() for part in rank.chunk(2, dim=3)]
        order = _positions(W)
        every_row = torch.cat([parts[order.index(i)] for i in range(2 * W)], dim=3)
        # Not `contiguous`, which may return a view: in code that torch 2.11 compiles, a view gets no gradient.
        return every_row[..., :near, :].clone(), every_row[..., :far, :].clone()

    @staticmethod
    def backward(ctx: Any, d_near: Tensor, d_far: Tensor) -> tuple[Tensor, None, None, None]:
        W = ctx.group.size()
        *outer, rows, D = ctx.shape
        total = d_near.new_zeros(*outer, W * rows, D, dtype=accum_dtype(ctx.dtype))
        total[..., : d_far.shape[3], :] += d_far
        total[..., : d_near.shape[3], :] += d_near
        parts = total.chunk(2 * W, dim=3)
        packed = torch.cat([parts[i] for i in _positions(W)], dim=3).unflatten(3, (W, -1)).movedim(3, 0)
        terms = exchanged(packed, ctx.group)
        while len(terms) > 1 and len(terms) % 2 == 0:
            terms = terms[0::2] + terms[1::2]
        return terms.sum(dim=0).to(ctx.dtype), None, None, None


def _positions(ranks: int) -> list[int]:
    """Which of the sequence's 2 W parts the ranks have, one rank after the other."""
    return [i for rank in range(ranks) for i in (rank, 2 * ranks - 1 - rank)]


WRAPPERS: dict[ContextBy, type[HeadParallel] | type[KeyGather]] = {cls.by: cls for cls in (HeadParallel, KeyGather)}
