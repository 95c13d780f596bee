"""The report: one self-contained page of HTML, with its figures and the runs as CSV next to it."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from data.errors import first_few
from recipe.compare.figures import charts
from recipe.compare.headline import Headline, headline, notes_on
from recipe.compare.parity import judge
from recipe.compare.runs import Run, RunSet
from recipe.compare.sweeps import Place, Sweep, labels_of, places, sweeps_of
from recipe.compare.tables import Names, Table, ablation_table, cell_table, parity_table, run_table, runs_csv
from recipe.compare.verdict import Verdict
from recipe.drawing import Chart, render_png, render_svg
from recipe.run.wandb_thread import WandbThread
from recipe.training.parity import PARITY_MARGIN

MODES = ("online", "offline", "disabled")
LIMIT = 90.0  # seconds for W&B to take the page


def mode_of(runs: Sequence[Run]) -> str:
    """The tracking.mode of the first run; disabled if it recorded none."""
    mode = str(runs[0].option("tracking.mode"))
    return mode if mode in MODES else "disabled"


def publish(runs: Sequence[Run], out: Path, mode: str) -> str:
    """Log the page in `out` to W&B. Returns sentences on the outcome, after at most LIMIT seconds; never raises.

    The run joins the group of the first run, so that their workspace has the page.
    """

    def add_page(run: Any, step: int) -> None:
        import wandb

        page = wandb.Artifact("report", type="report")
        page.add_file(str(out / "index.html"))
        run.log_artifact(page)

    thread = WandbThread(
        out,
        {
            "mode": mode,
            "project": str(runs[0].option("tracking.project", "gpt-attention")),
            "group": str(runs[0].option("tracking.group") or "") or None,
            "job_type": "report",
            "name": "report",
            "resume": None,
        },
        add_page,
        "the report on disk is complete",
    )
    thread.end(True, LIMIT)
    return "\n".join([*thread.warnings(), *([f"W&B: {thread.location}"] if thread.location else [])])


TEMPLATES = Path(__file__).parent / "templates"


class Drawing(NamedTuple):
    """A figure, and its rendering for the page."""

    chart: Chart
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
    """Everything the templates show.

    labels, places  the implementation, and the settings that distinguish a run, by the run's name
    subject         the heading of the labels
    method          the template that explains how the verdicts are reached
    lead            stands beside the headline
    lines           an arm, and what was found, for the terminal
    commands        the next step, and its command
    """

    headline: Headline
    sections: tuple[Section, ...]
    notes: tuple[str, ...]
    runs: tuple[Run, ...]
    labels: Names
    places: Names
    subject: str = "implementation"
    method: str | None = None
    lead: Drawing | None = None
    lines: tuple[tuple[str, str], ...] = ()
    commands: tuple[tuple[str, str], ...] = ()

    @property
    def table(self) -> Table:
        """All runs."""
        return run_table(self.runs, self.labels, self.places, self.subject)

    @property
    def sources(self) -> tuple[tuple[str, str], ...]:
        """The origin of the runs, as (name, text)."""
        versions = (run.recorded("versions").items() for run in self.runs)
        kernels = [f"{run.attention}: {path}" for run in self.runs if (path := run.summary.get("attention_path"))]
        of_text = [
            str(note).rstrip(".")
            for run in self.runs
            if isinstance(notes := run.summary.get("data_notes"), list)
            for note in notes
        ]
        return (
            ("Run folders", _all_of(str(run.folder.parent) for run in self.runs)),
            *([("Kernels", _all_of(kernels))] if kernels else []),
            *([("Text", _all_of(of_text))] if of_text else []),
            ("Commits", _all_of(run.commit for run in self.runs)),
            ("Software", _all_of(", ".join(f"{name} {v}" for name, v in items if v) for items in versions)),
            ("Run on", _all_of(sorted(str(run.summary.get("started") or "")[:10] for run in self.runs))),
        )


def write_report(run_set: RunSet, out: Path, reference: str = "naive") -> Report:
    """Write index.html, runs.csv and figures/ into `out`.

    reference  the label of the implementation that the others are compared with
    """
    sweeps = sweeps_of(run_set.runs)
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
    report = Report(
        spoken,
        sections,
        tuple(notes_on(run_set, sweeps)),
        run_set.runs,
        labels_of(run_set.runs),
        where,
        method="method.j2" if any(verdict.agreements for found in verdicts for verdict in found) else None,
    )
    write_page(report, out, reference=reference, margin=f"{PARITY_MARGIN:g}")
    return report


def write_page(report: Report, out: Path, **shown: Any) -> None:
    """Write index.html and runs.csv.

    shown  values for the template of the method
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), undefined=jinja2.StrictUndefined, autoescape=True,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    template = environment.get_template("index.html.j2")
    (out / "index.html").write_text(template.render(shown, report=report), encoding="utf-8")
    (out / "runs.csv").write_text(runs_csv(report.runs, report.labels, report.places, report.subject), encoding="utf-8")


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
    return Section(prefix, title, subtitle(sweep.runs), found, drawings, tuple(filter(None, tables)))


def subtitle(runs: Sequence[Run]) -> str:
    """The model, the score, the lengths, the dropout, the precision and the devices of runs, in a line."""
    sizes = "model.n_layers", "model.n_heads", "model.n_embd", "seq_len"
    return " · ".join(
        [
            *(f"{name.removeprefix('model.')} {_all_of(str(run.option(name, '')) for run in runs)}" for name in sizes),
            f"score {_all_of(_score(run) for run in runs)}",
            f"dropout {_all_of(format(run.option('attention.dropout') or 0.0, 'g') for run in runs)}",
            _all_of(run.precision for run in runs),
            _all_of(f"{run.devices} x {run.device}" if run.devices > 1 else run.device for run in runs),
        ]
    )


def _score(run: Run) -> str:
    """The preset and what is set in it, without its tensors: "causal (window=16)"."""
    options = "window", "soft_cap", "alibi", "sinks", "formula", "layers"
    chosen = ", ".join(f"{name}={value}" for name in options if (value := run.option(f"score.{name}")))
    return f"{run.option('score.name') or 'causal'}" + (f" ({chosen})" if chosen else "")


def _all_of(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(value for value in values if value)) or "not recorded"


def draw(chart: Chart, out: Path) -> Drawing:
    """The renderings of a figure, with its files below `out`."""
    path = out / "figures" / f"{chart.name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(render_png(chart))
    return Drawing(chart, Markup(render_svg(chart)))  # drawn here, from numbers and escaped labels
