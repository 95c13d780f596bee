"""The function that attention computes: which keys a query sees, and how scores are changed.

A Score is fixed for a layer, and kernels are compiled for it; a Layout (layout.py) comes with a batch. What depends on
one option of a score is in its file in attention/scores/. The visible keys of a query are always one interval, also
when options are combined. `key_intervals` computes it; masks, the tiles to visit and the rows that see nothing all
follow from it.

    s = formula(scale q k^T, i, j, ...)          i and j are positions; attention/formula reads formulas
    p = softmax of s over the visible keys
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .errors import Option, ScoreError
from .formula.hoist import Steps, steps_of
from .formula.rules import check
from .formula.trace import trace
from .layout import Layout
from .scores import OPTIONS, HeadTensor, ScoreOption

Range = tuple[int, int]  # start, stop


@dataclass(frozen=True)
class Score:
    """The visible keys and the changes of scores in one layer. Hashable.

    causal    a query sees no key after its position
    window    keys a query sees, itself included; None: all
    soft_cap  c in c tanh(s / c), which keeps scores between -c and c; None: no cap
    alibi     subtract slope_h (i - j) from the score of query i and key j
    sinks     a learned logit for each head joins the softmax's sum
    formula   the changed score, instead of an option that changes it: text such as "s - slope[h] * (i - j)", in the
              language of attention/formula/, or a Python function of s, i, j, h, n and tensors. None: s

    Numbers may be NumPy's, or tensors without axes. Raises ScoreError. It also has

    values        of the fields above
    options       the ones that are on, with their values
    head_tensors  the tensors (H,) that they need, besides those of a formula
    expression    the formula of the score, also where it comes from an option; None where the score is s
    """

    causal: bool = True
    window: int | None = None
    soft_cap: float | None = None
    alibi: bool = False
    sinks: bool = False
    formula: str | Callable[..., Any] | None = None

    # Attributes, not properties: torch.compile treats a Score as a constant, and calls none of its methods.
    values: tuple[Any, ...] = field(init=False, repr=False, compare=False)
    options: tuple[tuple[ScoreOption, Any], ...] = field(init=False, repr=False, compare=False)
    head_tensors: tuple[HeadTensor, ...] = field(init=False, repr=False, compare=False)
    expression: str | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the fields, and set the attributes that follow from them."""
        for name in NAMES:
            value = getattr(self, name)
            is_number = hasattr(value, "item") and getattr(value, "ndim", None) == 0  # of NumPy's or torch's
            self._set(name, value.item() if is_number else value)
        formula = trace(self.formula) if callable(self.formula) else self.formula
        self._set("formula", formula)
        check_type("causal", self.causal, bool, "true or false")
        for option in OPTIONS:
            check_type(option.name, getattr(self, option.name), option.type, option.words)
        check_type("formula", self.formula, str | None, "text such as s * log(n)")
        values = ((option, getattr(self, option.name)) for option in OPTIONS)
        options = tuple((option, value) for option, value in values if value is not None and value is not False)
        self._set("values", tuple(getattr(self, name) for name in NAMES))
        self._set("options", options)
        self._set("head_tensors", tuple(option.tensor for option, _ in options if option.tensor is not None))
        self._check_options()
        expression = formula
        for option, value in options:
            if option.is_formula:
                expression = option.formula(value, expression or "s")
        self._set("expression", expression)

    def _set(self, name: str, value: object) -> None:
        """Set a field while the object is made; later it cannot be changed."""
        object.__setattr__(self, name, value)

    def _check_options(self) -> None:
        """Raise ScoreError for values that are not possible, each alone or together."""
        for option, value in self.options:
            option.check(value)
            if option.looks_back and not self.causal:
                named = Option(f"score.{option.name}", value), Option("score.causal", True)
                raise ScoreError("{} looks back from the query; it needs {}.", *named)
        if self.formula is not None:
            for option, value in self.options:
                if option.is_formula:
                    raise ScoreError(
                        "{} and {} both change the score; write the formula of both, or leave one out.",
                        *(Option("score.formula", self.formula), Option(f"score.{option.name}", value)),
                    )
            check(self.formula, self.causal, self.window)

    def steps(self) -> Steps | None:
        """The steps of computing the formula; None where the score is s."""
        return None if self.expression is None else steps_of(self.expression, self.causal, self.window)

    def features(self) -> dict[str, Option]:
        """The features beyond plain causal attention: name -> the option that needs it."""
        asked = {} if self.causal else {"full": Option("score.causal", False)}
        asked |= {option.name: Option(f"score.{option.name}", value) for option, value in self.options}
        if self.formula is not None and (steps := self.steps()) is not None and not steps.is_identity:
            asked["formula"] = Option("score.formula", self.formula)
        return asked

    def tensors(self) -> dict[str, tuple[str, ...]]:
        """The tensors that a call needs for this score, by name, with the meaning of each axis (formula/axes.py).

        An option's tensor is (H,). A formula's tensors can have a batch before their axes.
        """
        steps = self.steps()
        return ({} if steps is None else dict(steps.axes)) | {tensor.name: ("head",) for tensor in self.head_tensors}


