"""The base class of a `Score`'s options; each option is a file of this folder."""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..formula.graph import Node


class HeadTensor(NamedTuple):
    """A tensor (H,) that an option needs: one number for each query head.

    initial  its numbers, or a learned tensor's first ones, for H heads on a device
    learned  whether it is a parameter of a model; a call then has to give it
    """

    name: str
    initial: Callable[[int, torch.device | str | None], Tensor]
    learned: bool


class Recognised(NamedTuple):
    """An option that a formula computes: its value, the score before it, and the formula's names of its tensors."""

    value: Any
    before: Node
    tensors: dict[str, str]


class ScoreOption:
    """An option of `Score`, which is off at its default. A subclass holds all that depends on the option.

    Implementations compute an option that changes scores as a formula, so that a new one changes no other file but
    `Score`, which has its field.

    name        of the field and of the feature
    type        of the value, and `words` for it in refusals
    looks_back  whether it needs causal=True
    is_formula  whether it changes scores, see `formula`
    in_kernels  whether the subclass's file has Triton code for attention=flash, which else computes the formula, and
                refuses an option without one
    tensor      that a call needs for it
    """

    name: ClassVar[str]
    type: ClassVar[Any] = bool
    words: ClassVar[str] = "true or false"
    default: ClassVar[Any] = False
    looks_back: ClassVar[bool] = False
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
