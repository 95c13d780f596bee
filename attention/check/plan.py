"""The order of a check's calls, which the times of measured calls adapt to the time that is left."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

from .cases import Case

FIRST = 4  # calls are ordered anew after so many, and again whenever their number has doubled
COSTLY = 10.0  # a call is costly if it takes so many times the mean time that is left for one
SHOWN = 6  # the most values that are listed


class Planned(NamedTuple):
    """A call to make. `nth` counts the precisions of its case from 0, and `place` the calls in their order."""

    nth: int
    place: int
    group: str
    case: Case


def work(case: Case) -> int:
    """A number proportional to the time of a call: its number of scores, times the operations for each."""
    return case.B * case.H * case.T * case.S * (case.D + 64)


class Plan:
    """All cases in every precision, in an order that tells most in the time.

    Every case comes in one precision before any case comes in a second one, and all groups progress equally. Where the
    measured calls show that the time does not suffice for all, the costliest cases come last.

    cases    group -> cases
    dtypes   names in cases.DTYPES
    seed     of the order
    one_of   take one call of so many
    workers  the number of calls that are made at the same time
    """

    def __init__(
        self, cases: dict[str, list[Case]], dtypes: Sequence[str], seed: int, one_of: int = 1, workers: int = 1
    ) -> None:
        draws, order = random.Random(seed), []
        for group, its in cases.items():
            its = draws.sample(its, len(its))
            every = [
                (nth, (n + 0.5) / len(its), group, replace(case, dtype=dtypes[(n + nth) % len(dtypes)]))
                for nth in range(len(dtypes))
                for n, case in enumerate(its)
            ]
            order += every[: -(-len(every) // one_of)]
        order.sort(key=lambda x: x[:2])
        self.todo = [Planned(nth, place, group, case) for place, (nth, _, group, case) in enumerate(order)]
        self.tried: list[Planned] = []
        self.times: list[tuple[int, float]] = []  # work and seconds of each call
        self.slope = self.constant = 0.0  # seconds for a unit of work, and of a call without any
        self.workers, self.n_next = workers, FIRST

    def take(self, left: float) -> Planned | None:
        """The next call; None where no call is expected to end within `left` seconds."""
        if left <= 0:
            return None
        if len(self.times) >= self.n_next:
            self.fit(left * self.workers)
            self.n_next = 2 * len(self.times)
        for n, planned in enumerate(self.todo):
            if self.expected(planned.case) <= left:
                return self.todo.pop(n)
        return None

    def measured(self, planned: Planned, seconds: float) -> None:
        """Record the time of a call."""
        self.times.append((work(planned.case), seconds))
        self.tried.append(planned)

    def give_up(self, memory: str) -> int:
        """Leave out the calls with this memory layout; returns their number."""
        before = len(self.todo)
        self.todo = [planned for planned in self.todo if planned.case.memory != memory]
        return before - len(self.todo)

    def expected(self, case: Case) -> float:
        """Seconds that a call is expected to take; 0 before calls have been measured."""
        return self.constant + self.slope * work(case)

    def fit(self, left: float) -> None:
        """Put the costly calls last where the measured times show that `left` seconds do not suffice for all.

        Among the calls in the nth precision of their case, the costliest are moved until the others fit. A call is only
        moved if it takes several times the mean time that is left for one; chance decides among the others.
        """
        ordered = sorted(self.times)  # by work; a line goes through the medians of both halves
        halves = ordered[: len(ordered) // 2], ordered[len(ordered) // 2 :]
        (w0, t0), (w1, t1) = ([statistics.median(column) for column in zip(*half, strict=True)] for half in halves)
        self.slope = max((t1 - t0) / max(w1 - w0, 1), 0.0)
        self.constant = max(t0 - self.slope * w0, 0.0)
        late: set[int] = set()
        for nth in sorted({planned.nth for planned in self.todo}):
            costs = sorted((self.expected(x.case), x.place) for x in self.todo if x.nth == nth)
            mean, spent = left / len(costs), 0.0
            for cost, place in costs:
                if spent + cost > left and cost > COSTLY * mean:
                    late.add(place)
                else:
                    spent += cost
            left = max(left - spent, 0.0)
        self.todo.sort(key=lambda x: (x.place in late, x.place))

    def left_out(self, group: str) -> str:
        """In words: the number of calls of a group that were not made, and the values that no other call had."""
        left, tried = ([x.case for x in planned if x.group == group] for planned in (self.todo, self.tried))
        if not left:
            return ""
        missing: dict[str, list[Any]] = {}
        for name in (field.name for field in fields(Case) if field.name != "seed"):
            values = {getattr(case, name) for case in left} - {getattr(case, name) for case in tried}
            if values and not (name == "S" and set(missing.get("T", ())) == values):
                missing[name] = sorted(values, key=lambda x: (x is None, x))
        words = [f"{name} {listed(values)}" for name, values in missing.items()]
        return f"no time for {len(left):,} more" + (f", so for none with {'; '.join(words)}" if words else "")


def listed(values: Sequence[Any]) -> str:
    """Values in words: all of them, or the first and the last where there are many."""
    words = ["+".join(map(str, x)) if isinstance(x, tuple) else str(x) for x in values]
    if len(values) > SHOWN:
        return f"{words[0]} to {words[-1]} ({len(values)} values)"
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
