"""The order of a check's calls."""

import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from .cases import Case

SHOWN = 6  # the most values that are listed
COSTLY = 3.0  # a call is costly if it has so many times the mean number of operations


class Planned(NamedTuple):
    """A call to make."""

    group: str
    case: Case


def work(case: Case) -> int:
    """A number proportional to the time of a call: its number of scores, times the operations for each."""
    return case.B * case.H * case.T * case.S * (case.D + 64)


class Plan:
    """All cases in every precision, in an order that tells most in the time.

    Every case comes in one precision before any case comes in a second one, and all groups progress equally. Among the
    calls in the nth precision of their case, the costly ones come last.

    cases   group -> cases
    dtypes  names in cases.DTYPES
    seed    of the order
    one_of  take one call of so many
    """

    def __init__(self, cases: dict[str, list[Case]], dtypes: Sequence[str], seed: int, one_of: int = 1) -> None:
        draws, order = random.Random(seed), []
        for group, its in cases.items():
            its = draws.sample(its, len(its))
            every = [
                (nth, (n + 0.5) / len(its), group, replace(case, dtype=dtypes[(n + nth) % len(dtypes)]))
                for nth in range(len(dtypes))
                for n, case in enumerate(its)
            ]
            order += every[: -(-len(every) // one_of)]
        costly = COSTLY * statistics.fmean([work(case) for *_, case in order] or [0])
        order.sort(key=lambda x: (x[0], work(x[3]) > costly, x[1]))
        self.todo = [Planned(group, case) for _, _, group, case in order]
        self.tried: list[Planned] = []

    def give_up(self, memory: str) -> int:
        """Leave out the calls with this memory layout; returns their number."""
        before = len(self.todo)
        self.todo = [planned for planned in self.todo if planned.case.memory != memory]
        return before - len(self.todo)

    def left_out(self, group: str) -> str:
        """In words: the number of calls of a group that were not made, and the values that no other call had."""
        left, tried = ([x.case for x in planned if x.group == group] for planned in (self.todo, self.tried))
        if not left:
            return ""
        missing: dict[str, list[Any]] = {}
        for name in Case.__dataclass_fields__:
            values = {getattr(case, name) for case in left} - {getattr(case, name) for case in tried}
            if name != "seed" and values and not (name == "S" and set(missing.get("T", ())) == values):
                missing[name] = sorted(values, key=lambda x: (x is None, x))
        words = [f"{name} {listed(values)}" for name, values in missing.items()]
        return f"no time for {len(left):,} more" + (f", so for none with {'; '.join(words)}" if words else "")


def listed(values: Sequence[Any]) -> str:
    """Values in words: all of them, or the first and the last where there are many."""
    words = ["+".join(map(str, x)) if isinstance(x, tuple) else str(x) for x in values]
    if len(values) > SHOWN:
        return f"{words[0]} to {words[-1]} ({len(values)} values)"
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
