"""The report itself: one page of HTML that needs nothing else, the same as Markdown, figures and CSV beside it."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from report.draw import Chart, css_variables, render_png, render_svg
from report.figures import charts
from report.parity import Outcome, Verdict, judge, outcome_of
from report.runs import Run, RunSet
from report.sweeps import Sweep, labels_of, settings_apart, sweeps_of
from report.tables import Table, curves_csv, run_table, runs_csv, tables_of
from report.text import Answer, answer, notes_on
from run_folder import PARITY_MARGIN

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Drawing:
    """A figure in its renderings; `path` is that of its files, without their ending, relative to the page."""

    path: str
    title: str
    caption: str
    svg: Markup


@dataclass(frozen=True)
class Section:
    """What there is to say about one sweep; `prefix` sets its files and ids apart from other sweeps'."""

    prefix: str
    title: str
    subtitle: str
    answer: Answer
    drawings: tuple[Drawing, ...]
    tables: tuple[Table, ...]


@dataclass(frozen=True)
class Report:
    """Everything the templates show."""

    headline: str
    tone: str
    outcome: Outcome | None  # of parity, where implementations were compared
    sections: tuple[Section, ...]
    notes: tuple[str, ...]
    runs: Table
    sources: tuple[tuple[str, str], ...]


def write_report(found: RunSet, out: Path, reference: str = "naive") -> Report:
    """Write index.html, report.md, runs.csv, curves.csv and figures/ into `out`.

    reference  the label of the implementation that the others are compared with
    """
    runs, labels = found.runs, labels_of(found.runs)
    sweeps = sweeps_of(runs)
    verdicts = judge([cell for sweep in sweeps for cell in sweep.cells], reference)
    decisive = [verdict for verdict in verdicts if verdict.decisive]
    places = settings_apart([sweep.cells[0].runs[0] for sweep in sweeps])
    where = {
        run.name: ", ".join(dict.fromkeys([*places[n], *cell.where]))
        for n, sweep in enumerate(sweeps)
        for cell in sweep.cells
        for run in cell.runs
    }
    (out / "figures").mkdir(parents=True, exist_ok=True)
    sections = tuple(
        _section(sweep, verdicts, reference, f"{n + 1}-" if len(sweeps) > 1 else "", [*places[n]], out)
        for n, sweep in enumerate(sweeps)
    )
    spoken = next((s for s in sections if s.answer.tone == "broken"), sections[0])
    report = Report(
        headline=spoken.answer.headline,
        tone=spoken.answer.tone,
        outcome=outcome_of(decisive),
        sections=sections,
        notes=tuple(notes_on(found, sweeps)),
        runs=run_table(runs, labels, where),
        sources=_sources(runs),
    )
    shown = {"report": report, "reference": reference, "margin": f"{PARITY_MARGIN:g}"}
    light, dark = Markup(css_variables(dark=False)), Markup(css_variables(dark=True))
    page = _environment(autoescape=True).get_template("index.html.j2").render(shown, light=light, dark=dark)
    (out / "index.html").write_text(page, encoding="utf-8")
    markdown = _environment(finalize=escape_markdown).get_template("report.md.j2").render(shown)
    (out / "report.md").write_text(markdown, encoding="utf-8")
    (out / "runs.csv").write_text(runs_csv(runs, labels, where), encoding="utf-8")
    (out / "curves.csv").write_text(curves_csv(runs, labels), encoding="utf-8")
    return report


def _environment(**options: Any) -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        **options,
    )


def escape_markdown(value: Any) -> str:
    """What Markdown shows as it stands: no markup, no HTML, no end of a cell or line."""
    text = re.sub(r"([\\`*<>\[\]|~]|&(?=#|\w+;)|(?<!\w)_|_(?!\w))", r"\\\1", str(value))
    return " ".join(text.split("\n"))


def _section(
    sweep: Sweep, verdicts: Sequence[Verdict], reference: str, prefix: str, settings: Sequence[str], out: Path
) -> Section:
    """Draw and describe a sweep.

    prefix    of its files and ids
    settings  that set it apart from other sweeps
    """
    own = [verdict for verdict in verdicts if any(verdict.cell is cell for cell in sweep.cells)]
    drawings = tuple(_draw(chart, out) for chart in charts(sweep, own, reference, prefix))
    run = sweep.runs[0]

    def all_of(value: Callable[[Run], str]) -> str:
        return ", ".join(dict.fromkeys(value(run) for run in sweep.runs))

    lengths = sorted({cell.seq_len for cell in sweep.cells})
    subtitle = [
        f"{run.option('model.n_layers', '?')} layers, {run.option('model.n_heads', '?')} heads, "
        f"{run.option('model.n_embd', '?')} channels",
        f"seq_len {lengths[0]:,}" + (f" to {lengths[-1]:,}" if len(lengths) > 1 else ""),
        f"dropout {all_of(lambda run: format(run.option('attention.dropout') or 0.0, 'g'))}",
        all_of(lambda run: run.precision),
        all_of(lambda run: f"{run.devices} x {run.device}" if run.devices > 1 else run.device),
        *settings,
    ]
    title = f"{run.option('model.name', 'model')} on {run.option('data.name', 'data')}"
    tables = tuple(tables_of(sweep, own, reference))
    return Section(prefix, title, " · ".join(subtitle), answer(sweep, own, reference), drawings, tables)


def _draw(chart: Chart, out: Path) -> Drawing:
    path = f"figures/{chart.name}"
    (out / f"{path}.png").write_bytes(render_png(chart, dark=False))
    (out / f"{path}-dark.png").write_bytes(render_png(chart, dark=True))
    return Drawing(
        path, chart.title, chart.caption, Markup(render_svg(chart))
    )  # drawn here, from numbers and escaped labels


def _sources(runs: Sequence[Run]) -> tuple[tuple[str, str], ...]:
    """What the report was made from, in words."""

    def all_of(values: list[str]) -> str:
        return ", ".join(dict.fromkeys(value for value in values if value)) or "not recorded"

    dates = sorted(str(run.summary.get("started") or "")[:10] for run in runs if run.summary.get("started"))
    versions = [run.recorded("versions") for run in runs]
    return (
        ("Run folders", all_of([str(run.folder.parent) for run in runs])),
        ("Devices", all_of([run.device for run in runs])),
        ("Precision", all_of([run.precision for run in runs])),
        ("Commits", all_of([run.commit for run in runs])),
        ("Software", all_of([", ".join(f"{name} {v}" for name, v in version.items() if v) for version in versions])),
        ("Run on", " to ".join(dict.fromkeys([dates[0], dates[-1]])) if dates else "not recorded"),
        ("Written on", datetime.date.today().isoformat()),
    )
