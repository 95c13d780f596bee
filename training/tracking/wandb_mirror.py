"""Weights & Biases, at arm's length: a process of its own copies metrics.jsonl into a W&B run.

Whatever W&B does there (import, start, raise, print, hang, get killed), the training process neither waits nor
fails, and the next run of a sweep starts with nothing of it. The run writes its metrics.jsonl and does not know
who reads it; the mirror reads what is new every second. Between the two go only

    to the mirror    a line of JSON with what to call the run; then "finish", once summary.json is written
    from the mirror  {"location": ...} when the W&B run has started, {"done": true} or {"failed": reason} at the end

and a mirror whose input ends without "finish" (the run was killed) closes the W&B run as failed. After a resume it
copies everything again under the same run id: a new offline folder is complete by itself, and online W&B is sent
only the steps that it lacks.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

SECONDS_BETWEEN_READS = 1.0
NOT_FINITE = ("nan", "inf", "-inf")


class WandbMirror:
    """The training process's end: starts the mirror, hears its complaint, ends it."""

    def __init__(self, run_folder: Path, options: dict[str, Any]) -> None:
        """`options`: keyword arguments of wandb.init, plain values."""
        self.location: str | None = None
        self.failed: str | None = None
        self._done = False
        self._heard = b""
        request = json.dumps({"run_folder": str(run_folder.absolute()), "pid": os.getpid(), "options": options})
        self.process = subprocess.Popen(
            # -P: the folder of this file is not one to import from.
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the training process
        )
        assert self.process.stdin
        assert self.process.stdout
        os.set_blocking(self.process.stdout.fileno(), False)
        self._send(request)

    def poll(self) -> str | None:
        """Why the mirror has failed, told once; None while all is well. Never waits."""
        told = self.failed is not None
        self._listen()
        return None if told else self.failed

    def finish(self, timeout: float) -> str | None:
        """Have the rest copied and the W&B run closed, waiting at most `timeout` seconds; then as `poll`."""
        self._send("finish")
        return self.end(timeout)

    def end(self, timeout: float) -> str | None:
        """End the mirror, its W&B run as failed unless `finish` was sent. More than one call does no harm."""
        told = self.failed is not None
        assert self.process.stdin
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.failed = self.failed or f"it did not finish within {timeout:.0f} s"
        self._listen()
        return None if told else self.failed

    def _send(self, line: str) -> None:
        assert self.process.stdin
        with contextlib.suppress(OSError, ValueError):  # a mirror that is gone is noticed by `_listen`
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()

    def _listen(self) -> None:
        assert self.process.stdout
        if self._done or self.failed:
            return
        while (data := self.process.stdout.read()) is not None:
            self._heard += data
            if not data:
                break
        *lines, self._heard = self._heard.split(b"\n")
        for message in map(json.loads, lines):
            self.location = message.get("location", self.location)
            self._done = self._done or "done" in message
            self.failed = message.get("failed", self.failed)
        if data == b"" and not self._done and not self.failed:
            self.failed = "its process ended unexpectedly"


def main() -> None:
    """The mirror's end."""
    status = os.fdopen(os.dup(1), "w", buffering=1)
    orders = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115 - for as long as the process lives
    request = json.loads(orders.readline())
    folder = Path(request["run_folder"])
    (folder / "wandb").mkdir(exist_ok=True)
    log = os.open(folder / "wandb" / "mirror.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.nice(10)
    try:
        mirror(folder, request["pid"], request["options"], orders, status)
        status.write(json.dumps({"done": True}) + "\n")
    except BaseException as error:
        status.write(json.dumps({"failed": " ".join(f"{type(error).__name__}: {error}".split())}) + "\n")
        raise


def mirror(folder: Path, pid: int, options: dict[str, Any], orders: IO[bytes], status: IO[str]) -> None:
    """Copy `folder`/metrics.jsonl into a W&B run until `orders` say to finish, or end."""
    import wandb

    # `console`: this process prints nothing worth keeping; `x_stats_pid`: whose load to record.
    settings = wandb.Settings(silent=True, console="off", disable_code=True, init_timeout=30, x_stats_pid=pid)
    run = wandb.init(dir=str(folder), settings=settings, **options)
    location = run.url or str(Path(run.dir).parent)
    status.write(json.dumps({"location": location}) + "\n")

    first_step = run.step  # what W&B already has, where an online run is resumed
    order = None
    with (folder / "metrics.jsonl").open("rb") as file:
        while order is None:
            ready, _, _ = select.select([orders], [], [], SECONDS_BETWEEN_READS)
            order = orders.readline().strip() if ready else None
            for record in complete_lines(file):
                step = record.pop("step")
                if step >= first_step:
                    run.log({name: number(value) for name, value in record.items()}, step=step)
    if order == b"finish":
        run.summary.update({"summary": json.loads((folder / "summary.json").read_text(encoding="utf-8"))})
    run.finish(exit_code=0 if order == b"finish" else 1)


def complete_lines(file: IO[bytes]) -> Iterator[dict[str, Any]]:
    """The records that have been added to `file`; a line that is still being written is left for later."""
    while True:
        start = file.tell()
        line = file.readline()
        if not line.endswith(b"\n"):
            file.seek(start)
            return
        yield json.loads(line)


def number(value: Any) -> Any:
    """Undo what metrics.jsonl does to numbers that are not finite."""
    return float(value) if value in NOT_FINITE else value


if __name__ == "__main__":
    main()
