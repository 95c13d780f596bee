"""The tables and figures of README and docs/ are those of bench/results/; and how blocks are written."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bench.markdown import pivot, table
from bench.record import RESULTS
from bench.tables import blocks
from bench.tables.__main__ import main
from bench.tables.blocks import BLOCK, BLOCKS, FIGURES, Source, load_all, pages, stale_blocks, stale_figures, written

load_all()


def test_every_table_is_up_to_date() -> None:
    assert list(stale_blocks()) == [], "run `make tables`"


def test_every_figure_is_up_to_date() -> None:
    assert stale_figures() == [], "run `make tables`"


def test_every_block_and_figure_is_shown_and_no_table_of_figures_is_written_by_hand() -> None:
    text = {page: page.read_text() for page in pages()}
    shown = {name for content in text.values() for _, name, _ in BLOCK.findall(content)}
    assert set(BLOCKS) == shown - {blocks.PROVENANCE}
    for name in FIGURES:
        assert any(f"images/{name}.png" in content for content in text.values()), name
    for page, content in text.items():
        by_hand = re.findall(r"^\|.*\d{2,}.*\|$", BLOCK.sub("", content), re.MULTILINE)
        measured = [line for line in by_hand if re.search(r"\| \**\d[\d,.]*(/[\d,.]+| %|x)? ?(\(.*\))?\** \|", line)]
        assert not measured, f"{page.name}: a table with numbers that bench.tables does not write"


def test_every_result_file_is_shown() -> None:

    shown = {
        blocks.results_path(name).name for source in (*BLOCKS.values(), *FIGURES.values()) for name in source.files
    }
    assert {path.name for path in RESULTS.iterdir()} == shown


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A repository of one page and one result file with 1 ms for flash."""
    (tmp_path / "docs" / "images").mkdir(parents=True)
    page = tmp_path / "README.md"
    page.write_text("Before.\n\n<!-- generated: some -->\n<!-- end -->\n\nAfter.\n")
    results = tmp_path / "results"
    results.mkdir()
    measure(results, 1)
    for name, value in {
        "ROOT": tmp_path, "RESULTS": results, "IMAGES": tmp_path / "docs" / "images",
        "DRAWN": tmp_path / "docs" / "images" / "drawn.json", "GPU": "gpu",
        "BLOCKS": {"some": Source(("some",), lambda rows: f"{rows[0]['ms']} ms")}, "FIGURES": {},
        "load_all": lambda: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(blocks, name, value)
    monkeypatch.setattr("bench.tables.__main__.load_all", lambda: None)
    return page


def measure(results: Path, ms: int) -> None:
    head = {"device": "GPU", "versions": {"torch": "2.11.0+cu130"}, "date": f"2026-11-2{ms}T10:00:00+00:00"}
    (results / "some-gpu.json").write_text(json.dumps({"measurements": [head], "rows": [{"ms": ms, "measurement": 0}]}))


def test_a_block_is_written_between_its_markers_and_then_up_to_date(site, capsys):
    assert main(["--check"]) == 1
    assert "out of date: README.md: some" in capsys.readouterr().out
    assert main([]) == 0
    assert site.read_text() == "Before.\n\n<!-- generated: some -->\n1 ms\n<!-- end -->\n\nAfter.\n"
    assert main(["--check"]) == 0


def test_a_new_measurement_makes_the_block_stale(site):
    main([])
    measure(site.parent / "results", 2)
    assert list(stale_blocks()) == ["README.md: some"]
    main([])
    assert "2 ms" in site.read_text()


def test_provenance_is_one_line_of_all_measurements_of_the_page(site):
    site.write_text(site.read_text() + "\n<!-- generated: provenance -->\n<!-- end -->\n")
    assert written(site.read_text(), site).splitlines()[-2] == (
        "*Measured on GPU (torch 2.11, 2026-11-21). Commands and commits: [bench/results](bench/results).*"
    )


def test_an_unknown_block_is_named(site):
    site.write_text("<!-- generated: nonsense -->\n<!-- end -->\n")
    with pytest.raises(blocks.TableError, match=r"README\.md has a block nonsense"):
        main(["--check"])


def test_a_missing_result_file_is_named(site):
    (site.parent / "results" / "some-gpu.json").unlink()
    with pytest.raises(blocks.TableError, match=r"there is no result file some-gpu\.json"):
        main(["--check"])


def test_a_pivot_has_a_gap_where_nothing_was_measured():
    rows = [{"name": "a", "n": 1}, {"name": "a", "n": 2}, {"name": "b", "n": 2}]
    text = pivot(rows, lambda row: row["name"], lambda row: str(row["n"]), lambda row: f"{row['n']} ms")
    assert text.splitlines() == ["| | 1 | 2 |", "| --- | --- | --- |", "| a | 1 ms | 2 ms |", "| b | | 2 ms |"]


def test_empty_cells_side_by_side_stay_cells():
    assert table(["", "x", "y", "z"], [["a", "", "", ""]]).splitlines()[2] == "| a | | | |"
