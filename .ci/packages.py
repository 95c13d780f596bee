"""What pyproject.toml's extras need besides torch and Triton, for pip: python .ci/packages.py dev,docs"""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

EXTRAS = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]


def packages(extras: str) -> Iterator[str]:
    """The packages of extras, and of those that they name."""
    for package in (package for extra in extras.split(",") for package in EXTRAS[extra]):
        of_this_project = re.fullmatch(r"gpt-attention\[(.*)\]", package)
        yield from packages(of_this_project[1]) if of_this_project else [package]


print(*sorted(set(packages(sys.argv[1]))))
