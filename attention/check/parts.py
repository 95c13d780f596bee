"""The parts of a check other than accuracy, as jobs. Each gives lines of the report."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from . import behaviour, dropout, system
from .cases import Case
from .run import Line, Session, failed
from .workers import Ended, Job

OF_SOFTMAX = ("NaN and infinity", "without gradients", "autocast", "dropout")  # no faults of another function
LATEST = 0.6  # the share of the time after which these parts start no more calls


class Part(NamedTuple):
    """A part of a check: the section of its lines in the report, and the function that gives one line or several."""

    section: str
    run: Callable[[Session], Line | Iterable[Line]]


PARTS = {
    name: Part(section, run)
    for section, checks in (
        (behaviour.SECTION, behaviour.CHECKS),
        (dropout.SECTION, {"dropout": dropout.dropout}),
        (system.SECTION, system.CHECKS),
    )
    for name, run in checks.items()
}


class Parts:
    """The jobs of all parts, and their lines of the report.

    workers  the number of processes that run the jobs. A single process divides the time among the parts, of which
             those with most calls come last.
    """

    def __init__(self, session: Session, workers: int) -> None:
        self.stop = session.started + LATEST * (session.deadline - session.started)
        self.todo = list(PARTS) if workers > 1 else list(reversed(PARTS))
        self.workers = workers
        self.lines: dict[str, list[Line]] = {}

    def jobs(self) -> Iterator[Job]:
        """A job for each part."""
        for n, name in enumerate(self.todo):
            now, share = time.monotonic(), 1 / (len(self.todo) - n)
            deadline = self.stop if self.workers > 1 else now + share * (self.stop - now)
            yield partial(run_part, name=name, deadline=deadline)

    def done(self, job: Job, result: list[Line] | Ended) -> None:
        """Record the result of a job."""
        name = job.keywords["name"]
        if isinstance(result, Ended):
            left = Line(name, "skip", "no time was left")
            result = [failed(name, f"a call ends its process: {result.why}", Case()) if result.why else left]
        self.lines[name] = [replace(line, section=PARTS[name].section) for line in result]

    def report(self) -> list[Line]:
        """The lines of all parts, in the order of the report."""
        return [line for name in PARTS for line in self.lines.get(name, ())]


def run_part(session: Session, name: str, deadline: float) -> list[Line]:
    """The lines of a part. Its last call starts before the deadline."""
    session = replace(session, deadline=deadline)
    session.progress(name, 0.0)
    if name in OF_SOFTMAX and session.subject.standard() is not None:
        return [Line(name, "skip", "judges softmax attention alone")]
    made = PARTS[name].run(session)
    return [made] if isinstance(made, Line) else list(made)
