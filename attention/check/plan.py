"""The order of a check's calls, fitted to its time by the calls that it has measured."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

from .cases import Case

FIRST = 4  # calls, after which the rest is planned; and again whenever their number has doubled
COSTLY = 10.0  # times the mean that there is time for
SHOWN = 6  # values that are listed


class Planned(NamedTuple):
    """A call to make. `turn` counts the precisions of its case, and `place` the calls."""

    turn: int
    place: int
    group: str
    case: Case


def work(case: Case) -> int:
    """A number to which the time of a call grows in proportion: its scores, times what is computed for each."""
    return case.B * case.H * case.T * case.S * (case.D + 64)


class Plan:
    """All cases in every precision, those first that tell most in the time.

    Each case comes in one precision before any comes in a second, and each group is about equally far at any time.
    Where the measured calls show that there is no time for all, the costliest cases come last.

    cases    group -> cases
    dtypes   names in cases.DTYPES
    seed     of the order
    one_of   take one call of so many
    workers  calls that are made at the same time
    """

    def __init__(
        self, cases: dict[str, list[Case]], dtypes: Sequence[str], seed: int, one_of: int = 1, workers: int = 1
    ) -> None:
        draws, order = random.Random(seed), []
        for group, its in cases.items():
            its = draws.sample(its, len(its))
            every = [
                (turn, (n + 0.5) / len(its), group, replace(case, dtype=dtypes[(n + turn) % len(dtypes)]))
                for turn in range(len(dtypes))
                for n, case in enumerate(its)
            ]
            order += every[: -(-len(every) // one_of)]
        order.sort(key=lambda x: x[:2])
        self.todo = [Planned(turn, place, group, case) for place, (turn, _, group, case) in enumerate(order)]
        self.tried: list[Planned] = []
        self.times: list[tuple[int, float]] = []  # work and seconds of each call
        self.slope = self.constant = 0.0  # seconds for a unit of work, and of a call without any
        self.workers, self.n_next = workers, FIRST

    def take(self, left: float) -> Planned | None:
        """The next call; None where there is none that ends within `left` seconds."""
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
        """Take the time of a call that was made."""
        self.times.append((work(planned.case), seconds))
        self.tried.append(planned)

    def give_up(self, memory: str) -> int:
        """Leave out the calls with tensors that lie so in memory; returns their number."""
        before = len(self.todo)
        self.todo = [planned for planned in self.todo if planned.case.memory != memory]
        return before - len(self.todo)

    def expected(self, case: Case) -> float:
        """Seconds that a call is expected to take; 0 before the first are measured."""
        return self.constant + self.slope * work(case)

    def fit(self, left: float) -> None:
        """Put the costly calls last where the measured times show that `left` seconds are too few for all.

        Of each turn those are costly without which the others fit. Where that would leave out nearly all, they are
        those that take several times as long as the mean that there is time for; chance decides among the others.
        """
        ordered = sorted(self.times)  # by work; the line through the medians of both halves
        halves = ordered[: len(ordered) // 2], ordered[len(ordered) // 2 :]
        (w0, t0), (w1, t1) = ([statistics.median(column) for column in zip(*half, strict=True)] for half in halves)
        self.slope = max((t1 - t0) / max(w1 - w0, 1), 0.0)
        self.constant = max(t0 - self.slope * w0, 0.0)
        late: set[int] = set()
        for turn in sorted({planned.turn for planned in self.todo}):
            its = sorted((self.expected(x.case), x.place) for x in self.todo if x.turn == turn)
            mean, spent = left / len(its), 0.0
            for cost, place in its:
                if spent + cost > left and cost > COSTLY * mean:
                    late.add(place)
                else:
                    spent += cost
            left = max(left - spent, 0.0)
        self.todo.sort(key=lambda x: (x.place in late, x.place))

    def left_out(self, group: str) -> str:
        """In words: how many calls of a group were not made, and values that none had which was made."""
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
    """Values in words, all of them where they are few."""
    words = ["+".join(map(str, x)) if isinstance(x, tuple) else str(x) for x in values]
    if len(values) > SHOWN:
        return f"{words[0]} to {words[-1]} ({len(values)} values)"
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
