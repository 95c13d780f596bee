"""The size of the project in code tokens: docstrings, comments and white space are free.

    python -m bench.sizes

A token is one of Python's; an f-string is one token. tests/test_house.py holds the budget of each package.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from bench.machine import ROOT

FREE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
SCOPES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# Most code tokens of each package; a package within another does not count there again.
BUDGETS = {
    "attention/check": 33_700,
    "attention/flash": 72_000,
    "attention": 48_100,
    "mixers": 10_600,
    "model": 23_800,
    "data": 19_000,
    "recipe/run": 28_100,
    "recipe/training": 17_900,
    "recipe/distributed": 12_300,
    "recipe/infer": 22_000,
    "recipe/compare": 31_400,
    "recipe": 2_700,
    "learn": 8_800,
    "bench": 20_450,
    "docs": 500,
    "records": 300,
    ".": 5_000,
    "tests": 260_100,
}
MOST_FILES = 309
MOST_WORDS = 26_600  # of the pages in docs/
MOST_OPTIONS = 114


class Size(NamedTuple):
    """Files, lines and code tokens."""

    files: int
    lines: int
    tokens: int


def code_tokens(source: str) -> int:
    """Tokens of a Python source without comments and docstrings."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, SCOPES) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            docstrings |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    starts, ends = (getattr(tokenize, name, None) for name in ("FSTRING_START", "FSTRING_END"))  # since Python 3.12
    count = depth = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == starts:
            count, depth = count + (depth == 0), depth + 1
        elif token.type == ends:
            depth -= 1
        elif depth == 0 and token.type not in FREE:
            count += not (token.type == tokenize.STRING and token.start[0] in docstrings)
    return count


def size(files: Iterable[Path]) -> Size:
    """The size of some files together."""
    texts = [file.read_text(encoding="utf-8") for file in files]
    return Size(len(texts), sum(text.count("\n") for text in texts), sum(map(code_tokens, texts)))


def sizes(root: Path = ROOT) -> dict[str, Size]:
    """The size of each package of BUDGETS."""
    files: dict[str, list[Path]] = {name: [] for name in BUDGETS}
    for file in root.rglob("*.py"):
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
