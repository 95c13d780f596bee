"""The report itself: one page of HTML that needs nothing else, the same as Markdown, figures and CSV beside it."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
from markupsafe import Markup

from report.draw import Chart, css_variables, render_png, render_svg, standalone_svg
from report.evidence import MARGIN, WINDOW
from report.figures import charts
from report.findings import findings
from report.groups import Family, differing_settings, family_runs
from report.parity import Verdict, judge_groups
from report.record import Run
from report.runs import RunSet
from report.tables import (
    Table,
    ablation_table,
    block_table,
    context_table,
    crossover_table,
    curves_csv,
    judgement_table,
    run_table,
    runs_csv,
    wall_table,
)

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
    """What there is to say about one family of runs; `prefix` sets its files and ids apart from other families'."""

    prefix: str
    title: str
    subtitle: str
    findings: tuple[str, ...]
    drawings: tuple[Drawing, ...]
    tables: tuple[Table, ...]


@dataclass(frozen=True)
class Report:
    """Everything the templates show."""

    verdict: Verdict
    headline: str
    tone: str
    sections: tuple[Section, ...]
    notes: tuple[str, ...]
    runs: Table
    sources: tuple[tuple[str, str], ...]


def write_report(found: RunSet, out: Path, reference: str = "naive") -> Report:
    """Write index.html, report.md, runs.csv, curves.csv and figures/ into `out`.

    reference  the label of the implementation that the others are compared with
    """
    runs = found.runs
    families = family_runs(runs)
    verdict = judge_groups([group for family in families for group in family.groups], reference)
    (out / "figures").mkdir(parents=True, exist_ok=True)
    sections = tuple(
        _section(family, verdict, reference, f"{n}-" if len(families) > 1 else "", settings, out)
        for n, (family, settings) in enumerate(zip(families, _own_settings(families), strict=True), start=1)
    )
    headline, tone = _headline(verdict, families)
    report = Report(
        verdict=verdict,
        headline=headline,
        tone=tone,
        sections=sections,
        notes=(*_family_notes(families), *found.notes, *(note for run in runs for note in run.notes)),
        runs=run_table(runs),
        sources=_sources(runs),
    )
    context = {"report": report, "method": _method(reference)}
    html = _environment(autoescape=True).get_template("index.html.j2")
    page = html.render(context, light=Markup(css_variables(dark=False)), dark=Markup(css_variables(dark=True)))
    (out / "index.html").write_text(page, encoding="utf-8")
    markdown = _environment(autoescape=False).get_template("report.md.j2").render(context)
    (out / "report.md").write_text(markdown, encoding="utf-8")
    (out / "runs.csv").write_text(runs_csv(runs), encoding="utf-8")
    (out / "curves.csv").write_text(curves_csv(runs), encoding="utf-8")
    return report


def _environment(autoescape: bool) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=autoescape,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters["cell"] = lambda text: text.replace("|", "\\|").replace("\n", " ")
    return environment


def _section(
    family: Family, verdict: Verdict, reference: str, prefix: str, settings: Sequence[str], out: Path
) -> Section:
    """Draw and describe a family.

    prefix    of its files and ids
    settings  that set it apart from other families and that no subtitle names, in words
    """
    judgements = [j for j in verdict.judgements if any(j.group is group for group in family.groups)]
    drawings = [_draw(chart, out) for chart in charts(family, judgements, reference, prefix)]
    tables = [
        judgement_table(telling, reference) if (telling := [j for j in judgements if j.telling]) else None,
        ablation_table(family.runs, reference),
        wall_table(family),
        crossover_table(family, reference) if len(family.groups) > 1 else None,
        block_table(family, judgements),
        context_table(family),
    ]
    run = family.runs[0]
    lengths = [group.seq_len for group in family.groups]
    length = f"{lengths[0]:,}" if len(lengths) == 1 else f"{lengths[0]:,} to {lengths[-1]:,}"
    subtitle = [
        f"{run.option('model.n_layers', '?')} layers, {run.option('model.n_heads', '?')} heads, "
        f"{run.option('model.n_embd', '?')} channels",
        f"seq_len {length}",
        f"dropout {run.option('attention.dropout', 0.0):g}",
        run.precision,
        run.device,
        *settings,
    ]
    title = f"{run.option('model.name', 'model')} on {run.option('data.name', 'data')}"
    found = tuple(findings(family, reference))
    shown = tuple(table for table in tables if table)
    return Section(prefix, title, " · ".join(subtitle), found, tuple(drawings), shown)


