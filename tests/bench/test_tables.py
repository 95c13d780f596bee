"""README and docs/ show the tables of bench/results/, and how they get there."""

import re

import pytest

from bench.machine import ROOT
from bench.record import RESULTS
from bench.tables import PLACE, TableError, main, pages

RESULT = "| ms |\n| --- |\n| 1 |\n\nGPU, 2026-11-21\n\n- `python -m bench.some`\n"


def test_every_table_is_up_to_date():
    assert main(["--check"]) == 0, "run `make tables`"


def test_every_result_is_shown_or_linked_and_no_table_of_figures_is_written_by_hand():
    text = {page: page.read_text() for page in pages(ROOT)}
    shown = {name for content in text.values() for name in re.findall(r"bench/results/([\w-]+)\.md\)", content)}
    results = {path.stem: path.read_text() for path in RESULTS.glob("*.md")}
    assert set(results) == shown, "a result that no page shows or links is removed"
    for path in RESULTS.glob("*.json"):
        assert any(f"({path.name})" in content for content in results.values()), f"{path.name} has no table"
    for page, content in text.items():
        by_hand = re.findall(r"^\|.*\d{2,}.*\|$", PLACE.sub("", content), re.MULTILINE)
        measured = [line for line in by_hand if re.search(r"\| \**\d[\d,.]*(/[\d,.]+| %|x)? ?(\(.*\))?\** \|", line)]
        assert not measured, f"{page.name}: a table with numbers that no result has"


@pytest.fixture
def page(tmp_path):
    """A page of a repository with one result."""
    (tmp_path / "README.md").touch()
    page = tmp_path / "docs" / "some.md"
    page.parent.mkdir()
    page.write_text("Before.\n\n<!-- table: some-gpu -->\n<!-- end -->\n\nAfter.\n")
    results = tmp_path / "bench" / "results"
    results.mkdir(parents=True)
    (results / "some-gpu.md").write_text(RESULT)
    return page


def test_a_table_is_pasted_with_its_source_and_then_up_to_date(page, capsys):
    root = page.parents[1]
    assert main(["--check"], root) == 1
    assert "out of date: docs/some.md: some-gpu" in capsys.readouterr().out
    assert main([], root) == 0
    pasted = "| ms |\n| --- |\n| 1 |\n\n*[GPU, 2026-11-21](../bench/results/some-gpu.md)*"
    assert page.read_text() == f"Before.\n\n<!-- table: some-gpu -->\n{pasted}\n<!-- end -->\n\nAfter.\n"
    assert main(["--check"], root) == 0
    (root / "bench" / "results" / "some-gpu.md").write_text(RESULT.replace("| 1 |", "| 2 |"))
    assert main(["--check"], root) == 1


def test_a_missing_result_is_named(page):
    page.write_text("<!-- table: nonsense -->\n<!-- end -->\n")
    with pytest.raises(TableError, match=r"some\.md shows the table nonsense, and there is no nonsense\.md"):
        main(["--check"], page.parents[1])
