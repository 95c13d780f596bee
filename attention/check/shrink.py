"""The smallest case that still fails."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from .cases import Case

LENGTHS = sorted({2**n + d for n in range(8) for d in (-1, 0, 1)} - {0})
FEATURES: tuple[str, ...] = ("documents", "bias", "sinks", "alibi", "soft_cap", "window", "mask", "pattern", "scale")
FEATURES += ("memory", "trend", "size", "rows", "shift")
HEAD_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


def smallest(case: Case, fails: Callable[[Case], bool], seconds: float = 5.0) -> Case:
    """The smallest case that still fails and can be reached from `case` by one simplification after another.

    fails    whether a case fails
    seconds  after which no more cases are tried
    """
    stop, right = time.monotonic() + seconds, set[Case]()
    while time.monotonic() < stop:
        for simpler in simplifications(case):
            if time.monotonic() > stop:
                return case
            if simpler in right:
                continue
            if fails(simpler):
                case = simpler
                break
            right.add(simpler)
        else:
            return case
    return case


def simplifications(case: Case) -> Iterator[Case]:
    """Simpler cases; those that remove most come first."""
    for name in FEATURES:
        if getattr(case, name) != getattr(Case, name):
            yield replace(case, **{name: getattr(Case, name)})
    if case.B > 1:
        yield replace(case, B=1)
    for H, H_kv in ((1, 1), (2, 2), (2, 1)):
        if case.H > H:
            yield replace(case, H=H, H_kv=H_kv)
    if case.window is not None:
        yield from (replace(case, window=n) for n in (1, 2, 4, 8, 16, 32) if n < case.window)
    if case.spread != 1:
        yield replace(case, spread=1.0)
    for D in HEAD_SIZES:
        if case.D > D:
            yield replace(case, D=D)
    if case.documents:
        yield from fewer_documents(case)
        return
    if case.T == case.S:
        yield from (replace(case, T=n, S=n) for n in shorter(case.T))
        return
    yield from (replace(case, T=n) for n in shorter(case.T))
    yield from (replace(case, S=n) for n in shorter(case.S))


def shorter(length: int) -> list[int]:
    """Shorter lengths to try: usual ones, and those from which halved steps lead to the smallest."""
    return [n for n in (*LENGTHS, *(length - 2**k for k in range(6, -1, -1))) if 0 < n < length]


def fewer_documents(case: Case) -> Iterator[Case]:
    """Without one of the documents, or with a shorter one."""
    for n, length in enumerate(case.documents):
        for shorter in (0, 1, 2, length // 2, length - 1):
            lengths = (*case.documents[:n], *((shorter,) if shorter else ()), *case.documents[n + 1 :])
            if shorter < length and lengths:
                yield replace(case, documents=lengths, T=sum(lengths), S=sum(lengths))