# What a section's title and subtitle say of every family.
_SAID = (
    "data.name",
    "model.n_layers",
    "model.n_heads",
    "model.n_embd",
    "seq_len",
    "attention.dropout",
    "training.precision",
    "device",
)


def _own_settings(families: Sequence[Family]) -> list[list[str]]:
    """For each family, the settings that tell it from the others, beside those in _SAID: "optimizer.lr 0.1"."""
    differing = differing_settings([family.groups[0] for family in families])
    names = [name for name in differing if name not in _SAID]
    return [[f"{name} {differing[name][n]}" for name in names] for n in range(len(families))]


def _headline(verdict: Verdict, families: Sequence[Family]) -> tuple[str, str]:
    """What the page says first, and its tone: holds, broken, open, or none where parity was not what was measured."""
    if verdict.holds is not None:
        return ("Parity holds", "holds") if verdict.holds else ("Parity is broken", "broken")
    if any(judgement.telling for judgement in verdict.judgements):
        return "Parity is open", "open"
    lengths = any(len(family.groups) > 1 for family in families)
    return ("Over the sequence length", "none") if lengths else ("Parity was not measured", "open")


def _draw(chart: Chart, out: Path) -> Drawing:
    svg = render_svg(chart)
    path = f"figures/{chart.name}"
    (out / f"{path}.svg").write_text(standalone_svg(svg), encoding="utf-8")
    (out / f"{path}.png").write_bytes(render_png(chart, dark=False))
    (out / f"{path}-dark.png").write_bytes(render_png(chart, dark=True))
    return Drawing(path, chart.title, chart.caption, Markup(svg))  # drawn here, from numbers and escaped labels


def _family_notes(families: Sequence[Family]) -> list[str]:
    """Why there are several sections: what sets them apart."""
    if len(families) < 2:
        return []
    differing = differing_settings([family.groups[0] for family in families])
    settings = "; ".join(
        f"{name}: {', '.join(dict.fromkeys(values))}" for name, values in differing.items() if name != "seq_len"
    )
    return [
        f"The runs have {len(families)} configurations that should not be compared with each other, so each has a "
        f"section of its own ({settings})."
    ]


def _method(reference: str) -> list[tuple[str, str]]:
    """How the verdict is reached: the three measurements of report/evidence.py in the reader's words."""
    return [
        (
            "Same weights",
            f"The probe inside a run sends a training batch once more through the same weights with {reference} and "
            f"the same dropout masks. Logits and gradients may differ by {MARGIN:g} times what rounding does to "
            f"{reference} itself, measured against {reference} in a higher precision. This is what tells a wrong "
            "implementation from a right one.",
        ),
        (
            "Curves",
            f"At every step the training loss must be closer to {reference}'s of the same seed than {reference}'s "
            f"seeds are to each other: root mean squares over a window of {100 * WINDOW:g} % of the run. Seeds draw "
            "different batches, so this band is wide.",
        ),
        (
            "Final losses",
            f"They may differ by {reference}'s own floating-point floor: what rounding does to the loss of one step, "
            "added up over all updates. Training can amplify rounding until two runs are strangers, as seeds are: a "
            f"difference that began within the floor may grow until it can be told from that of {reference}'s seeds, "
            "one that was there from the start may not.",
        ),
    ]


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
