"""A text of 50 million tokens or more that is on every machine: the source of installed Python packages."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("torch", "transformers", "sympy", "scipy", "pandas")


def sources(cache: Path) -> Path:
    """A folder with the .py files of all installed PACKAGES, copied once as .txt files."""
    folder = cache / "python-sources"
    if not folder.exists():
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for package in PACKAGES:
            spec = find_spec(package)
            root = Path(spec.origin).parent if spec and spec.origin else None
            for n, file in enumerate(sorted(root.rglob("*.py")) if root else []):
                shutil.copy(file, partial / f"{package}-{n:05}.txt")
        partial.rename(folder)
    return folder
