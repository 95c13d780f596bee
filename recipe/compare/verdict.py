"""The verdict on an implementation, and the measurements that it follows from: recipe/compare/parity.py makes them."""

from enum import Enum
from typing import NamedTuple

from recipe.compare.sweeps import Cell
from recipe.training.parity import PARITY_MARGIN


class Outcome(Enum):
    """The possible verdicts."""

    holds = "holds"
    broken = "broken"
    open = "open"


class Gap(Enum):
    """Why something was not measured."""

    own_masks = "it draws other dropout masks (attention.rng=torch)"
    no_probe = "no probe compared it with the reference (parity.every, parity.reference)"
    no_reference = "no run of the reference has its settings"
    single_seed = "the reference ran with one seed, which shows no spread between seeds"
    no_shared_losses = "too few losses share a seed and a step with the reference's"


class Alone(NamedTuple):
    """The worst check of each layer's attention alone with fp64: see recipe/training/parity_layers.py.

    errors     precision -> the largest error, as a share of what rounding explains: the run's, and a higher one, as far
               as something was compared
    step       of the largest, and `where` it is: layer, mode, result and row
    unseen     the parts that could not be compared, with the reasons
    """

    errors: dict[str, float]
    step: int
    where: str
    unseen: tuple[str, ...]

    @property
    def agrees(self) -> bool | None:
        """Whether rounding explains all errors; None where nothing was compared."""
        return max(self.errors.values()) <= 1 if self.errors else None


class Probe(NamedTuple):
    """The worst check at the same weights: its ratio to the reference's rounding, its measure, step and parameter."""

    ratio: float
    measure: str
    step: int
    parameter: str | None

    @property
    def agrees(self) -> bool:
        """Whether the difference is within PARITY_MARGIN."""
        return self.ratio <= PARITY_MARGIN


class Curve(NamedTuple):
    """The largest distance to the reference of the same seed; as a share of the spread between seeds where known."""

    largest: float
    ratio: float | None
    step: int

    @property
    def agrees(self) -> bool | None:
        """Whether the curve stays inside the spread between seeds; None where that is unknown."""
        return None if self.ratio is None else self.ratio < 1


class Final(NamedTuple):
    """The difference of the final losses at the same seed, of the worst seed.

    floor      sum of the reference's rounding over the run; None without a probe
    amplified  whether a difference above the floor began within rounding, and training amplified it
    """

    difference: float
    floor: float | None
    amplified: bool

    @property
    def agrees(self) -> bool | None:
        """Whether rounding explains the difference; None without a probe."""
        return None if self.floor is None else self.difference <= self.floor or self.amplified


class NotFinite(NamedTuple):
    """A loss that is not finite at a step where another run, named by its label, has a finite one."""

    step: int
    seed: int
    other: str


class Verdict(NamedTuple):
    """One implementation against the reference, in one cell of comparable runs."""

    label: str
    cell: Cell
    probe: Probe | None = None
    curve: Curve | None = None
    final: Final | None = None
    not_finite: NotFinite | None = None
    gaps: tuple[Gap, ...] = ()
    alone: Alone | None = None

    @property
    def agreements(self) -> list[bool]:
        """Of the measurements that can decide: whether each agrees with the reference."""
        measured = [one.agrees for one in (self.alone, self.probe, self.curve, self.final) if one is not None]
        return [agrees for agrees in (*measured, None if self.not_finite is None else False) if agrees is not None]

    @property
    def outcome(self) -> Outcome:
        """Broken if one measurement disagrees, open if one is missing, else holds."""
        if not all(self.agreements):
            return Outcome.broken
        return Outcome.open if self.gaps else Outcome.holds
