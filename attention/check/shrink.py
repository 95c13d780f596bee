"""The smallest case that still fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from .cases import Case

LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 47, 48, 49, 63, 64, 65, 96, 97, 127, 128, 129)
HEAD_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


def smallest(case: Case, fails: Callable[[Case], bool], seconds: float = 5.0) -> Case:
    """The smallest case that still fails and can be reached from `case` by one simplification after another.

    fails    whether a case fails
    seconds  after which no more cases are tried
    """
    stop = time.monotonic() + seconds
    while time.monotonic() < stop:
        for simpler in simplifications(case):
            if time.monotonic() > stop:
                return case
            if fails(simpler):
                case = simpler
                break
        else:
            return case
    return case


def simplifications(case: Case) -> Iterator[Case]:
    """Simpler cases; those that remove most come first."""
    plain = Case(dtype=case.dtype)
    for name in ("documents", "bias", "sinks", "alibi", "soft_cap", "window", "scale", "memory", "trend", "size"):
        if getattr(case, name) != getattr(plain, name):
            yield replace(case, **{name: getattr(plain, name)})
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
        lengths = (*(n for n in LENGTHS if n < case.T - 1), case.T - 1)
        yield from (replace(case, T=n, S=n) for n in lengths if n > 0)
        return
    for name, length in (("T", case.T), ("S", case.S)):
        lengths = (*(n for n in LENGTHS if n < length - 1), length - 1)
        yield from (replace(case, T=n) if name == "T" else replace(case, S=n) for n in lengths if n > 0)


def fewer_documents(case: Case) -> Iterator[Case]:
    """Without one of the documents, or with a shorter one."""
    for n, length in enumerate(case.documents):
        for shorter in (0, 1, 2, length // 2, length - 1):
            if shorter >= length:
                continue
            lengths = (*case.documents[:n], *((shorter,) if shorter else ()), *case.documents[n + 1 :])
            if lengths:
                yield replace(case, documents=lengths, T=sum(lengths), S=sum(lengths))
