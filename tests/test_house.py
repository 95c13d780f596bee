"""The structure: modules import only from lower layers, never in a circle, and no package outgrows its budget."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from bench.sizes import BUDGETS, MOST_FILES, MOST_OPTIONS, MOST_WORDS, code_tokens, sizes, words
from recipe.run.config import keys

ROOT = Path(__file__).parents[1]
# From the bottom up; those that share a line do not know each other.
PACKAGES = (
    ("attention", "data", "mixers"),
    ("model",),
    ("recipe",),
    ("train", "sample", "compare", "eval", "learn"),
    ("bench",),
)
# The packages of the recipe; what stands above them is for all.
ROOMS = (
    ("wording",),
    ("errors",),
    ("files", "drawing"),
    ("distributed",),
    ("training",),
    ("run",),
    ("infer",),
    ("compare",),
)

Imports = dict[str, set[str]]


def modules(root: Path) -> dict[str, Path]:
    """Name -> file of every module of the packages and scripts."""
    names = [name for line in PACKAGES for name in line]
    files = [file for name in names for file in (*root.glob(f"{name}.py"), *(root / name).rglob("*.py"))]
    return {".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def imported(name: str, file: Path) -> Iterator[str]:
    """The full names that a module imports anywhere, also in functions, but not for a type checker alone."""
    package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    waiting: list[ast.AST] = [ast.parse(file.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            waiting += node.orelse
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


@cache
def imports(root: Path) -> Imports:
    """Which modules each module imports: a name that is imported from a module counts as that module."""
    known = modules(root)
    found: Imports = {}
    for name, file in known.items():
        targets = (target if target in known else target.rpartition(".")[0] for target in imported(name, file))
        found[name] = {target for target in targets if target in known} - {name}
    return found


def arrows_up(found: Imports, order: tuple[tuple[str, ...], ...], depth: int) -> list[str]:
    """The imports that do not lead down in `order`, which ranks the parts of names at a depth."""
    level = {name: i for i, line in enumerate(order) for name in line}
    wrong = []
    for name, targets in found.items():
        for target in targets:
            own, other = name.split(".")[depth:][:1], target.split(".")[depth:][:1]
            if name.split(".")[:depth] != target.split(".")[:depth] or not own or not other or own == other:
                continue
            if level[own[0]] <= level[other[0]]:
                wrong.append(f"{name} imports {target}")
    return sorted(wrong)


def cycle(found: Imports) -> list[str]:
    """Modules that import each other in a circle; empty where there are none."""
    try:
        TopologicalSorter(found).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_each_other_in_a_circle():
    assert not cycle(imports(ROOT))


def test_packages_import_only_those_below_them():
    assert not arrows_up(imports(ROOT), PACKAGES, depth=0)


def test_rooms_of_the_recipe_import_only_those_below_them():
    found = {name: targets for name, targets in imports(ROOT).items() if name.startswith("recipe.")}
    assert not arrows_up(found, ROOMS, depth=1)


@pytest.mark.parametrize(
    ("lower", "wrong"),
    [
        ("import recipe.training.b", True),
        ("from recipe.training import b", True),
        ("from recipe.training.b import f", True),
        ("def late():\n    from ..training.b import f", True),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import recipe.training.b", False),
    ],
)
def test_an_arrow_up_and_a_circle_are_noticed_however_they_are_written(tmp_path, lower, wrong):
    for room, content in (("errors", lower), ("training", "from recipe.errors.b import g")):
        (tmp_path / "recipe" / room).mkdir(parents=True)
        (tmp_path / "recipe" / room / "b.py").write_text(content)
    found = imports(tmp_path)
    assert found["recipe.training.b"] == {"recipe.errors.b"}
    assert arrows_up(found, ROOMS, depth=1) == (["recipe.errors.b imports recipe.training.b"] if wrong else [])
    assert bool(cycle(found)) == wrong


def test_no_package_outgrows_its_budget():
    found = sizes()
    assert {name: size.tokens for name, size in found.items() if size.tokens > BUDGETS[name]} == {}
    assert sum(size.files for name, size in found.items() if name != "tests") <= MOST_FILES
    assert sum(size.tokens for name, size in found.items() if name != "tests") <= 348_000
    assert words() <= MOST_WORDS
    assert len(list(keys())) <= MOST_OPTIONS


@pytest.mark.parametrize(
    ("source", "tokens"),
    [("x = 1", 3), ('"""A module."""\n# why\nx = 1\n', 3), ('def f():\n    """Says."""\n    return f"{1} {2}"\n', 7)],
)
def test_docstrings_and_comments_are_free_and_an_f_string_is_one_token(source, tokens):
    assert code_tokens(source) == tokens
