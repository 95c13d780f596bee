"""Processes that run the parts of a check in parallel. A call that ends its process is a failure; the check goes on.

After an illegal address, a CUDA context computes nothing more, and a kernel for CPUs may end its process. The check
reports the call that did so, and starts another process.
"""

import os
import pickle
import signal
import sys
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

from .results import short
from .run import Session, interpreting

GRACE_S = 5.0  # seconds that jobs have to end after the deadline
Job = partial[Any]  # a module's function of a Session with its other arguments, which is sent to a process


@dataclass(frozen=True)
class Ended:
    """The result of a job that did not finish: its process ended, or the time was up.

    why  the reason in words; empty where the time was up
    """

    why: str = ""


class Here:
    """Runs jobs in this process, one after the other. A call that ends the process ends the check."""

    number = 1

    def __init__(self, session: Session) -> None:
        self.session = session

    def run(self, jobs: Iterator[Job], done: Callable[[Job, Any], None], deadline: float) -> None:
        """As `Workers.run`, but jobs are not interrupted at the deadline."""
        for job in jobs:
            done(job, job(self.session))


class Workers:
    """Processes that run jobs. They start at once, and wait for `begin`.

    number  the number of processes
    """

    def __init__(self, number: int) -> None:
        self.number, self.context = number, get_context("spawn")
        self.idle = [self.another() for _ in range(number)]
        self.busy: dict[Connection, tuple[Any, Job]] = {}  # the process and its job

    def begin(self, session: Session) -> None:
        """Jobs receive this session, as it is when they are sent."""
        self.session = session

    def another(self) -> tuple[Any, Connection]:
        """A new process and the connection to it."""
        mine, theirs = self.context.Pipe()
        process = self.context.Process(target=serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        return process, mine

    def run(self, jobs: Iterator[Job], done: Callable[[Job, Any], None], deadline: float) -> None:
        """Run all jobs, or as many as end by the deadline.

        jobs  taken one by one, whenever a process is idle
        done  receives each job with its result, or with Ended
        """
        while True:
            while len(self.busy) < self.number and (job := next(jobs, None)) is not None:
                process, connection = self.idle.pop() if self.idle else self.another()
                with suppress(OSError):  # reading from a process that is gone raises an error below
                    connection.send(pickle.dumps((self.session, job)))
                self.busy[connection] = process, job
            if not self.busy:
                return
            if (left := deadline + GRACE_S - time.monotonic()) <= 0:
                break
            running = {job.keywords.get("name", "accuracy") for _, job in self.busy.values()}
            self.session.progress(" and ".join(sorted(running)[:2]))
            ready = wait(list(self.busy), timeout=min(left, 1.0))
            for connection in [x for x in ready if isinstance(x, Connection)]:
                process, job = self.busy.pop(connection)
                try:
                    result = connection.recv()
                except (EOFError, OSError):
                    process.join()
                    result = Ended(f"the process ended with {status(process.exitcode)}")
                if isinstance(result, Ended):
                    connection.close()
                else:
                    self.idle.append((process, connection))
                if isinstance(result, Exception):
                    raise result
                done(job, result)
        for process, job in self.busy.values():
            process.kill()
            done(job, Ended())
        self.busy.clear()

    def close(self) -> None:
        """End the processes."""
        for process, _ in self.busy.values():
            process.kill()
        for _, connection in self.idle:
            with suppress(OSError):
                connection.send(None)
        for process, _ in (*self.idle, *self.busy.values()):
            process.join(GRACE_S)
            process.kill()
            process.join()


Runner = Here | Workers


def status(code: int | None) -> str:
    """The exit status of a process in words."""
    if code is not None and code < 0:
        with suppress(ValueError):
            return signal.Signals(-code).name
    return f"status {code}"


def serve(connection: Connection) -> None:
    """Receive jobs, each pickled with its session, and run them until None comes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the check ends its processes itself
    torch.set_num_threads(1)
    with warnings.catch_warnings(), interpreting():
        warnings.simplefilter("ignore")
        with suppress(EOFError):
            while (received := connection.recv()) is not None:
                try:
                    session, job = pickle.loads(received)
                    if "torch._dynamo" in sys.modules:  # a compiled attention is compiled for each shape
                        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 2**20
                    connection.send(job(session))
                except Exception as error:
                    if str(error).startswith("CUDA error"):  # the GPU computes nothing after it
                        connection.send(Ended(short(error)))
                        os._exit(1)
                    error.add_note(traceback.format_exc())
                    connection.send(error)
