"""The size of the project in code tokens: docstrings, comments and white space are free.

    python -m bench.sizes

A token is one of Python's; an f-string is one token. tests/test_house.py holds the budget of each package.
"""

import re
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from bench.machine import ROOT

# What is free, and else one token each: strings, numbers, names, operators. The module tokenize takes several times as
# long.
TOKEN = re.compile(
    r"""
    (?P<free> [#][^\n]* | \s+ | \\\n)
    | [rbfu]{0,2} (?: \"{3} (?:\\.|[^\\])*? \"{3} | '{3} (?:\\.|[^\\])*? '{3} | "(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])*')
    | 0[xob][\da-f_]+ | (?:\d[\d_]*\.?[\d_]* | \.\d[\d_]*) (?:e[+-]?\d+)? j? | \w+
    | \.{3} | (?:\*\* | // | << | >>) =? | -> | [-+*/%&|^@<>=!:]= | .
    """,
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)
DOCSTRING = re.compile(r'(?:\A|:(?: *#.*)?\n)\s*r?"""')  # of a module, or after the line of a function or a class
# Most code tokens of each package; a package within another does not count there again.
BUDGETS = {
    "attention/check": 32_500,
    "attention/flash": 73_550,
    "attention": 46_700,
    "mixers": 11_050,
    "model": 23_450,
    "data": 17_950,
    "recipe/run": 26_950,
    "recipe/training": 17_200,
    "recipe/distributed": 12_150,
    "recipe/infer": 21_500,
    "recipe/compare": 29_300,
    "recipe": 2_700,
    "learn": 8_750,
    "bench": 19_950,
    "docs": 500,
    "records": 300,
    ".": 5_000,
    "tests": 240_000,
}
MOST_FILES = 298
MOST_WORDS = 27_000  # of the pages in docs/
MOST_OPTIONS = 113


class Size(NamedTuple):
    """Files, lines and code tokens."""

    files: int
    lines: int
    tokens: int


def code_tokens(source: str) -> int:
    """Tokens of a Python source without comments and docstrings."""
    return sum(found["free"] is None for found in TOKEN.finditer(source)) - len(DOCSTRING.findall(source))


def size(files: Iterable[Path]) -> Size:
    """The size of some files together."""
    texts = [file.read_text(encoding="utf-8") for file in files]
    return Size(len(texts), sum(text.count("\n") for text in texts), sum(map(code_tokens, texts)))


def sizes(root: Path = ROOT) -> dict[str, Size]:
    """The size of each package of BUDGETS."""
    files: dict[str, list[Path]] = {name: [] for name in BUDGETS}
    packages = (root / name for name in BUDGETS if name != "." and "/" not in name)
    for file in chain(root.glob("*.py"), *(package.rglob("*.py") for package in packages)):
        folder = file.relative_to(root).parent.as_posix()
        inside = [name for name in BUDGETS if folder == name or folder.startswith(f"{name}/")]
        if inside and "_build" not in file.parts:  # where the site has copies
            files[max(inside, key=len)].append(file)
    return {name: size(group) for name, group in files.items()}


def words(root: Path = ROOT) -> int:
    """Words of the pages in docs/."""
    pages = [page for page in (root / "docs").rglob("*.md") if "_build" not in page.parts]
    return sum(len(page.read_text(encoding="utf-8").split()) for page in pages)


def main() -> None:
    """Print the table."""
    found = sizes()
    print(f"{'':<22}{'files':>7}{'lines':>9}{'tokens':>10}{'at most':>10}")
    for name, (files, lines, tokens) in found.items():
        print(f"{name:<22}{files:>7}{lines:>9,}{tokens:>10,}{BUDGETS[name]:>10,}")
    code = [value for name, value in found.items() if name != "tests"]
    print(
        f"{'all but tests':<22}{sum(s.files for s in code):>7}{sum(s.lines for s in code):>9,}"
        f"{sum(s.tokens for s in code):>10,}"
    )
    print(f"docs: {words():,} words, at most {MOST_WORDS:,}")


if __name__ == "__main__":
    main()
