"""A call as two values: what is known before there are tensors, and the tensors besides q, k and v."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from .score import Score


class Spec(NamedTuple):
    """Everything that fixes a call besides its tensors and their positions: hashable, and text for a custom operator.

    score             what is computed
    scale             of q k^T
    documents         whether there are document bounds
    offsets           whether q_start and k_start are given
    threshold         dropout drops this many of the 256 values of a byte; 0: nothing
    tf32, path, precision, block_q, block_k, ablate  as AttentionConfig has them (tf32 as allow_tf32)
    computed          how many tensors a formula's scores are computed from, see formula/hoist.py
    learned           the numbers of those that need a gradient
    factors           "none", or whether there are factors of s, one for each query, that are "fixed" or "learned"
    slopes            whether ALiBi's slopes need a gradient
    """

    score: Score
    scale: float
    documents: bool = False
    offsets: bool = False
    threshold: int = 0
    tf32: bool = False
    path: str = "auto"
    precision: str = "inputs"
    block_q: int = 64
    block_k: int = 64
    ablate: str = "none"
    computed: int = 0
    learned: tuple[int, ...] = ()
    factors: str = "none"
    slopes: bool = False

    @property
    def bounded(self) -> bool:
        """Whether the keys that a query sees may begin after the first: with a window or documents."""
        return self.documents or self.score.window is not None

    @property
    def learns(self) -> bool:
        """Whether tensors of the scores need a gradient; sinks count always.

        It is a sum of ds = p (dp - delta) over many scores, which nearly cancel along a row. Then the roundings of
        delta = rowsum(do out), of out and of the weights in it, count: their error has one sign for a whole row.
        """
        return bool(self.learned) or self.slopes or self.factors == "learned" or self.score.sinks

    def features(self) -> frozenset[str]:
        """The names of the features that the call asks for."""
        layout = {"documents": self.documents, "offsets": self.offsets}
        return frozenset({*self.score.features(), *(name for name, is_asked in layout.items() if is_asked)})

    def inputs(self) -> tuple[str, ...]:
        """The names of the tensors that a call has besides q, k and v, of those that `Inputs` describes."""
        asked = {
            "key": self.threshold > 0,
            **{tensor.name: tensor.learned or not self.computed for tensor in self.score.head_tensors},
            "starts": self.documents,
            "ends": self.documents,
            "factors": self.factors != "none",
        }
        return tuple(name for name, is_asked in asked.items() if is_asked)

    def text(self) -> str:
        """For a custom operator, whose arguments are tensors, numbers and text; `Spec.read` gives the Spec back.

        torch.compile follows this function. A scale may change from call to call, and torch 2.15 does not follow the
        repr of such a number; torch 2.11 under Python 3.14 leaves out the `!r` of formatted text.
        """
        score = ",".join([repr(value) for value in self.score.values])
        return f"({score}),{self.scale}," + ",".join([repr(value) for value in self[2:]])

    @staticmethod
    @lru_cache(maxsize=4096)
    def read(text: str) -> Spec:
        """The Spec that `text` printed."""
        score, *rest = ast.literal_eval(f"({text})")
        return Spec(Score(*score), *rest)


class Inputs(NamedTuple):
    """The tensors of a call besides q, k and v, each of them None where the call has none; also a kernel's argument.

    key           (7,) int64, as DropoutKey.pack gives it, where dropout drops
    slopes        (H,) fp32, of ALiBi
    sinks         (H,) fp32
    starts, ends  (B, L) int32, contiguous: document_starts and document_ends of Layout
    factors       (B or 1, H or 1, T or 1) fp32: of s, for an implementation that multiplies the queries itself
    horizons      int32, None where not known. Of ALiBi (B, H): keys at that distance or further away have no weight. Of
                  a formula that adds numbers of keys (B, H, tiles of queries, then of keys): for queries the first key
                  with weight for them or later ones, for keys the end of the queries for which they have weight
    formula       a tuple: what a formula's scores are computed from, as `Spec.computed` counts it
    """

    key: Any = None
    slopes: Any = None
    sinks: Any = None
    starts: Any = None
    ends: Any = None
    factors: Any = None
    horizons: Any = None
    formula: Any = None

    @classmethod
    def of(cls, spec: Spec, tensors: Sequence[Tensor]) -> Inputs:
        """From the list of a custom operator: `present` of these inputs."""
        if not tensors:
            return cls()
        formula, rest = tuple(tensors[: spec.computed]), tensors[spec.computed :]
        return cls(**dict(zip((*spec.inputs(), "horizons"), rest, strict=False)), formula=formula or None)

    def present(self) -> list[Tensor]:
        """Those that are there, for a custom operator: the formula's first."""
        return [*(self.formula or ()), *(x for x in self[:-1] if x is not None)]
