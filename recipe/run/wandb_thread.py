"""Weights & Biases in a thread, which sends it the lines of a folder's metrics.jsonl.

`wandb.init`, `log` and `finish` may fail, and where W&B's service stops answering they wait forever (wandb 0.31.0).
Here only the thread calls them. The run puts lines into a queue of bounded length, and never waits: a service that
fails or hangs costs W&B's curve, about which there is one warning, and never the run. At the end of the run the thread
has some seconds to finish.

Each time the thread begins with the lines that the run folder has, under the same run id: an offline folder is complete
by itself, and online W&B is sent only the steps that it lacks.
"""

import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from recipe.files import plain
from recipe.run import process
from recipe.run.metrics import read_metrics

MOST_WAITING = 10_000  # lines in the queue
NOT_FINITE = ("nan", "inf", "-inf")

Line = tuple[int, Mapping[str, Any]]  # the step and its metrics


class WandbThread:
    """A W&B run of a folder.

    location  of the W&B run: its address, or the command that uploads it; None until it has started
    """

    def __init__(
        self,
        folder: Path,
        options: dict[str, Any],
        add_files: Callable[[Any, int], None],
        without: str = "metrics.jsonl continues and holds everything",
    ) -> None:
        """
        options    keyword arguments of wandb.init, plain values
        add_files  adds to the W&B run, at a step, what is complete at the end
        without    what is there where W&B fails
        """
        self.folder, self.options, self._add_files, self._without = folder, options, add_files, without
        self.location: str | None = None
        self._failed = self._ended = False
        self._warnings: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._lines: queue.Queue[Line | bool] = queue.Queue(MOST_WAITING)  # True or False: complete or broken off
        earlier = [(record["step"], record) for record in read_metrics(folder / "metrics.jsonl")]
        # A daemon, so that the interpreter's exit does not wait for it.
        self._thread = threading.Thread(target=self._work, args=(earlier,), name="wandb", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Send the metrics after `step` updates. Never waits."""
        self._put((step, plain(metrics)))

    def warnings(self) -> list[str]:
        """Warnings since the last call, a sentence each."""
        return [self._warnings.get() for _ in range(self._warnings.qsize())]

    def end(self, complete: bool, timeout: float) -> None:
        """Send the rest, and close the W&B run, as failed unless the run is `complete` and summary.json written. Waits
        at most `timeout` seconds. Safe to call twice."""
        if self._ended:
            return
        self._ended = True
        self._put(complete)
        self._thread.join(1.0 if self._failed else timeout)
        if self._thread.is_alive():
            self._fail(f"it did not finish within {timeout:g} s")
            process.leave_at_once()  # W&B registers a function for the exit, which would wait for the service again

    def _put(self, item: Line | bool) -> None:
        try:
            self._lines.put_nowait(item)
        except queue.Full:
            self._fail("it does not answer")

    def _fail(self, reason: str) -> None:
        if not self._failed:
            self._failed = True
            self._warnings.put(f"W&B has stopped ({reason}); {self._without}.")

    def _work(self, waiting: list[Line]) -> None:
        try:
            self._mirror(waiting)
        except BaseException as error:  # W&B's own are not all of Exception
            self._fail(one_line(error))

    def _mirror(self, waiting: list[Line]) -> None:
        run = self._start()
        first_step = step = run.step  # the steps that W&B already has of a resumed online run
        while not isinstance(item := waiting.pop(0) if waiting else self._lines.get(), bool):
            step, metrics = item
            if step >= first_step:
                run.log({name: number(value) for name, value in metrics.items() if name != "step"}, step=step)
        if item:
            self._add_files(run, max(step, first_step))
        run.finish(exit_code=0 if item else 1)

    def _start(self) -> Any:
        """A new W&B run; offline where its server cannot be used."""
        import wandb  # takes a second

        settings = wandb.Settings(silent=True, console="off", disable_code=True, init_timeout=30)
        start = {"dir": str(self.folder), "settings": settings, **self.options}
        try:
            run = wandb.init(**start)
        except Exception as error:  # no key, no network, no quota, no such project
            if start["mode"] != "online":
                raise
            self._warnings.put(f"W&B records offline, because its server could not be used ({one_line(error)}).")
            start |= {"mode": "offline", "resume": None}
            run = wandb.init(**start)
        self.location = run.url if start["mode"] == "online" else f"wandb sync {Path(run.dir).parent.resolve()}"
        return run


def one_line(error: BaseException) -> str:
    """An exception of W&B in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def number(value: Any) -> Any:
    """A number of metrics.jsonl, whose non-finite values are words."""
    return float(value) if value in NOT_FINITE else value
