"""The record of compiled kernels, bench/kernels/record.json: the sources of each, and the resources that it uses.

A kernel's name is `group/kind/case/function`. The record holds a digest of its sources and, for each Triton version, a
digest of its PTX, registers of a thread, bytes that it spills, bytes of shared memory, and the number of ptxas's
warnings of serialised products.
"""

import ast
import hashlib
import json
from pathlib import Path
from typing import NamedTuple, Self

from data.atomic import write_atomically

FILE = Path(__file__).with_name("record.json")


class Figures(NamedTuple):
    """What a kernel uses. `ptx` is empty where its sources have changed since; the other figures are then bounds."""

    ptx: str
    registers: int
    spilled: int
    shared: int
    serialised: int


class Entry(NamedTuple):
    """A kernel in the record: the digest of its sources, and Triton version -> figures."""

    sources: str
    versions: dict[str, Figures]


class Record(NamedTuple):
    """The file's content: name -> entry."""

    kernels: dict[str, Entry]

    @classmethod
    def read(cls, path: Path = FILE) -> Self:
        """The record in a file; an empty one where there is none."""
        if not path.exists():
            return cls({})
        content = json.loads(path.read_text(encoding="utf-8"))
        kernels = {
            name: Entry(line.pop("sources"), {version: Figures(*figures) for version, figures in line.items()})
            for name, line in content["kernels"].items()
        }
        return cls(kernels)

    def write(self, path: Path = FILE) -> None:
        """A line for each kernel, in order of their names."""
        kernels = ",\n".join(
            f"  {json.dumps(name)}: {json.dumps({'sources': entry.sources, **dict(sorted(entry.versions.items()))})}"
            for name, entry in sorted(self.kernels.items())
        )
        write_atomically(path, f'{{\n "kernels": {{\n{kernels}\n }}\n}}\n')

    def bound(self, name: str, version: str) -> Figures | None:
        """The most that a kernel may use with a Triton version: the record's figures, or the most of other versions."""
        entry = self.kernels.get(name)
        if entry is None or version in entry.versions:
            return entry and entry.versions[version]
        _, *columns = zip(*entry.versions.values(), strict=True)
        return Figures("", *map(max, columns))

    def has(self, name: str, sources: str) -> bool:
        """Whether the record has a kernel with these sources."""
        return name in self.kernels and self.kernels[name].sources == sources


def code(source: str) -> str:
    """Python source without comments and docstrings, the same for every version of Python."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def short_digest(*parts: str) -> str:
    """16 hexadecimal digits."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
