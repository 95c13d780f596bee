"""Which figures the runs allow, with the words that go with them, in the order in which they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from report.curve_figures import draw_difference, draw_loss, draw_probe
from report.draw import Chart, height_for
from report.evidence import MARGIN
from report.groups import Family, Group
from report.length_figures import draw_costs, draw_crossover, draw_memory, draw_mfu, draw_points
from report.parity import Judgement
from report.scaling import Point, attention_alone, crossovers, points, same_text, same_tokens


def charts(family: Family, judgements: Sequence[Judgement], reference: str = "naive", prefix: str = "") -> list[Chart]:
    """The figures of a family of runs.

    judgements  of the family's groups
    prefix      of the files' names, where several families stand on a page
    """
    found = _curve_charts(family, judgements, reference)
    found += _length_charts(family, reference) if len(family.groups) > 1 else _cost_charts(family)
    return [Chart(prefix + c.name, c.title, c.caption, c.draw, c.height) for c in found]


def _curve_charts(family: Family, judgements: Sequence[Judgement], reference: str) -> list[Chart]:
    """Of the group with most runs; over many lengths only where something was compared."""
    group = max(family.groups, key=lambda group: (len(group.runs), _logged(group)))
    judged = [j for j in judgements if j.group is group]
    several = len(family.groups) > 1
    if not _logged(group) or (several and not any(j.telling for j in judged)):
        return []
    where = f" at seq_len {group.seq_len:,}" if several else ""
    height = height_for(group.labels())
    validated = any(len(run.series("val/loss").finite()) > 1 for run in group.runs)
    found = [
        Chart(
            "loss",
            f"Loss{where}",
            f"{'Training (thin) and validation loss (marks)' if validated else 'Training loss'} of every seed. Curves "
            "that coincide lie on top of each other, thinner from the reference on.",
            lambda figure, palette: draw_loss(figure, palette, group),
            height,
        )
    ]
    if any(j.curve for j in judged):
        banded = any(j.curve and j.curve.ratio is not None for j in judged)
        found.append(
            Chart(
                "difference",
                f"Difference to {reference} of the same seed{where}",
                f"Training loss minus {reference}'s, seed by seed, on a symmetric logarithmic axis."
                + (f" The band is how far {reference}'s own seeds are from each other." if banded else ""),
                lambda figure, palette: draw_difference(figure, palette, group, reference),
                height,
            )
        )
    if any(j.probe for j in judged):
        found.append(
            Chart(
                "probe",
                f"At the same weights{where}",
                f"How far gradients (lines) and logits (dots) are from {reference}'s at the same weights, batch and "
                f"masks, in units of {reference}'s own rounding; the worst seed. A right implementation stays near 1, "
                f"and up to {MARGIN:g} is accepted.",
                lambda figure, palette: draw_probe(figure, palette, group, reference),
                height,
            )
        )
    return found


def _length_charts(family: Family, reference: str) -> list[Chart]:
    table = points(family)
    every = [point for found in table.values() for point in found]
    found: list[Chart] = []
    height = height_for(list(table))

    def add(name: str, title: str, caption: str, draw: Callable[..., None], *arguments: object) -> None:
        found.append(
            Chart(name, title, caption, lambda figure, palette: draw(figure, palette, family, *arguments), height)
        )

    if any(point.memory_gib for point in every):
        attention_only = attention_alone(family.runs)
        add(
            "memory",
            "Memory of one attention layer" if attention_only else "Peak memory",
            "Marks are measured, dashes predicted from the two shortest lengths: linear for tiles, quadratic where "
            "scores are kept." + (" The attention's own allocations, not the process's." if attention_only else ""),
            draw_memory,
        )
    if any(point.tokens_per_s for point in every):
        add("throughput", "Throughput", "Median over the run.", draw_points, _tokens_per_s, "tokens a second")
    if any(point.mfu_causal for point in every):
        add(
            "mfu",
            "Model FLOPs utilisation",
            "Share of the device's peak: attention counted as causality leaves it (lines), or whole (dots).",
            draw_mfu,
        )
    if crossovers(family, reference):
        add(
            "crossover",
            f"Speed beside {reference}",
            f"Step time of {reference} over each implementation's: above 1, the implementation is the faster one. "
            "A ring marks where it overtakes.",
            draw_crossover,
            reference,
        )
    if same_tokens(family):
        add(
            "context",
            "Validation loss over context length",
            "Final loss of runs that saw equally many tokens, evaluated on "
            + (
                "the same text." if same_text(family) else "another choice of text at each length (training.eval_span)."
            ),
            draw_points,
            _val_loss,
            "validation loss (nats a token)",
            False,
        )
    return found


def _cost_charts(family: Family) -> list[Chart]:
    every = [found[0] for found in points(family).values() if found]
    if len(every) < 2 or not any(point.tokens_per_s or point.memory_gib for point in every):
        return []
    alone = attention_alone(family.runs)
    memory = "one attention layer" if alone else "peak memory"
    caption = "Medians over the seeds." + (
        " Memory is what one attention layer allocates in training." if alone else ""
    )
    draw = lambda figure, palette: draw_costs(figure, palette, every, memory)  # noqa: E731
    return [Chart("cost", "What it costs", caption, draw, height=max(2.6, 0.8 + 0.34 * len(every)))]


def _tokens_per_s(point: Point) -> float | None:
    return point.tokens_per_s


def _val_loss(point: Point) -> float | None:
    return point.val_loss


def _logged(group: Group) -> int:
    return max((len(run.series("train/loss")) for run in group.runs), default=0)
