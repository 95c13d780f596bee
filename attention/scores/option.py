"""The base class of a `Score`'s options; each option is a file of this folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..formula.graph import Node


class HeadTensor(NamedTuple):
    """A tensor (H,) that an option needs: one number for each query head.

    initial  its numbers, or a learned tensor's first ones, for H heads on a device
    learned  whether it is a parameter of a model; a call then has to give it
    meaning  of one of its numbers
    """

    name: str
    initial: Callable[[int, torch.device | str | None], Tensor]
    learned: bool
    meaning: str


class Recognised(NamedTuple):
    """An option that a formula computes: its value, the score before it, and the formula's names of its tensors."""

    value: Any
    before: Node
    tensors: dict[str, str]


class ScoreOption:
    """An option of `Score`, which is off at its default. A subclass holds all that depends on the option.

    Implementations compute an option that changes scores as a formula, and read from here which keys an option hides,
    so that a new option changes no other file but `Score`, which has its field.

    name        of the field and of the feature
    type        of the value, and `words` for it in refusals
    title       in sentences and tables
    looks_back  whether it needs causal=True
    hides_keys  whether a query sees fewer keys with it, see `first_key`
    is_formula  whether it changes scores, see `formula`
    in_kernels  whether the subclass's file has Triton code for attention=flash, which else computes the formula, and
                refuses an option without one
    tensor      that a call needs for it
    """

    name: ClassVar[str]
    type: ClassVar[Any] = bool
    words: ClassVar[str] = "true or false"
    default: ClassVar[Any] = False
    title: ClassVar[str]
    looks_back: ClassVar[bool] = False
    hides_keys: ClassVar[bool] = False
    is_formula: ClassVar[bool] = False
    in_kernels: ClassVar[bool] = False
    tensor: ClassVar[HeadTensor | None] = None

    def check(self, value: Any) -> None:
        """Raise ScoreError for a value of the right type that is not possible."""

    def formula(self, value: Any, s: str) -> str:
        """The changed score as a formula, for a score that is the expression s."""
        raise NotImplementedError

    def recognised(self, x: Node) -> Recognised | None:
        """The option with the formula x, where a kernel has faster code for it."""
        return None

    def first_key(self, value: Any, query: Any) -> Any:
        """The position of the first key that the query at a position sees, if there is one; integers or tensors."""
        raise NotImplementedError

    def most_keys(self, value: Any) -> int:
        """The most keys that a query sees, for an option that hides keys."""
        raise NotImplementedError
