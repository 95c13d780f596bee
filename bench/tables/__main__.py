"""Print the tables of README and docs/ from bench/results/, and draw their figures. bench/tables/__init__.py says how
to add one.

    python -m bench.tables           print what is out of date
    python -m bench.tables --check   only list what is out of date, with exit status 1
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from bench.tables.blocks import TableError, draw, load_all, pages, stale_blocks, stale_figures, written


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if --check finds something out of date."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.tables", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing")
    args = parser.parse_args(arguments)
    load_all()
    stale, figures = list(stale_blocks()), stale_figures()
    for name in (*stale, *(f"figure {name}" for name in figures)):
        print(f"{'out of date' if args.check else 'writing'}: {name}", flush=True)
    if args.check:
        return int(bool(stale or figures))
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (fresh := written(text, page)) != text:
            page.write_text(fresh, encoding="utf-8")
    for name in figures:
        draw(name)
    if not stale and not figures:
        print("every table and figure is up to date")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except TableError as error:
        sys.exit(f"error: {error}")
