"""Result files: bench/results/<name>-<device>.json. Each holds one comparison, whose rows can be compared.

    {"measurements": [{"command": "python -m bench.attention", "device": "NVIDIA H200", "commit": "7c73dc4...", ...}],
     "rows": [{"name": "flash", "length": 1024, ..., "measurement": 0}, ...]}

A row names its measurement, and a measurement can be repeated: it holds the command, the machine, the commit, the
versions, its start and end. A row that is measured again replaces the earlier one. Rows of other software or of other
sizes are removed from the file. The tables of rows are beside them, bench/results/<name>.md.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from bench.machine import ROOT, device_name, environment, slug
from data.atomic import write_atomically
from recipe.wording import markdown_table

RESULTS = ROOT / "bench" / "results"
SOFTWARE = ("torch", "triton", "cuda")  # what must be equal for rows to be compared

Row = dict[str, Any]
Text = Callable[[Row], str]


def measurement(command: Sequence[str], device: torch.device, packages: Sequence[str] = (), **sizes: object) -> Row:
    """The record of a measurement that begins now, for a result file.

    command   the words after `python -m`
    packages  further packages whose versions matter, where they are installed
    sizes     further values that rows must share to be compared, such as the tokens of a batch
    """
    return {"command": shlex.join(["python", "-m", *command]), **environment(device, packages), "sizes": sizes}


def command_line(module: str, description: str | None, name: str) -> argparse.ArgumentParser:
    """The parser of a benchmark's arguments, with --name and --results, which choose its result file.

    module       the words after `python -m`
    description  the module's docstring
    name         of the result file: bench/results/<name>-<device>.json
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(module=module)
    parser.add_argument("--name", default=name, help=f"of the result file, {name}-<device>.json")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    return parser


def result_file(name: str, device: str, folder: Path = RESULTS) -> Path:
    """The path of a comparison measured on a device, such as attention-nvidia-h200.json."""
    return folder / f"{name}-{slug(device)}.json"


def write_table(path: Path, table: str, *files: Path) -> None:
    """Write a table as a result, bench/results/<name>.md: the table, where and when it was measured, and every command.

    `python -m bench.tables` pastes it into the pages that show it.

    files  of its rows, beside it
    """
    heads: list[Row] = []
    for file in files:
        heads += (row["measurement"] for row in read(file) if row["measurement"] not in heads)
    days: dict[str, list[str]] = {}
    for head in heads:
        days.setdefault(head["device"], []).append(head["date"][:10])
    source = "; ".join(
        f"{device}, {' to '.join(dict.fromkeys((min(dates), max(dates))))}" for device, dates in days.items()
    )
    commands = "\n".join(
        f"- `{head['command']}`: {head['device']}, torch {head['versions']['torch']}, {head['date'][:10]}, "
        f"commit {head['commit']}"
        for head in heads
    )
    rows = ", ".join(f"[{file.name}]({file.name})" for file in files if file.exists())
    write_atomically(path, f"{table}\n\n{source}\n\n{commands}\n\nRows: {rows}\n")


def pivot(
    rows: Iterable[Row], line: Text, column: Text, cell: Text, *, corner: str = "", columns: Sequence[str] = ()
) -> str:
    """A table with a line and a column for each value that rows have; empty where there is no row.

    line, column, cell   texts of a row: the first cell of its line, its column's heading, and its cell
    corner               the heading of the first column
    columns              the headings in their order; default: the order in which rows first name them, as for lines
    """
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        cells.setdefault(line(row), {})[column(row)] = cell(row)
    headings = columns or dict.fromkeys(heading for line_cells in cells.values() for heading in line_cells)
    lines = ([label, *(line_cells.get(heading, "") for heading in headings)] for label, line_cells in cells.items())
    return markdown_table([corner, *headings], lines)


def read(path: Path) -> list[Row]:
    """The rows of a result file, each with its measurement in full; none where there is no such file."""
    if not path.exists():
        return []
    try:
        content = json.loads(path.read_text())
        return [row | {"measurement": content["measurements"][row["measurement"]]} for row in content["rows"]]
    except (ValueError, LookupError, TypeError) as error:
        raise SystemExit(
            f"error: {path} is no result of a benchmark ({type(error).__name__}); restore the file."
        ) from error


class Recorder:
    """Adds the rows of one measurement to a result file, which is complete after every row.

        with Recorder(path, ("name", "length"), measurement(...)) as recorder:
            recorder.add({"name": "flash", "length": 1024, "ms": 0.1})

    identity  the fields that identify a row: a new row replaces the earlier one with equal values
    """

    def __init__(self, path: Path, identity: Sequence[str], measurement: Row) -> None:
        self.path, self.identity, self.measurement = path, identity, measurement | {"ended": None}
        earlier = read(path)
        self.rows = {self.key(row): row for row in earlier if comparable(row["measurement"], measurement)}
        self.dropped = len(earlier) - len(self.rows)

    def key(self, row: Row) -> str:
        """The identity of a row as text."""
        return json.dumps([row.get(field) for field in self.identity])

    def add(self, *rows: Row) -> None:
        """Write rows; they replace earlier ones of the same identity."""
        self.rows |= {self.key(row): row | {"measurement": self.measurement} for row in rows}
        self.write()

    def write(self) -> None:
        """Write the file, without measurements that have no row left."""
        measurements: list[Row] = []
        lines = []
        for row in self.rows.values():
            if row["measurement"] not in measurements:
                measurements.append(row["measurement"])
            lines.append(json.dumps(row | {"measurement": measurements.index(row["measurement"])}))
        heads = ",\n  ".join(map(json.dumps, measurements))
        body = ",\n  ".join(lines)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, f'{{\n "measurements": [\n  {heads}\n ],\n "rows": [\n  {body}\n ]\n}}\n')

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Record when the measurement ended, if it came to its end."""
        if kind is None and self.rows:
            self.measurement["ended"] = datetime.now(UTC).isoformat(timespec="seconds")
            self.write()


def recording(
    args: argparse.Namespace,
    arguments: Sequence[str] | None,
    identity: Sequence[str],
    device: torch.device,
    packages: Sequence[str] = (),
    **sizes: object,
) -> Recorder:
    """The recorder of a call of a benchmark's `main` with some arguments, which `command_line` has parsed to `args`.

    packages, sizes  of its `measurement`
    """
    command = [args.module, *(sys.argv[1:] if arguments is None else arguments)]
    path = result_file(args.name, device_name(device), args.results)
    return Recorder(path, identity, measurement(command, device, packages, **sizes))


def comparable(earlier: Row, now: Row) -> bool:
    """Whether rows of two measurements may be compared: the same device, software and sizes."""
    same_software = all(earlier["versions"].get(name) == now["versions"].get(name) for name in SOFTWARE)
    return same_software and all(earlier[name] == now[name] for name in ("device", "sizes"))
