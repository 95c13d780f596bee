"""What the runs show beside parity, a sentence each: what fits, what is faster, what a longer context gives."""

from __future__ import annotations

import itertools

from report.evidence import MARGIN, difference, rounding_of_a_step
from report.groups import Family, Group
from report.numbers import size
from report.record import number
from report.scaling import TILES, Point, attention_alone, crossovers, longest_that_fits, points, same_tokens


def findings(family: Family, reference: str = "naive") -> list[str]:
    """The sentences that a family of runs allows."""
    table = points(family)
    if len(family.groups) == 1:
        memory = "the attention's memory" if attention_alone(family.runs) else "the memory"
        costs = _costs([found[0] for found in table.values() if found], reference, memory)
        return [*costs, *_tiles(family.groups[0], reference)]
    return [
        *_wall(table),
        *_limit(family),
        *_crossings(family, reference),
        *(_contexts(table) if same_tokens(family) else []),
    ]


def _costs(every: list[Point], reference: str, whose: str) -> list[str]:
    theirs = next((point for point in every if point.label == reference), None)
    sentences = []
    for point in every:
        # Variants (tile sizes, a line left out) have a table of their own.
        if theirs is None or point is theirs or " " in point.label:
            continue
        if not (point.tokens_per_s and theirs.tokens_per_s):
            continue
        memory = ""
        if point.memory_gib and theirs.memory_gib:
            memory = f" and takes {100 * point.memory_gib / theirs.memory_gib:.0f} % of {whose}"
        sentences.append(
            f"{point.label} trains {point.tokens_per_s / theirs.tokens_per_s:.2g} times as fast as {reference}{memory}."
        )
    return sentences


def _tiles(group: Group, reference: str) -> list[str]:
    """How far tile sizes of an implementation are from each other, and what to measure that by."""
    runs = [group.of(label) for label in group.labels() if TILES.fullmatch(label)]
    pairs = [(a[seed], b[seed]) for a, b in itertools.combinations(runs, 2) for seed in a.keys() & b.keys()]
    apart = [found for pair in pairs if len(found := difference(*pair))]
    if not apart:
        return []
    (step, first), (last_step, last) = (
        max((int(found.steps[n]), abs(float(found.values[n]))) for found in apart) for n in (0, -1)
    )
    rounding = rounding_of_a_step(group.runs, reference)
    beside = f", where {reference}'s own rounding moves a loss by {size(rounding)}" if rounding else ""
    amplified = rounding is not None and first <= MARGIN * rounding * step
    return [
        f"The training losses of the tile sizes differ by at most {size(first)} at step {step:,}{beside}, and by "
        f"{size(last)} at step {last_step:,}{', to which training has amplified it' if amplified else ''}."
    ]


def _wall(table: dict[str, list[Point]]) -> list[str]:
    fits = {label: longest_that_fits(found) for label, found in table.items()}
    sentences = []
    for label, found in table.items():
        failed = [point.seq_len for point in found if point.out_of_memory]
        if failed:
            fit = f"{label} fits up to {fits[label]:,} tokens and runs" if fits[label] else f"{label} runs"
            sentences.append(f"{fit} out of memory at {min(failed):,}.")
    unbroken = [label for label, found in table.items() if not any(point.out_of_memory for point in found)]
    if sentences and unbroken:
        longest = max(point.seq_len for found in table.values() for point in found)
        if fitting := [label for label in unbroken if fits[label] == longest]:
            sentences.append(f"The longest that was tried, {longest:,} tokens, fits with {' and '.join(fitting)}.")
    return sentences


def _limit(family: Family) -> list[str]:
    """Why a run on a CPU ends at less memory than a machine has, and at more than the report shows."""
    ended = [run.option("training.cpu_memory_gib") for run in family.runs if run.out_of_memory]
    limits = sorted({limit for value in ended if (limit := number(value)) is not None})
    if not (limits and attention_alone(family.runs)):
        return []
    gib = " or ".join(f"{limit:g}" for limit in limits)
    return [
        f"training.cpu_memory_gib stands for a GPU's size here: the whole run has to fit in {gib} GiB, while the "
        "memory shown is that of one attention layer alone."
    ]


def _crossings(family: Family, reference: str) -> list[str]:
    sentences = []
    for crossing in crossovers(family, reference):
        if crossing.seq_len:
            where = f"overtakes {reference} at about {crossing.seq_len:,.0f} tokens"
        elif crossing.first:
            where = f"is faster than {reference} from the shortest length measured, {crossing.first:,} tokens,"
        elif crossing.last:
            where = f"keeps up with {reference} at {crossing.last:,} tokens at most"
        else:
            where = f"does not overtake {reference} up to {crossing.longest:,} tokens"
        sentences.append(
            f"{crossing.label} {where} and is {crossing.speedup:.2g} times as fast at {crossing.longest:,}."
        )
    return sentences


def _contexts(table: dict[str, list[Point]]) -> list[str]:
    """Of the implementation that reaches furthest; the others have the same losses or a broken parity."""
    known = {label: [point for point in found if point.val_loss is not None] for label, found in table.items()}
    label, found = max(known.items(), key=lambda item: len(item[1]))
    first, last = found[0], found[-1]
    return [
        f"After equally many tokens, {label}'s validation loss is {first.val_loss:.3f} with {first.seq_len:,} tokens "
        f"of context and {last.val_loss:.3f} with {last.seq_len:,}."
    ]