NAMES = tuple(option.name for option in fields(Score) if option.init)  # of Score's arguments


def check_type(name: str, value: object, kind: Any, words: str) -> None:
    """Raise ScoreError for a field that has another type. To Python a bool is an int; here it is not."""
    kind = kind | int if isinstance(0.5, kind) else kind  # a whole number is a number
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ScoreError("{} must be {}.", Option(f"score.{name}", value), words)


def take_rows(x: Tensor, rows: tuple[Range, ...], dim: int) -> Tensor:
    """The parts of x that lie at `rows` of a dimension, one after the other; a view where it is one part."""
    parts = [x.narrow(dim, start, stop - start) for start, stop in rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


class KeyIntervals(NamedTuple):
    """The keys that each query sees: from `first` up to, but not including, `end`.

    first, end     (T,) or, with documents or lengths, (B, T) integers
    begins, stops  whether `first` is ever above 0 and `end` ever below the number of keys
    never_empty    whether every query is certain to see a key: one that stands among the keys sees its own position
    """

    first: Tensor
    end: Tensor
    begins: bool
    stops: bool
    never_empty: bool

    def mask(self, rows: Range, columns: Range) -> Tensor | None:
        """True where the query sees the key, (rows, columns) or (B, 1, rows, columns); None where all are seen."""
        j = torch.arange(*columns, device=self.end.device)
        mask = None
        if self.stops:
            mask = j < self.end[..., slice(*rows), None]
        if self.begins:
            after = j >= self.first[..., slice(*rows), None]
            mask = after if mask is None else mask & after
        return mask.unsqueeze(-3) if mask is not None and mask.ndim == 3 else mask

    def fully_masked(self, rows: Range) -> Tensor:
        """True for the queries that see nothing, (rows, 1) or (B, 1, rows, 1)."""
        fully_masked = (self.end <= self.first)[..., slice(*rows), None]
        return fully_masked.unsqueeze(-3) if fully_masked.ndim == 3 else fully_masked

    def meet(self, rows: Range, columns: Range) -> bool:
        """Whether one of the rows sees one of the columns. Reads values."""
        first, end = self.first[..., slice(*rows)], self.end[..., slice(*rows)]
        return bool(((first < columns[1]) & (end > columns[0]) & (first < end)).any())

    def cover(self, rows: Range, columns: Range) -> bool:
        """Whether every row sees every column. Reads values."""
        first, end = self.first[..., slice(*rows)], self.end[..., slice(*rows)]
        return bool(((first <= columns[0]) & (end >= columns[1])).all())


def key_intervals(score: Score, layout: Layout, T: int, S: int, device: torch.device | str) -> KeyIntervals:
    """The keys that each of T queries sees, as indices from 0 to S among the call's keys, whatever their positions."""
    at = layout.own_keys(T, S, device)
    first, end = torch.zeros_like(at), torch.full_like(at, S)
    if layout.lengths is not None:
        end = torch.minimum(end, layout.lengths[:, None])
    if score.causal:
        end = torch.minimum(end, (at + 1).clamp(min=0))
    if score.window is not None:
        first = (at - (score.window - 1)).clamp(min=0)
    if layout.document_starts is not None and layout.document_ends is not None:
        position = at + layout.k_start
        in_row = (position >= 0) & (position < layout.document_starts.shape[1])
        position = torch.where(in_row, position, 0)
        starts = layout.document_starts.to(device)[:, position] - layout.k_start  # (B, T)
        ends = layout.document_ends.to(device)[:, position] - layout.k_start
        # A query before the row's first position, or behind its last one, belongs to no document.
        first, end = torch.maximum(first, starts), torch.minimum(end, torch.where(in_row, ends, 0))
    bounded = layout.document_starts is not None or layout.lengths is not None
    offset = layout.query_start(T, S) - layout.k_start  # of the first query from the first key
    among_keys = layout.lengths is None and offset >= 0 and offset + T <= S
    return KeyIntervals(
        first,
        end,
        begins=layout.document_starts is not None or score.window is not None,
        stops=bounded or score.causal,
        never_empty=S > 0 and (among_keys or not (bounded or score.causal)),
    )


def visible_pairs(score: Score, T: int) -> float:
    """Pairs of a query and a key it sees among T tokens, the diagonal counted half as FLOP formulas do: T^2 / 2."""
    if not score.causal:
        return float(T * T)
    most = min(score.window or T, T)
    return most * T - most**2 / 2
