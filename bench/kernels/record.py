"""The record of compiled kernels, bench/kernels/record.json: the sources of each, and the resources that it uses.

A kernel's name is `group/kind/case/function`. The record holds a digest of its sources and, for each Triton version, a
digest of its PTX, registers of a thread, bytes that it spills, bytes of shared memory, and the number of ptxas's
warnings of serialised products. For each group it holds a digest of the files that the kernels come from.

A result file holds the `kernel_digests` of its measurement. `python -m bench.release --status` compares them with
today's and lists the results that are older than their kernels. Where the record is up to date, a digest depends on
PTX alone: moving or renaming code, which leaves the PTX the same, leaves results valid.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Self

from data.atomic import write_atomically

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_name("record.json")
# group -> the files and folders that its kernels are compiled from
GROUPS = {
    "attention": ("attention/flash", "attention/scores", "attention/dropout/kernel.py"),
    "cache": (
        "attention/decode",
        "attention/scores",
        "attention/flash/decode.py",
    ),
    "model": (
        "model/softmax_kernel.py",
        "model/dropout_kernel.py",
        "model/rotation_kernel.py",
        "model/norm_kernel.py",
    ),
    "exchange": ("recipe/distributed/pairwise_kernel.py",),
    "softmax": ("bench/attention/softmax.py",),
}


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
    """The file's content.

    files    group -> digest of its files when its kernels were compiled
    kernels  name -> entry
    """

    files: dict[str, str]
    kernels: dict[str, Entry]

    @classmethod
    def read(cls, path: Path = FILE) -> Self:
        """The record in a file; an empty one where there is none."""
        if not path.exists():
            return cls({}, {})
        content = json.loads(path.read_text(encoding="utf-8"))
        kernels = {
            name: Entry(line.pop("sources"), {version: Figures(*figures) for version, figures in line.items()})
            for name, line in content["kernels"].items()
        }
        return cls(content["files"], kernels)

    def write(self, path: Path = FILE) -> None:
        """A line for each kernel, in order of their names."""
        lines = (
            f"  {json.dumps(name)}: {json.dumps({'sources': entry.sources, **dict(sorted(entry.versions.items()))})}"
            for name, entry in sorted(self.kernels.items())
        )
        kernels = ",\n".join(lines)
        write_atomically(path, f'{{\n "files": {json.dumps(self.files)},\n "kernels": {{\n{kernels}\n }}\n}}\n')

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

    def digest(self, group: str) -> str | None:
        """A digest of the PTX of a group's kernels, with the newest Triton version that compiled all of them."""
        entries = {name: entry for name, entry in sorted(self.kernels.items()) if name.startswith(f"{group}/")}
        versions = sorted({version for entry in entries.values() for version in entry.versions})
        none = Figures("", 0, 0, 0, 0)
        complete = [v for v in versions if all(entry.versions.get(v, none).ptx for entry in entries.values())]
        if not complete:
            return None
        return short_digest(*(f"{name} {entry.versions[complete[-1]].ptx}" for name, entry in entries.items()))


def kernel_digests(root: Path = ROOT) -> dict[str, str]:
    """group -> digest of its kernels, of GROUPS, in the checkout at `root`.

    Computed from their PTX, or from their files where these changed since `make kernels` renewed the record.
    """
    record, digests = Record.read(root / FILE.relative_to(ROOT)), digests_of_files(root)
    return {
        group: (record.digest(group) if record.files.get(group) == files else None) or files
        for group, files in digests.items()
    }


def digests_of_files(root: Path = ROOT) -> dict[str, str]:
    """group -> digest of its files."""
    return {group: digest_of_files(root, paths) for group, paths in GROUPS.items()}


def digest_of_files(root: Path, paths: Iterable[str]) -> str:
    """A digest of the names and the code of Python files."""
    places = [root / path for path in paths]
    files = [file for place in places for file in (sorted(place.rglob("*.py")) if place.is_dir() else [place])]
    return short_digest(
        *(f"{file.relative_to(root).as_posix()} {code(file.read_text(encoding='utf-8'))}" for file in files)
    )


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
