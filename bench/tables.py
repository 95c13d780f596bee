"""Paste the tables of bench/results/ and of the configuration into the marked places of README and docs/.

    make tables                      write every table that is not up to date
    python -m bench.tables --check   only list them, with exit status 1

A page says where a table goes, and shows it with the machine and the date, which link to the result:

    <!-- table: attention-nvidia-h200 -->
    <!-- end -->

is bench/results/attention-nvidia-h200.md, which a benchmark writes with `write_table` (bench/record.py).
`configuration` and `configuration-training` come from the dataclasses (recipe/run/reference.py).
"""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.machine import ROOT
from recipe.run import reference

PLACE = re.compile(r"((<!-- table: ([\w-]+) -->\n).*?(<!-- end -->))", re.DOTALL)
REFERENCE = {"configuration": reference.configuration, "configuration-training": reference.training}


class TableError(Exception):
    """A page asks for a result that does not exist; the message names both."""


def pages(root: Path) -> list[Path]:
    """README and the pages of docs/."""
    return [root / "README.md", *sorted(path for path in (root / "docs").rglob("*.md") if "_build" not in path.parts)]


def table(name: str, page: Path, results: Path) -> str:
    """What a page shows at the place of a name. Raises TableError."""
    if name in REFERENCE:
        return REFERENCE[name]()
    file = results / f"{name}.md"
    if not file.exists():
        raise TableError(f"{page.name} shows the table {name}, and there is no {file.name} in bench/results/.")
    text, source, _ = file.read_text(encoding="utf-8").split("\n\n", 2)
    return f"{text}\n\n*[{source}]({Path(os.path.relpath(file, page.parent)).as_posix()})*"


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Returns 1 if --check finds a page that is out of date. Raises TableError."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.tables", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args(arguments).check
    stale = False
    for page in pages(root):
        text = page.read_text(encoding="utf-8")
        for place, opening, name, closing in PLACE.findall(text):
            fresh = f"{opening}{table(name, page, root / 'bench' / 'results')}\n{closing}"
            if fresh != place:
                stale = True
                text = text.replace(place, fresh, 1)
                print(f"{'out of date' if check else 'wrote'}: {page.relative_to(root)}: {name}", flush=True)
        if not check:
            page.write_text(text, encoding="utf-8")
    if not stale:
        print("every table is up to date")
    return int(check and stale)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except TableError as error:
        sys.exit(f"error: {error}")
