"""The report: one self-contained page of HTML, with its figures and the runs as CSV next to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from data.errors import first_few
from recipe.compare.figures import charts
from recipe.compare.headline import Headline, headline, notes_on
from recipe.compare.labels import Place, places
from recipe.compare.parity import judge
from recipe.compare.runs import Run, RunSet
from recipe.compare.sweeps import Sweep, labels_of, sweeps_of
from recipe.compare.tables import Table, ablation_table, cell_table, parity_table, run_table, runs_csv
from recipe.compare.verdict import Outcome, Verdict, outcome_of
from recipe.drawing import Chart, render_png, render_svg
from recipe.files import number
from recipe.training.parity import PARITY_MARGIN

TEMPLATES = Path(__file__).parent / "templates"


class Drawing(NamedTuple):
    """A figure in its renderings; `path` is the path of its files, relative to the page and without suffix."""

    path: str
    title: str
    caption: str
    svg: Markup


class Section(NamedTuple):
    """The report's section on one sweep; `prefix` distinguishes its files and ids from other sweeps'."""

    prefix: str
    title: str
    subtitle: str
    headline: Headline
    drawings: tuple[Drawing, ...]
    tables: tuple[Table, ...]


class Report(NamedTuple):
    """Everything the templates show."""

    headline: str
    tone: str
    outcome: Outcome | None  # the parity verdict, where implementations were compared
    lines: tuple[tuple[str, str], ...]  # an arm, and what was found, for the terminal
    sections: tuple[Section, ...]
    notes: tuple[str, ...]
    runs: Table
    sources: tuple[tuple[str, str], ...]
    method: str | None = None  # the template that explains how the verdicts are reached
    lead: Drawing | None = None  # stands beside the headline
    commands: tuple[tuple[str, str], ...] = ()  # the next step, and its command


def write_report(run_set: RunSet, out: Path, reference: str = "naive") -> Report:
    """Write index.html, runs.csv and figures/ into `out`.

    reference  the label of the implementation that the others are compared with
    """
    runs, labels = run_set.runs, labels_of(run_set.runs)
    sweeps = sweeps_of(runs)
    cells = [cell for sweep in sweeps for cell in sweep.cells]
    found_at = places([cell.runs for cell in cells])
    where = {run.name: ", ".join(place) for cell, place in zip(cells, found_at, strict=True) for run in cell.runs}
    differing = places([sweep.runs for sweep in sweeps])
    verdicts = [judge(sweep.cells, reference) for sweep in sweeps]
    sections = tuple(
        _section(sweep, found, reference, f"{n}-" if len(sweeps) > 1 else "", settings, out)
        for n, (sweep, found, settings) in enumerate(zip(sweeps, verdicts, differing, strict=True), 1)
    )
    spoken = next((section.headline for section in sections if section.headline.tone == "broken"), sections[0].headline)
    outcome = outcome_of([verdict for found in verdicts for verdict in found if verdict.agreements])
    report = Report(
        headline=spoken.text,
        tone=spoken.tone,
        outcome=outcome,
        lines=(),
        sections=sections,
        notes=tuple(notes_on(run_set, sweeps)),
        runs=run_table(runs, labels, where),
        sources=sources_of(runs),
        method="method.j2" if outcome else None,
    )
    write_page(report, out, runs_csv(runs, labels, where), reference=reference, margin=f"{PARITY_MARGIN:g}")
    return report


def write_page(report: Report, out: Path, csv: str, **shown: Any) -> None:
    """Write index.html and runs.csv.

    csv    the runs as numbers
    shown  values for the template of the method
    """
    shown["report"] = report
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), undefined=jinja2.StrictUndefined, autoescape=True,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    page = environment.get_template("index.html.j2").render(shown)
    (out / "index.html").write_text(page, encoding="utf-8")
    (out / "runs.csv").write_text(csv, encoding="utf-8")


def _section(
    sweep: Sweep, verdicts: Sequence[Verdict], reference: str, prefix: str, settings: Place, out: Path
) -> Section:
    """Draw and describe a sweep.

    verdicts  on its implementations
    prefix    of its files and ids
    settings  the ones that differ from other sweeps
    """
    found = headline(sweep, verdicts, reference)
    model, data = (_all_of(str(run.option(f"{part}.name", part)) for run in sweep.runs) for part in ("model", "data"))
    title = ", ".join(filter(None, (f"{model} on {data}", first_few(settings))))
    drawings = tuple(draw(chart, out) for chart in charts(sweep, verdicts, reference, prefix))
    tables = parity_table(verdicts, reference), cell_table(sweep), ablation_table(sweep.runs)
    return Section(prefix, title, subtitle(sweep.runs), found, drawings, tuple(table for table in tables if table))


def subtitle(runs: Sequence[Run]) -> str:
    """The model, the score, the lengths, the dropout, the precision and the devices of runs, in a line."""
    sizes = {"layers": "layer", "heads": "head", "embd": "channel"}
    parts = [
        ", ".join(_from_to([run.option(f"model.n_{key}") for run in runs], unit) for key, unit in sizes.items()),
        f"score {_all_of(_score(run) for run in runs)}",
        f"seq_len {_from_to([run.seq_len for run in runs])}",
        f"dropout {_all_of(format(run.option('attention.dropout') or 0.0, 'g') for run in runs)}",
        _all_of(run.precision for run in runs),
        _all_of(f"{run.devices} x {run.device}" if run.devices > 1 else run.device for run in runs),
    ]
    return " · ".join(parts)


def _score(run: Run) -> str:
    """The preset and what is set in it, without its tensors: "causal (window=16)"."""
    options = {
        name: run.option(f"score.{name}") for name in ("window", "soft_cap", "alibi", "sinks", "formula", "layers")
    }
    chosen = ", ".join(f"{name}={value}" for name, value in options.items() if value)
    return f"{run.option('score.name') or 'causal'}" + (f" ({chosen})" if chosen else "")


def _from_to(values: Sequence[Any], unit: str = "") -> str:
    """The smallest and the largest of some counts, with their unit: "32 to 64 channels"."""
    known = sorted({int(value) for value in values if number(value) is not None})
    counts = " to ".join(f"{value:,}" for value in sorted({*known[:1], *known[-1:]})) or "?"
    return f"{counts} {unit}{'' if known == [1] else 's'}" if unit else counts


def _all_of(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(value for value in values if value)) or "not recorded"


def draw(chart: Chart, out: Path) -> Drawing:
    """The renderings of a figure, with its files below `out`."""
    path = f"figures/{chart.name}"
    (out / path).parent.mkdir(parents=True, exist_ok=True)
    (out / f"{path}.png").write_bytes(render_png(chart))
    svg = Markup(render_svg(chart))  # drawn here, from numbers and escaped labels
    return Drawing(path, chart.title, chart.caption, svg)


def sources_of(runs: Sequence[Run]) -> tuple[tuple[str, str], ...]:
    """The origin of the report's runs, as (name, text)."""
    versions = [run.recorded("versions") for run in runs]
    kernels = [f"{run.attention}: {path}" for run in runs if (path := run.summary.get("attention_path"))]
    listed = [notes for run in runs if isinstance(notes := run.summary.get("data_notes"), list)]
    of_text = [str(note).rstrip(".") for notes in listed for note in notes]
    return (
        ("Run folders", _all_of(str(run.folder.parent) for run in runs)),
        *([("Kernels", _all_of(kernels))] if kernels else []),
        *([("Text", _all_of(of_text))] if of_text else []),
        ("Commits", _all_of(run.commit for run in runs)),
        ("Software", _all_of(", ".join(f"{name} {v}" for name, v in version.items() if v) for version in versions)),
        ("Run on", _all_of(sorted(str(run.summary.get("started") or "")[:10] for run in runs))),
    )
