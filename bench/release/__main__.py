"""Measure everything that README and docs/ show, in parts of at most nine minutes each.

    python -m bench.release              every part that is missing or out of date, and that this machine can measure
    python -m bench.release --minutes 9  as many of them as fit in nine minutes; the next call continues
    python -m bench.release --part bytes one part, or several, whatever their state
    python -m bench.release --status     results that are missing, or older than the GPU kernels that they measured
    python -m bench.release --list       the parts, their minutes and their commands

A part is a benchmark's command. It adds rows to bench/results/, with the commit, machine, date, versions and a digest
of the kernels. Parts can run on different days: a part that is up to date is skipped, and an interrupted part begins
anew. Afterwards `make tables` prints the tables.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bench.kernels import kernel_digests
from bench.machine import ROOT, device_name
from bench.record import RESULTS, result_file
from bench.release.parts import PARTS, Part, missing
from bench.release.status import UP_TO_DATE, Status, status

Runner = Callable[[Part], bool]  # measures a part; returns whether it succeeded


def states(folder: Path) -> dict[str, Status]:
    """part -> its state, on this machine's devices or, without a GPU, on the devices of the documents."""
    gpu = device_name(torch.device("cuda")) if torch.cuda.is_available() else "NVIDIA H200"
    devices = {True: gpu, False: device_name(torch.device("cpu"))}
    digests = kernel_digests()
    return {
        part.name: status(part, result_file(part.results, devices[part.gpus > 0], folder), digests) for part in PARTS
    }


def show_status(console: Console, statuses: dict[str, Status]) -> None:
    """Print a line for each part: its state, its last measurement, and what this machine lacks for a new one."""
    view = Table("part", "state", "measured", "commit", "this machine lacks", title=f"{len(PARTS)} parts")
    for part in PARTS:
        state, head = statuses[part.name]
        when = (head["date"][:10], str(head["commit"] or "")[:7]) if head else ("", "")
        view.add_row(part.name, state, *when, missing(part, torch.cuda.device_count()))
    console.print(view)
    done = sum(state.state == UP_TO_DATE for state in statuses.values())
    minutes = sum(part.minutes for part in PARTS if statuses[part.name].state != UP_TO_DATE)
    console.print(f"{done} of {len(PARTS)} parts are up to date; the others take about {minutes:.0f} minutes")


def show_list(console: Console, statuses: dict[str, Status]) -> None:
    """Print a line for each part: estimated minutes, the minutes of its last measurement, and its command."""
    view = Table("part", "minutes", "took", "GPUs", "command")
    for part in PARTS:
        took = statuses[part.name].minutes
        view.add_row(
            part.name, f"{part.minutes:g}", f"{took:.1f}" if took else "", str(part.gpus or "CPU"), part.command
        )
    console.print(view)


def run(part: Part) -> bool:
    """Measure a part; its output is shown as it comes."""
    command = [sys.executable, "-m", *shlex.split(part.command)]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def measure(parts: Sequence[Part], runner: Runner, minutes: float | None) -> list[str]:
    """Measure the parts that fit into `minutes`, one after the other. Returns the names of the parts that failed."""
    begin, failed = time.monotonic(), []
    for n, part in enumerate(parts, 1):
        spent = (time.monotonic() - begin) / 60
        if minutes is not None and spent + part.minutes > minutes:
            print(f"[{n}/{len(parts)}] {part.name}: left for the next call, it takes about {part.minutes:g} minutes")
            continue
        print(f"[{n}/{len(parts)}] {part.name}: python -m {part.command}", flush=True)
        print(f"[{n}/{len(parts)}] {part.name}: about {part.minutes:g} minutes", flush=True)
        if not runner(part):
            failed.append(part.name)
        took = (time.monotonic() - begin) / 60 - spent
        print(f"[{n}/{len(parts)}] {part.name}: {'failed' if part.name in failed else 'done'} after {took:.1f} minutes")
    return failed


def main(arguments: Sequence[str] | None = None, runner: Runner = run, folder: Path = RESULTS) -> int:
    """Returns 1 if a part failed."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.release", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = {part.name: part for part in PARTS}
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--part", nargs="+", choices=names, metavar="NAME", help="these parts, whatever their state")
    mode.add_argument("--status", action="store_true", help="list results that are missing or out of date")
    mode.add_argument("--list", action="store_true", help="the parts and their commands")
    parser.add_argument("--minutes", type=float, help="begin only parts that fit in this time")
    args = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)
    statuses = states(folder)
    if args.status or args.list:
        (show_status if args.status else show_list)(console, statuses)
        return 0
    gpus = torch.cuda.device_count()
    if args.part:
        chosen = [names[name] for name in args.part]
        for part in chosen:
            if lacking := missing(part, gpus):
                parser.error(f"--part {part.name} needs {lacking}, which this machine lacks")
    else:
        chosen = [part for part in PARTS if statuses[part.name].state != UP_TO_DATE and not missing(part, gpus)]
    failed = measure(chosen, runner, args.minutes)
    if not chosen:
        print("every part that this machine can measure is up to date; --status shows the others")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    elif chosen:
        print("next: make tables")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
