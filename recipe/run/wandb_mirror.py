"""Weights & Biases in a separate process, which copies metrics.jsonl into a W&B run.

Guarded calls of W&B's SDK would be enough without a network, with a wrong key and where its service process is killed:
`wandb.init` and `wandb.log` then raise. They are not enough where that service stops answering: `wandb.log` waits
forever, and so does the end of a process that logs from a thread (wandb 0.31.0). With the mirror the run neither waits
nor fails, and the next run of a sweep starts clean. The run only writes metrics.jsonl, whose new lines the mirror reads
every second. They exchange these messages:

    to the mirror    a line of JSON with the arguments of wandb.init; then "finish", once the run folder is complete
    from the mirror  {"location": ...} when the W&B run has started, with {"offline": reason} where its server could
                     not be used, and {"done": true} or {"failed": reason} at the end

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
# The files of the profile that people open; a memory snapshot may be too large to upload while a run waits.
PROFILE = ("profile/table.txt", "profile/trace.json.gz")


class WandbMirror:
    """The mirror as seen by the training process: start it, collect its warnings, end it."""

    def __init__(self, run_folder: Path, options: dict[str, Any]) -> None:
        """`options`: keyword arguments of wandb.init, plain values."""
        self.location: str | None = None  # of the W&B run: its address, or its folder where it is offline
        self.online = options["mode"] == "online"
        self.failed: str | None = None
        self._warnings: list[str] = []
        self._done = False
        self._heard = b""
        self._log = run_folder / "wandb" / "mirror.log"
        request = json.dumps({"run_folder": str(run_folder.absolute()), "pid": os.getpid(), "options": options})
        self.process = subprocess.Popen(
            # -P: do not import from the folder of this file.
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

    def warnings(self) -> list[str]:
        """Warnings since the last call, a sentence each. Never waits."""
        self._listen()
        warnings, self._warnings = self._warnings, []
        return warnings

    def finish(self, timeout: float) -> None:
        """Let the mirror copy the rest and close the W&B run, waiting at most `timeout` seconds."""
        self._send("finish")
        self.end(timeout)

    def end(self, timeout: float) -> None:
        """End the mirror, and its W&B run as failed unless `finish` was sent. Safe to call twice."""
        assert self.process.stdin
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self._fail(f"it did not finish within {timeout:.0f} s")
        self._listen()

    def _fail(self, reason: str) -> None:
        if self.failed is None:
            self.failed = reason
            self._warnings.append(
                f"W&B has stopped ({reason}; see {self._log}); metrics.jsonl continues and holds everything."
            )

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
            if "offline" in message:
                self.online = False
                self._warnings.append(
                    f"W&B records offline, because its server could not be used ({message['offline']})."
                )
            if "failed" in message:
                self._fail(message["failed"])
        if data == b"" and not self._done:
            self._fail("its process ended unexpectedly")


def main() -> None:
    """The mirror process."""
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
        status.write(json.dumps({"failed": one_line(error)}) + "\n")
        raise


def mirror(folder: Path, pid: int, options: dict[str, Any], orders: IO[bytes], status: IO[str]) -> None:
    """Copy `folder`/metrics.jsonl into a W&B run until `orders` say to finish, or end."""
    import wandb

    def start(options: dict[str, Any]) -> wandb.Run:
        # `console`: the output of this process is not of interest; `x_stats_pid`: the process whose load W&B records.
        settings = wandb.Settings(silent=True, console="off", disable_code=True, init_timeout=30, x_stats_pid=pid)
        return wandb.init(dir=str(folder), settings=settings, **options)

    fallback: dict[str, str] = {}
    try:
        run = start(options)
    except Exception as error:  # no key, no network, no quota, no such project
        if options["mode"] != "online":
            raise
        fallback["offline"] = one_line(error)
        run = start(options | {"mode": "offline", "resume": None})
    status.write(json.dumps({"location": run.url or str(Path(run.dir).parent.resolve()), **fallback}) + "\n")

    first_step = step = run.step  # the steps that W&B already has of a resumed online run
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
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        known = {"config": summary.get("config"), **options["config"]}  # already in the configuration of the W&B run
        run.summary.update({"summary": {k: v for k, v in summary.items() if k not in known or v != known[k]}})
        run.log({"figures/loss": wandb.Image(str(folder / "loss.png"))}, step=max(step, first_step))
        for name in PROFILE:
            if (folder / name).exists():
                run.save(folder / name, base_path=folder, policy="now")
    run.finish(exit_code=0 if order == b"finish" else 1)


def complete_lines(file: IO[bytes]) -> Iterator[dict[str, Any]]:
    """The new records in `file`; an incomplete last line is left for the next call."""
    while True:
        start = file.tell()
        line = file.readline()
        if not line.endswith(b"\n"):
            file.seek(start)
            return
        yield json.loads(line)


def one_line(error: BaseException) -> str:
    """An exception of W&B in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def number(value: Any) -> Any:
    """A number of metrics.jsonl, whose non-finite values are words."""
    return float(value) if value in NOT_FINITE else value


if __name__ == "__main__":
    main()
