"""The page is self-contained, and does not overflow in a browser, on a phone or on a desktop."""

import csv
import html
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipe.compare.page import write_report
from recipe.compare.runs import find_runs, read_run
from recipe.compare.tables import runs_csv, signed
from recipe.wording import percent, short_length, short_number, size, times
from tests.browser import needs_browser, opened
from tests.composing import as_it_is
from tests.recipe.compare.reading import runs_in
from tests.recipe.compare.synthetic import write_run, write_runs

PHONE, DESK = 390, 1280


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two sweeps with something of everything: seeds, lengths, a failure, an out-of-memory, odd names."""
    folder = tmp_path_factory.mktemp("sweep")
    write_runs(folder, seeds=(1, 2), steps=200)
    write_run(folder / "wall-naive-1024", "naive", steps=200, seq_len=1024, status="out_of_memory", stop=0)
    write_run(
        folder / "wall-flash-1024", "flash", steps=200, seq_len=1024, summary={"attention_path": "hopper forward"}
    )
    other = {"model.name": "<b>&other", "data.name": "odd_*text*", "data.path": "$\\frac$ _$x^$"}
    write_run(
        folder / "odd <name> | & more", "naive", steps=60, overrides=other, status="failed", message="no | <disk>"
    )
    return folder


@pytest.fixture(scope="module")
def report(folder):
    with as_it_is():
        return write_report(find_runs([folder]), folder / "report")


@pytest.fixture
def page(folder, report):
    return (folder / "report" / "index.html").read_text()


def test_every_file_is_written(folder, report):
    out = folder / "report"
    assert {path.name for path in out.iterdir()} == {"index.html", "runs.csv", "figures"}
    drawings = [drawing for section in report.sections for drawing in section.drawings]
    names = {drawing.chart.name.split("-")[1] for drawing in drawings}
    assert names == {"loss", "difference", "probe", "memory", "throughput", "crossover"}
    for drawing in drawings:
        png = (out / "figures" / f"{drawing.chart.name}.png").read_bytes()
        assert png.startswith(b"\x89PNG")
        assert len(png) > 10_000


def test_the_page_needs_nothing_but_itself_and_escapes_names_that_users_chose(page):
    assert not [part for part in ("<script", "<disk>", "<b>&other") if part in page]
    assert "odd &lt;name&gt; | &amp; more" in page
    assert "@import" not in page
    links = re.findall(r'(?:src|href)="([^"]*)"', page) + re.findall(r"url\(([^)]*)\)", page)
    assert links
    assert all(link.startswith(("#", "figures/", "data:,")) or link.endswith(".csv") for link in links)


def test_the_page_says_all_of_the_report(report, page):
    words = re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", page)))
    tables = [*(table for section in report.sections for table in section.tables), report.table]
    said = [
        report.headline.text,
        *report.notes,
        *(section.headline.text for section in report.sections),
        *(drawing.chart.caption for section in report.sections for drawing in section.drawings),
        *(cell for table in tables for row in table.rows for cell in row),
    ]
    for text in said:
        assert re.sub(r"\s+", " ", text).strip() in words


def test_no_two_elements_of_the_page_share_an_id(page):
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'(?:url\(|href=")#([^")]+)', page))
    assert used <= set(ids)


def test_sources_and_kernels_are_named(folder, page):
    for source in (str(folder), "0123456", "flash: hopper forward", "torch 2.11.0", "2026-11-20"):
        assert source in page


def test_the_numbers_can_be_copied(folder, report):
    runs = {run.name: run for run in runs_in(folder)}
    with (folder / "report" / "runs.csv").open(newline="") as file:
        rows = {row["run"]: row for row in csv.DictReader(file)}
    assert rows.keys() == runs.keys()
    assert float(rows["flash-2"]["val_loss"]) == runs["flash-2"].final("val/loss")
    assert rows["wall-naive-1024"]["status"] == "out_of_memory"
    assert "seq_len=1024" in rows["wall-flash-1024"]["settings"].split(", ")


def test_numbers_are_written_with_units_and_few_digits():
    assert [short_length(n) for n in (1000, 1024, 524288)] == ["1,000", "1k", "512k"]
    assert [short_number(x) for x in (0, 1.5e6, 40_000, 0.05, -1e-6)] == ["0", "1.5M", "40k", "0.05", "-10⁻⁶"]
    assert [size(x) for x in (0.00143, 0.17, 4.4e-6, 0)] == ["0.0014", "0.17", "4·10⁻⁶", "0"]
    assert [percent(x) for x in (0.00001, 0.1234, 1.63)] == ["under 0.1 %", "12 %", "160 %"]
    assert [times(x) for x in (0.04, 171.0, 1.36e149)] == ["0.04 times", "170 times", "over a billion times"]
    assert [signed(x) for x in (0.0, -3e-7, -0.01234)] == ["0", "-3e-07", "-0.0123"]


# A page for each width, in frames of one origin, which a script measures and writes down.
FRAMES = """<!doctype html><title>frames</title><pre id="measured"></pre>{frames}
<script>
addEventListener("load", () => {{
  const measured = [...document.querySelectorAll("iframe")].map(frame => {{
    const page = frame.contentDocument, root = page.documentElement;
    const box = node => node.getBoundingClientRect();
    return {{
      width: root.clientWidth,
      scrollWidth: root.scrollWidth,
      headline: page.querySelector("#headline")?.textContent,
      first: box(page.querySelector("figure > svg")).bottom,
      figures: [...page.querySelectorAll("figure > svg")].map(svg => [box(svg).width, box(svg).height]),
      smallest: Math.min(...[...page.querySelectorAll("figure text")].map(text => box(text).height)),
      outside: [...page.querySelectorAll("figure text")].filter(text => {{
        const a = box(text), b = box(text.closest("svg"));
        return a.left < b.left - 1 || a.right > b.right + 1 || a.top < b.top - 1 || a.bottom > b.bottom + 1;
      }}).map(text => text.textContent),
      cut: [...page.querySelectorAll(".scroll")].filter(table => table.scrollWidth > table.clientWidth + 1).length,
      background: getComputedStyle(page.body).backgroundColor,
    }};
  }});
  document.querySelector("#measured").textContent = JSON.stringify(measured);
}});
</script>"""


def open_in_browser(page: str, folder: Path, *flags: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The measurements of `page` at both widths, and the messages of the browser's console."""
    frames = "".join(
        f'<iframe srcdoc="{html.escape(page)}" style="width:{width}px;height:900px;border:0"></iframe>'
        for width in (PHONE, DESK)
    )
    file = folder / "frames.html"
    file.write_text(FRAMES.format(frames=frames))
    done = opened(file.as_uri(), folder / "profile", "--hide-scrollbars", *flags)
    found = re.search(r'<pre id="measured">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr
    return json.loads(html.unescape(found[1])), [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def assert_readable(frame: dict[str, Any]) -> None:
    assert frame["scrollWidth"] <= frame["width"], "the page scrolls sideways"
    assert frame["smallest"] >= 8, "labels are too small to read"
    assert frame["outside"] == [], "labels are cut off"


@needs_browser
def test_a_browser_shows_the_page_on_a_phone_on_a_desk_and_in_the_dark(page, report, tmp_path):
    wrong = page.replace("</body>", "<script>nothing()</script></body>")  # which the console shows, and nothing else
    measured, console = open_in_browser(wrong, tmp_path)
    assert ["nothing is not defined" in line for line in console] == [True, True], console
    assert [frame["width"] for frame in measured] == [PHONE, DESK]
    for frame in measured:
        assert frame["headline"] == report.headline.text
        assert len(frame["figures"]) == sum(len(section.drawings) for section in report.sections)
        assert all(width > 250 and height > 80 for width, height in frame["figures"])
        assert_readable(frame)
    assert measured[1]["cut"] == 0, "a table is cut off on a desk"
    dark, _ = open_in_browser(page, tmp_path, "--blink-settings=preferredColorScheme=0")
    brightness = [sum(map(int, re.findall(r"\d+", frames[0]["background"])[:3])) for frames in (measured, dark)]
    assert brightness[0] > 700
    assert brightness[1] < 100


def test_a_cell_that_a_stranger_wrote_is_no_formula(tmp_path):
    wrote = ["=1+2", "@SUM(A1)", "+cmd|x", "-cmd|x", "-2+3+cmd|x", "-0.1 ± 0.2", "+0.5", "-"]
    run = read_run(write_run(tmp_path / "a", stop=0))
    names = [f"{n}{cell}" for n, cell in enumerate(wrote)]
    runs = [replace(run, name=name) for name in names]
    text = runs_csv(runs, dict(zip(names, wrote, strict=True)), dict.fromkeys(names, ""))
    cells = [row["implementation"] for row in csv.DictReader(text.splitlines())]
    assert cells == ["'=1+2", "'@SUM(A1)", "'+cmd|x", "'-cmd|x", "'-2+3+cmd|x", *wrote[5:]]
