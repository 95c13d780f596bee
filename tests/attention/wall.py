"""A table of wrong values that libraries had, with what the check says about each mechanism.

    python -m tests.attention.wall                          every mechanism: fifteen minutes on two cores
    python -m tests.attention.wall --live sdpa-cudnn flex   the installed implementations, on a GPU: a minute each

The first writes bench/results/wall-<CPU>.json and a table that `make tables` pastes into docs/wall.md, the second
wall-live-<GPU>.json and its table.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from attention.check.cli import check
from attention.check.named import NAMED
from attention.check.printing import Report
from bench.record import Recorder, measurement, read, result_file, write_table
from recipe.wording import markdown_table as table
from tests.attention.faults import measure
from tests.wrong_attention.published import GITHUB, PUBLISHED

SECONDS = 58.0  # that a check may search: with the start and the end of its processes it takes a minute at most
WRONG = re.compile(r"(\w+) of (?:sequence|head) [^;]*? is (\S+) off")
ENDED = re.compile(r"ends? (?:their|its) process: \w+: (?:CUDA error: )?(.*?)(?: Search for | \()")

Row = dict[str, Any]


def words(report: Report, name: str) -> str:
    """The line of a report with this name if it fails, else the first one that fails."""
    failed = sorted(report.failed(), key=lambda line: line.name != name)
    return f"{failed[0].name}: {failed[0].detail}" if failed else "nothing"


def caught(number: int) -> list[Row]:
    """What the check says about one thread's mechanism within `SECONDS`."""
    published, started = PUBLISHED[number], time.monotonic()
    report = check(published.subject(), seconds=SECONDS)
    took = time.monotonic() - started
    return [{"thread": published.thread, "line": words(report, published.line), "seconds": round(took)}]


def short(line: str) -> str:
    """A failing line with its worst tensor and error alone, "window: out 0.245"; the result has all of it."""
    name, _, detail = line.partition(": ")
    found = [f"process ended, {why}" for why in ENDED.findall(detail)]
    found += [f"{tensor} {error}" for tensor, error in WRONG.findall(detail)]
    return f"{name}: {'; '.join(found) or detail.partition(' (')[0]}"


def link(address: str) -> str:
    """A thread's repository and number."""
    path = address.removeprefix(GITHUB).split("/")
    return f"[{path[1]} #{path[-1]}]({address})"


def wall() -> None:
    """Check every mechanism, and write the table."""
    now = measurement(["tests.attention.wall"], torch.device("cpu"))
    path = result_file("wall", now["device"])
    with Recorder(path, ("thread",), now) as recorder:
        measure(recorder, [partial(caught, number) for number in range(len(PUBLISHED))], per_core=1)
    write_wall(path)


def write_wall(path: Path) -> None:
    """The table of a result."""
    lines = {row["thread"]: short(row["line"]) for row in read(path)}
    head = ["reported", "what users got", "for which inputs", "failing line: worst error"]
    rows = ([f"{link(x.thread)}, {x.when}", x.effect, x.inputs, lines[x.thread]] for x in PUBLISHED)
    write_table(path.with_suffix(".md"), table(head, rows), path)


def live(names: list[str]) -> None:
    """Check installed implementations on a GPU in bf16, and write the lines that fail."""
    now = measurement(["tests.attention.wall", "--live", *names], torch.device("cuda"))
    path = result_file("wall-live", now["device"])
    with Recorder(path, ("name",), now) as recorder, TemporaryDirectory() as folder:
        for name in names:
            report = Path(folder) / f"{name}.json"
            options = ["--dtypes", "bf16", "--json", str(report)]
            subprocess.run([sys.executable, "-m", "attention", "check", name, *options], check=False)
            lines = json.loads(report.read_text(encoding="utf-8"))["lines"]
            failed = [f"{line['name']}: {line['detail']}" for line in lines if line["status"] == "FAIL"]
            recorder.add({"name": name, "calls": sum(line["calls"] for line in lines), "failed": failed})
    write_live(path)


def write_live(path: Path) -> None:
    """The table of a result."""
    rows = ([x["name"], str(x["calls"]), "<br>".join(map(short, x["failed"])) or "nothing"] for x in read(path))
    write_table(path.with_suffix(".md"), table(["implementation", "calls", "failing lines in bf16"], rows), path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--live", nargs="+", metavar="NAME", choices=sorted(NAMED), help="names of `gpt-attention check`"
    )
    names = parser.parse_args().live
    if names:
        live(names)
    else:
        wall()


if __name__ == "__main__":
    main()
