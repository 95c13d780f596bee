"""The progress of a run: a live bar in a terminal, a line every few seconds in a log."""

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from recipe.wording import duration, short_number

BAR = 10  # columns; a terminal narrower than this and the longest usual line shows the line alone
WIDE_ENOUGH = 90
SECONDS_BETWEEN_LINES = 10.0  # in a log
# The remaining time follows from the recent rate, which soon leaves out the first steps and their compilation.
MARKS = 20


class Terminal(Console):
    """Standard output that survives a closed pipe (`| head`)."""

    def __init__(self) -> None:
        super().__init__(highlight=False, soft_wrap=True)

    def on_broken_pipe(self) -> None:
        """Discard all further output, also by `print` and by the interpreter's last flush."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


class ProgressLine:
    """Step, losses, tokens seen and their rate, and remaining time.

    Redrawn by `update` only, so no thread competes with the training.
    """

    def __init__(
        self,
        steps: int,
        first_step: int = 0,
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.steps, self.clock = steps, clock
        self.console = console or Terminal()
        self.marks = deque([(clock(), first_step)], maxlen=MARKS)
        self.latest: dict[str, float] = {}
        self.evaluated = first_step  # when the latest validation loss was measured
        self.printed = -float("inf")
        self.bar: Progress | None = None
        if self.console.is_terminal:
            columns = [BarColumn(BAR)] if self.console.width >= WIDE_ENOUGH else []
            self.bar = Progress(*columns, TextColumn("{task.description}"), console=self.console, auto_refresh=False)
            self.task = self.bar.add_task("starting", total=steps, completed=first_step)
            self.bar.start()

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show that `step` updates are done. Without a terminal: every few seconds, each evaluation, and the last."""
        self.marks.append((self.clock(), step))
        self.latest |= {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        if "val/loss" in metrics:
            self.evaluated = step
        if self.bar is not None:
            self.bar.update(self.task, completed=step, description=self.line(step), refresh=True)
            return
        now = self.marks[-1][0]
        if now - self.printed >= SECONDS_BETWEEN_LINES or "val/loss" in metrics or step >= self.steps:
            self.printed = now
            self.print(self.line(step))

    def line(self, step: int) -> str:
        """ "step  300/2000  loss 2.6013  val 2.5911 @200  1.23M tokens, 61.3k/s  1:32 left", as far as known;
        200 is the step of the validation loss."""
        parts = [f"step {step:>{len(str(self.steps))}}/{self.steps}"]
        if "train/loss" in self.latest:
            parts.append(f"loss {self.latest['train/loss']:.4f}")
        if "val/loss" in self.latest:
            earlier = "" if self.evaluated == step else f" @{self.evaluated}"
            parts.append(f"val {self.latest['val/loss']:.4f}{earlier}")
        tokens, rate = (self.latest.get(name) for name in ("train/tokens", "throughput/tokens_per_s"))
        if tokens is not None:
            parts.append(f"{short_number(tokens)} tokens" + (f", {short_number(rate)}/s" if rate is not None else ""))
        (start, first), (now, done) = self.marks[0], self.marks[-1]
        if first < done < self.steps:
            parts.append(f"{duration((now - start) / (done - first) * (self.steps - done))} left")
        return "  ".join(parts)

    def print(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        self.console.print(text, markup=False)

    def close(self) -> None:
        """Stop the bar; safe to call twice."""
        if self.bar is not None:
            self.bar.stop()
