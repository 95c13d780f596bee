"""What changes with the sequence length: memory and its prediction, the crossover with the reference, the wall."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from report.groups import Family
from report.record import Run, number

GIB = 2**30
# The label of an implementation with a tile size, where several were run.
TILES = re.compile(r"\w+ \d+x\d+")
# fp32 weights, their gradients, and AdamW's two moments.
STATIC_BYTES_PER_PARAMETER = 16


@dataclass(frozen=True)
class Point:
    """One implementation at one length: medians over its seeds, None where not measured."""

    label: str
    seq_len: int
    sequences: int  # per micro-batch and rank
    out_of_memory: bool
    tokens_per_s: float | None
    step_ms: float | None
    mfu_full: float | None
    mfu_causal: float | None
    memory_gib: float | None
    val_loss: float | None
    tokens: float | None
    trained: int  # runs that completed or took a step at least; one killed before that shows nothing


@dataclass(frozen=True)
class Crossover:
    """Where an implementation overtakes the reference for good: from there on it is as fast or faster.

    seq_len  interpolated between the measured lengths around it; None where there is none
    first    the measured length from which on it is as fast or faster; None where it is slower at the longest
    last     where `first` is None, the longest length at which it is as fast or faster all the same; else None
    speedup  over the reference at the longest length that both were measured at
    longest  that length
    """

    label: str
    seq_len: float | None
    first: int | None
    last: int | None
    speedup: float
    longest: int


def points(family: Family) -> dict[str, list[Point]]:
    """The measurements of each label by rising length."""
    table: dict[str, list[Point]] = {label: [] for label in family.labels()}
    for group in family.groups:
        for label in group.labels():
            runs = list(group.of(label).values())
            table[label].append(_point(label, group.seq_len, runs))
    return table


def _point(label: str, seq_len: int, runs: Sequence[Run]) -> Point:
    done = [run for run in runs if not run.out_of_memory]

    return Point(
        label=label,
        seq_len=seq_len,
        sequences=runs[0].sequences,
        out_of_memory=not done,
        tokens_per_s=median_of([run.median("throughput/tokens_per_s") for run in done]),
        step_ms=median_of([run.median("throughput/step_ms") for run in done]),
        mfu_full=median_of([run.median("throughput/mfu_full") for run in done]),
        mfu_causal=median_of([run.median("throughput/mfu_causal") for run in done]),
        memory_gib=median_of([run.peak() for run in done]),
        val_loss=median_of([run.final("val/loss") for run in done]),
        tokens=median_of([run.tokens() for run in done]),
        trained=len([run for run in done if run.status == "completed" or run.step > 0]),
    )


def median_of(values: Sequence[float | None]) -> float | None:
    """The median of what is known; None where nothing is."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def memory_unit(every: Sequence[float | None]) -> tuple[str, float]:
    """The unit in which amounts given in GiB are best read, and how many of it make a GiB."""
    return ("GiB", 1.0) if max((value or 0.0 for value in every), default=1.0) >= 0.5 else ("MiB", 1024.0)


def attention_alone(runs: Sequence[Run]) -> bool:
    """Whether memory is that of one attention layer, as measured on a CPU, and not the device's."""
    return any(run.summary.get("memory_source") == "attention" for run in runs)


def quadratic(run: Run) -> bool:
    """Whether the implementation keeps all scores: naive, and SDPA's math backend."""
    return run.attention == "naive" or (run.attention == "sdpa" and run.option("attention.backend") == "math")


def predicted_memory(family: Family, label: str) -> list[tuple[int, float]]:
    """(seq_len, GiB) at every length of the family, from the two shortest that were measured; empty where that is all.

    tiles    constant + a * tokens, of B T tokens
    scores   constant + a * tokens + b * tokens * T: the constant is 16 bytes a parameter, or nothing where the
             attention alone was measured
    """
    measured = [point for point in points(family)[label] if point.memory_gib is not None]
    if len(measured) < 3:
        return []
    run = next(run for run in family.runs if run.label == label)
    (tokens, gib), (more_tokens, more_gib) = ((p.sequences * p.seq_len, p.memory_gib or 0.0) for p in measured[:2])
    if quadratic(run):
        parameters = 0.0 if attention_alone([run]) else number(run.summary.get("parameters")) or 0.0
        constant = min(STATIC_BYTES_PER_PARAMETER * parameters / GIB, gib)
        per_token, more_per_token = (gib - constant) / tokens, (more_gib - constant) / more_tokens
        b = max(0.0, (more_per_token - per_token) / (measured[1].seq_len - measured[0].seq_len))
        a = per_token - b * measured[0].seq_len
    else:
        a = (more_gib - gib) / (more_tokens - tokens) if more_tokens != tokens else 0.0
        b, constant = 0.0, gib - a * tokens
    shapes = sorted((group.seq_len, group.runs[0].sequences * group.seq_len) for group in family.groups)
    return [(seq_len, constant + a * tokens + b * tokens * seq_len) for seq_len, tokens in shapes]


def crossovers(family: Family, reference: str = "naive") -> list[Crossover]:
    """Where each implementation overtakes `reference` in step time; those that share no length with it are left out."""
    times = {
        label: {point.seq_len: point.step_ms for point in found if point.step_ms}
        for label, found in points(family).items()
    }
    theirs = times.get(reference, {})
    found = []
    for label, ours in times.items():
        shared = sorted(ours.keys() & theirs.keys())
        if label == reference or not shared:
            continue
        gains = [math.log(theirs[T] / ours[T]) for T in shared]
        lasting = next((n for n in range(len(gains)) if min(gains[n:]) >= 0), None)
        at = None
        if lasting:  # straight lines in the logarithms of time and length
            (T0, T1), (g0, g1) = map(math.log, shared[lasting - 1 : lasting + 1]), gains[lasting - 1 : lasting + 1]
            at = math.exp(T0 + (T1 - T0) * -g0 / (g1 - g0))
        first = None if lasting is None else shared[lasting]
        last = max((T for T, gain in zip(shared, gains, strict=True) if gain >= 0), default=None)
        found.append(Crossover(label, at, first, last if first is None else None, math.exp(gains[-1]), shared[-1]))
    return found


def longest_that_fits(found: Sequence[Point]) -> int | None:
    """The longest length that was trained without running out of memory."""
    return max((point.seq_len for point in found if point.trained), default=None)


def same_text(family: Family) -> bool:
    """Whether runs of every length were evaluated on the same text, in pieces of the same training.eval_span."""
    spans = {run.option("training.eval_span") for run in family.runs if run.final("val/loss") is not None}
    return len(spans) == 1 and None not in spans


def same_tokens(family: Family) -> bool:
    """Whether runs of several lengths were trained on equally many tokens, so that their losses compare contexts."""
    trained = [point for found in points(family).values() for point in found if point.val_loss is not None]
    totals = [point.tokens or 0.0 for point in trained]
    return len({point.seq_len for point in trained}) > 1 and 0 < max(totals) <= 1.02 * min(totals)
