"""The registry of blocks and figures, and the pages that show them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import NamedTuple

from bench.machine import ROOT
from bench.record import RESULTS, Row, read
from recipe.drawing import Chart, render_png

# The machines whose results the documents show.
GPU, H100 = "nvidia-h200", "nvidia-h100-80gb-hbm3"
CPU, XEON = "amd-epyc-2-threads", "intel-r-xeon-r-processor-1-threads"
IMAGES = ROOT / "docs" / "images"
DRAWN = IMAGES / "drawn.json"  # figure -> digest of the rows that it was drawn from
BLOCK = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
PROVENANCE = "provenance"

Rows = Sequence[Row]


class TableError(Exception):
    """A block or a result file that does not exist; the message names it."""


class Source(NamedTuple):
    """A function of the rows of result files."""

    files: tuple[str, ...]
    function: Callable[..., str] | Callable[..., Chart]

    def rows(self) -> list[Rows]:
        """The rows of each file. Raises TableError for a file that does not exist."""
        return [results(name) for name in self.files]


BLOCKS: dict[str, Source] = {}
FIGURES: dict[str, Source] = {}


def block(name: str, *files: str) -> Callable[[Callable[..., str]], Callable[..., str]]:
    """Register the function that writes a block from the rows of result files."""

    def register(function: Callable[..., str]) -> Callable[..., str]:
        BLOCKS[name] = Source(files, function)
        return function

    return register


def figure(name: str, *files: str) -> Callable[[Callable[..., Chart]], Callable[..., Chart]]:
    """Register the function that makes a figure from the rows of result files."""

    def register(function: Callable[..., Chart]) -> Callable[..., Chart]:
        FIGURES[name] = Source(files, function)
        return function

    return register


def load_all() -> None:
    """Import every module of this folder, which registers its blocks and figures."""
    for module in iter_modules([str(Path(__file__).parent)]):
        if module.name != "__main__":
            import_module(f"bench.tables.{module.name}")


def results(name: str) -> Rows:
    """The rows of a result file: "attention" is an H200's, "h100:llama" an H100's, "cpu:generate" a CPU's."""
    path = results_path(name)
    if not path.exists():
        raise TableError(f"there is no result file {path.name}, which a table or figure shows.")
    return read(path)


def results_path(name: str) -> Path:
    """The path of such a result file."""
    machine, _, plain = name.rpartition(":")
    return RESULTS / f"{plain}-{ {'cpu': CPU, 'xeon': XEON, 'h100': H100}.get(machine, GPU) }.json"


def pages() -> list[Path]:
    """README and the pages of docs/."""
    return [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)]


def written(text: str, page: Path) -> str:
    """The text of a page with all of its blocks up to date. Raises TableError."""
    names = [name for _, name, _ in BLOCK.findall(text)]
    return BLOCK.sub(lambda match: f"{match[1]}{content(match[2], names, page)}\n{match[3]}", text)


def content(name: str, names: Sequence[str], page: Path) -> str:
    """The text of a block on a page whose blocks have these names."""
    if name == PROVENANCE:
        files = [file for other in names if other != PROVENANCE for file in BLOCKS[other].files]
        return provenance([row for file in dict.fromkeys(files) for row in results(file)], page)
    if name not in BLOCKS:
        raise TableError(f"{page.name} has a block {name}, which no function of bench/tables writes.")
    source = BLOCKS[name]
    text = source.function(*source.rows())
    assert isinstance(text, str)
    return text


def provenance(rows: Rows, page: Path) -> str:
    """One line: where and when rows were measured, and where their commands and commits are."""
    heads = [json.loads(head) for head in dict.fromkeys(json.dumps(row["measurement"]) for row in rows)]
    machines = []
    for device in dict.fromkeys(head["device"] for head in heads):
        mine = [head for head in heads if head["device"] == device]
        torch = sorted({".".join(head["versions"]["torch"].split(".")[:2]) for head in mine})
        releases = " and ".join(torch) if len(torch) < 3 else f"{torch[0]} to {torch[-1]}"
        days = sorted({head["date"][:10] for head in mine})
        when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
        machines.append(f"{device} (torch {releases}, {when})")
    folder = "../" * (len(page.relative_to(ROOT).parts) - 1) + "bench/results"
    return f"*Measured on {', and on '.join(machines)}. Commands and commits: [bench/results]({folder}).*"


def stale_blocks() -> Iterator[str]:
    """The blocks that differ from the tables of the results, as "page: block"."""
    for page in pages():
        text = page.read_text(encoding="utf-8")
        fresh = written(text, page)
        for (_, name, _), before, after in zip(
            BLOCK.findall(text), BLOCK.finditer(text), BLOCK.finditer(fresh), strict=True
        ):
            if before[0] != after[0]:
                yield f"{page.relative_to(ROOT)}: {name}"


def digest(name: str) -> str:
    """A digest of the rows that a figure is drawn from."""
    return hashlib.sha256(json.dumps(FIGURES[name].rows()).encode()).hexdigest()[:16]


def stale_figures() -> list[str]:
    """The figures whose rows have changed since they were drawn."""
    drawn = json.loads(DRAWN.read_text()) if DRAWN.exists() else {}
    return [
        name for name in FIGURES if drawn.get(name) != digest(name) or not all(path.exists() for path in images(name))
    ]


def images(name: str) -> tuple[Path, Path]:
    """The files of a figure: light and dark."""
    return IMAGES / f"{name}.png", IMAGES / f"{name}-dark.png"


def draw(name: str) -> None:
    """Draw a figure in both colour schemes."""
    source = FIGURES[name]
    chart = source.function(*source.rows())
    assert isinstance(chart, Chart)
    for dark, path in enumerate(images(name)):
        path.write_bytes(render_png(chart, bool(dark)))
    drawn = json.loads(DRAWN.read_text()) if DRAWN.exists() else {}
    drawn[name] = digest(name)
    shown = {other: drawn[other] for other in sorted(drawn) if other in FIGURES}
    DRAWN.write_text(json.dumps(shown, indent=1) + "\n")
