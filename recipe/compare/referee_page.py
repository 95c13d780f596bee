"""What the referee shows: the leaderboard of a track, and the page on an edit."""

from pathlib import Path
from typing import Any

from recipe.compare.headline import Headline
from recipe.compare.page import Report, Section, subtitle, write_page
from recipe.compare.referee import KEPT, Judge
from recipe.compare.runs import find_runs
from recipe.compare.tables import DASH, Table, bounds, signed, table
from recipe.files import to_json

COLUMNS = ["edit", "commit", "bits per byte", "interval", "pairs", "seconds", "who", "when"]
CAPTION = (
    "Bits per byte: the difference to the best commit before it, with an interval that holds at every pair (95 %)."
)


def leaderboard(judge: Judge) -> Table:
    """The edits that were kept, after the baseline."""
    rows = [["0", judge.track.baseline[:12], *[DASH] * 6]]
    rows += [
        [
            str(number),
            named(edit),
            signed(edit["difference"]),
            bounds((float(edit["interval"][0]), float(edit["interval"][1]))),
            str(len(edit["pairs"])),
            f"{edit['seconds']:.0f}",
            edit["who"],
            edit["when"],
        ]
        for number, edit in enumerate(judge.ledger.edits, 1)
        if edit["verdict"] == KEPT
    ]
    return table("leaderboard", f"{len(judge.ledger.edits)} edits, {len(rows) - 1} kept", COLUMNS, rows, CAPTION)


def named(edit: dict[str, Any]) -> str:
    """A commit, with its salt."""
    return edit["commit"][:12] + (f" salt={edit['salt']}" if edit["salt"] else "")


def verdict(edit: dict[str, Any]) -> str:
    """What became of an edit, and why."""
    return f"{named(edit)}: {edit['verdict']}, {edit['reason']}"


def write_referee_page(judge: Judge, edit: dict[str, Any]) -> Path | None:
    """Write index.html, runs.csv and referee.json on an edit into the judge's folder. Returns the page, or None for an
    edit that was judged elsewhere: its runs are not here."""
    folders = [judge.home / "runs" / f"{one['commit'][:12]}-{one['salt']}" for one in (edit["best"], edit)]
    if not all(map(Path.is_dir, folders)):
        return None
    found = find_runs(folders)
    labels = {run.name: run.name.partition("/")[0] for run in found.runs}
    pairs = [
        [str(one["seed"]), signed(float(one["difference"])), f"{one['log_evidence']:.2f}"] for one in edit["pairs"]
    ]
    headline = Headline(verdict(edit), "better" if edit["verdict"] == KEPT else "undecided")
    tables = table("pairs", "Edit less best", ["seed", "bits per byte", "log evidence"], pairs), leaderboard(judge)
    section = Section("", f"Track {judge.name}", subtitle(found.runs), headline, (), tables)
    report = Report(headline, (section,), found.notes, found.runs, labels, dict.fromkeys(labels, ""), "commit")
    write_page(report, judge.home)
    (judge.home / "referee.json").write_text(to_json(edit, indent=2) + "\n", encoding="utf-8")
    return judge.home / "index.html"
