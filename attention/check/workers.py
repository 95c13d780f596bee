"""Processes that run the parts of a check side by side, and apart from it: a call that ends its process is a failure.

After an illegal address a CUDA context computes nothing, and a kernel for CPUs may end its process. The part that did
so is reported, and another process takes the next.
"""

from __future__ import annotations

import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from .run import Session, interpreting, short
from .subject import find

GRACE_S = 5.0  # what runs at the deadline has so long to end
Job = partial[Any]  # a module's function of a Session, and its other arguments: it goes to another process


@dataclass(frozen=True)
class Ended:
    """The result of a job that did not end: its process did, or the time was up.

    why  in words; empty where the time was up
    """

    why: str = ""


@dataclass(frozen=True)
class Start:
    """How a process gets its session.

    target, features, style  arguments of `find`
    settings                 of Session, by name
    """

    target: str
    features: tuple[str, ...]
    style: str | None
    settings: dict[str, Any]

    def session(self) -> Session:
        return Session(find(self.target, self.features, self.style), stream=None, **self.settings)


class Here:
    """Runs jobs in this process, one after the other; a call that ends the process ends the check."""

    number = 1

    def __init__(self, session: Session) -> None:
        self.session = session

    def run(self, jobs: Iterator[Job], done: Callable[[Job, Any], None], deadline: float) -> None:
        """As `Workers.run`. A job ends in its own time."""
        for job in jobs:
            done(job, job(self.session))


class Workers:
    """Processes that run jobs. They start at once, and wait for `begin`.

    number                   of processes
    target, features, style  arguments of `find`, with which each finds the implementation
    """

    def __init__(self, number: int, target: str, features: tuple[str, ...] = (), style: str | None = None) -> None:
        self.number, self.named, self.context = number, (target, features, style), get_context("spawn")
        self.start: Start | None = None
        self.session: Session | None = None
        self.idle = [self.another() for _ in range(number)]
        self.busy: dict[Connection, tuple[Any, Job]] = {}  # the process and its job

    def begin(self, session: Session) -> None:
        """Give each process a session like this one."""
        self.session = session
        shared = ("device", "deadline", "seed", "dtypes", "refused", "gradients", "no_gradients", "threads")
        self.start = Start(*self.named, {name: getattr(session, name) for name in shared})
        for _, connection in self.idle:
            connection.send(self.start)

    def another(self) -> tuple[Any, Connection]:
        """A new process and the connection to it."""
        mine, its = self.context.Pipe()
        process = self.context.Process(target=serve, args=(its,), daemon=True)
        process.start()
        its.close()
        if self.start is not None:
            mine.send(self.start)
        return process, mine

    def run(self, jobs: Iterator[Job], done: Callable[[Job, Any], None], deadline: float) -> None:
        """Run jobs until there is none, or until the deadline is past.

        jobs  are taken one by one, whenever a process is idle
        done  receives each job with its result, or with Ended
        """
        while True:
            while len(self.busy) < self.number and (job := next(jobs, None)) is not None:
                process, connection = self.idle.pop() if self.idle else self.another()
                with suppress(OSError):  # where it is gone, reading says so
                    connection.send(job)
                self.busy[connection] = process, job
            if not self.busy:
                return
            if (left := deadline + GRACE_S - time.monotonic()) <= 0:
                break
            ready = wait(list(self.busy), timeout=min(left, 1.0))
            if not ready:
                self.show_progress()
            for connection in [x for x in ready if isinstance(x, Connection)]:
                process, job = self.busy.pop(connection)
                try:
                    result = connection.recv()
                except (EOFError, OSError):
                    process.join()
                    result = Ended(f"the process ended with {status(process.exitcode)}")
                if isinstance(result, Exception):
                    raise result
                if isinstance(result, Ended):
                    connection.close()
                else:
                    self.idle.append((process, connection))
                done(job, result)
        for process, job in self.busy.values():
            process.kill()
            done(job, Ended())
        self.busy.clear()

    def show_progress(self) -> None:
        """Show the parts that are running."""
        names = [job.keywords.get("name", "accuracy") for _, job in self.busy.values()]
        if self.session is not None:
            self.session.progress(" and ".join(sorted(set(names))[:2]))

    def close(self) -> None:
        """End the processes."""
        for process, _ in self.busy.values():
            process.kill()
        for _, connection in self.idle:
            with suppress(OSError):
                connection.send(None)
        for process in [process for process, _ in (*self.idle, *self.busy.values())]:
            process.join(GRACE_S)
            process.kill()
            process.join()


Runner = Here | Workers


def status(code: int | None) -> str:
    """How a process ended, in words."""
    if code is not None and code < 0:
        with suppress(ValueError):
            return signal.Signals(-code).name
    return f"status {code}"


def serve(connection: Connection) -> None:
    """Run the jobs that come after a Start, until None comes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the check ends its processes
    torch.set_num_threads(1)
    session = None
    with warnings.catch_warnings(), interpreting():
        warnings.simplefilter("ignore")
        with suppress(EOFError):
            start = connection.recv()
            while (job := connection.recv()) is not None:
                try:
                    session = session or start.session()
                    connection.send(job(session))
                except Exception as error:
                    if str(error).startswith("CUDA error"):  # nothing can be computed after it
                        connection.send(Ended(short(error)))
                        os._exit(1)
                    error.add_note(traceback.format_exc())
                    connection.send(error)
