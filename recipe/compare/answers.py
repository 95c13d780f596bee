"""The answer to the question that a sweep asks: the lowest loss, the longest sequence, the speed of devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from recipe.compare.costs import Loss, Point, Speed, attention_alone, crossovers, ranked, same_tokens
from recipe.compare.sweeps import Sweep
from recipe.compare.tables import over_seeds
from recipe.files import number
from recipe.wording import listed, percent

Bullets = Sequence[tuple[str, str]]  # the subject of each, and one sentence or more
Table = Mapping[str, list[Point]]


class Answer(NamedTuple):
    """The answer of a sweep: a headline, its tone (holds, broken, open, none), and the bullets below it."""

    headline: str
    tone: str
    bullets: Bullets


def over_lengths(sweep: Sweep, table: Table, reference: str) -> Answer:
    """The answer of a sweep over lengths: the memory wall, the best context, or the length from which one is faster."""
    parts = [_wall(sweep, table), *([_context(table)] if same_tokens(sweep) else []), _crossings(sweep, reference)]
    answers = [part for part in parts if part]
    headline = answers[0].headline if answers else "Speed and memory over the sequence length"
    return Answer(headline, "none", [bullet for part in answers for bullet in part.bullets])


def _wall(sweep: Sweep, table: Table) -> Answer | None:
    bullets = []
    fits = {label: max((p.position for p in of_label if p.trained), default=0) for label, of_label in table.items()}
    for label, of_label in table.items():
        failed = min((point.position for point in of_label if point.out_of_memory), default=None)
        fit = f"It fits up to {fits[label]:,} tokens" if fits[label] else "It fits at no length that was tried"
        bullets.append((label, f"{fit}{f' and runs out of memory at {failed:,}' if failed else ''}."))
    if not any(point.out_of_memory for of_label in table.values() for point in of_label):
        return None
    limits = {limit for run in sweep.runs if (limit := number(run.option("training.cpu_memory_gib")))}
    if limits and attention_alone(sweep.runs):
        gib = " or ".join(f"{limit:g}" for limit in sorted(limits))
        words = f"Stands for a GPU's memory: {gib} GiB for the whole run. The memory shown is one attention layer's."
        bullets.append(("training.cpu_memory_gib", words))
    best = max(fits.values())
    names = listed([label for label, longest in fits.items() if longest == best])
    headline = f"The longest sequence that fits: {best:,} tokens, with {names}" if best else "Nothing fits the memory"
    return Answer(headline, "none", bullets)


def _crossings(sweep: Sweep, reference: str) -> Answer | None:
    bullets: list[tuple[str, str]] = []
    if not (crossings := crossovers(sweep, reference)):
        return None
    for crossing in crossings:
        if crossing.seq_len:
            where = f"It overtakes {reference} at about {crossing.seq_len:,.0f} tokens"
        elif crossing.first:
            where = f"It is faster than {reference} from the shortest length on, {crossing.first:,} tokens,"
        else:
            where = f"It does not overtake {reference} for good"
        speed = f"is {as_fast(crossing.speedup)}" if crossing.speedup else "their speeds do not differ measurably"
        bullets.append((crossing.label, f"{where} and {speed} at {crossing.longest:,}."))
    ahead = [crossing for crossing in crossings if crossing.first]
    if not ahead:
        longest = max(crossing.longest for crossing in crossings)
        return Answer(f"Nothing overtakes {reference} for good up to {longest:,} tokens", "none", bullets)
    soonest = min(ahead, key=lambda crossing: crossing.seq_len or 0)
    length = f"at about {soonest.seq_len:,.0f} tokens" if soonest.seq_len else f"at {soonest.first:,} tokens or fewer"
    return Answer(f"{soonest.label} overtakes {reference} {length}", "none", bullets)


def _context(table: Table) -> Answer:
    """The best context, by the implementation with the longest; others have the same losses or a broken parity."""
    known = {
        label: [(point.position, point.val_loss) for point in losses if point.val_loss]
        for label, losses in table.items()
    }
    label, losses = max(known.items(), key=lambda item: len(item[1]))
    best, _ = min(losses, key=lambda at_loss: at_loss[1].mean)
    (first, shortest), (last, longest) = losses[0], losses[-1]
    words = f"{over_seeds(shortest)} with {first:,} tokens of context, {over_seeds(longest)} with {last:,}"
    headline = f"The lowest validation loss: {best:,} tokens of context{seeds([loss for _, loss in losses])}"
    return Answer(headline, "none", [(label, f"Validation loss {words}.")])


def scaling(table: Table) -> Answer:
    bullets, best = list[tuple[str, str]](), (0.0, "Throughput over devices")
    for label, of_label in table.items():
        known = [(point.position, point.speed) for point in of_label if point.speed]
        if len(known) < 2:
            continue
        (few, slow), (many, fast) = known[0], known[-1]
        if (gain := fast.times(slow)) is None:
            bullets.append((label, f"{many} and {few} devices do not differ measurably in speed: steps vary by more."))
            continue
        words = f"{many} devices train {as_fast(gain)} as {few}"
        bullets.append((label, f"{words}, {percent(gain.median * few / many)} of proportional."))
        best = max(best, (gain.median, words))
    return Answer(best[1], "none", bullets)


def ranking(sweep: Sweep, costs: Bullets) -> Answer | None:
    """The setting or implementation with the lowest loss, and the next; `costs` instead where there is one setting.

    None where no run has completed with a loss.
    """
    losses = [(point, loss) for point in ranked(sweep) if (loss := point.loss)]
    if not losses:
        return None
    (first, lowest), others = losses[0], losses[1:]
    kind = "training" if first.val_loss is None else "validation"
    names = [", ".join(point.cell.where) or point.label for point, _ in losses]
    of_seeds = seeds([loss for _, loss in losses])
    if len(sweep.cells) == 1:
        return Answer(f"{names[0]}: {kind} loss {over_seeds(lowest)}{of_seeds}", "none", costs)
    bullets = [(names[0], f"{kind.capitalize()} loss {over_seeds(lowest)}.")]
    if n := next((n for n, (point, _) in enumerate(others, start=1) if point.cell is not first.cell), 0):
        higher, spread = losses[n][1].mean - lowest.mean, max(losses[n][1].deviation or 0.0, lowest.deviation or 0.0)
        less = ", less than the spread between seeds" if higher < spread else ""
        bullets.append((names[n], f"Next, {higher:.4f} higher{less}."))
    return Answer(f"The lowest {kind} loss: {names[0]}{of_seeds}", "none", bullets)


def costs(sweep: Sweep, table: Table, reference: str) -> Bullets:
    """The speed and memory of each implementation relative to the reference."""
    theirs = next((of_label[0] for label, of_label in table.items() if label == reference), None)
    subject = "Its attention takes" if attention_alone(sweep.runs) else "It takes"
    bullets = []
    for label, (ours,) in table.items():
        if theirs is None or label == reference:
            continue
        sentences = []
        if ours.speed and theirs.speed:
            gain = ours.speed.times(theirs.speed)
            too_close = f"Its speed does not differ measurably from {reference}'s: steps vary by more."
            sentences.append(f"It trains {as_fast(gain)} as {reference}." if gain else too_close)
        elif ours.tokens_per_s and theirs.tokens_per_s:
            sentences.append("Its speed is not compared: on a CPU one run of each says little; train several seeds.")
        if ours.memory_gib and theirs.memory_gib:
            sentences.append(f"{subject} {percent(ours.memory_gib / theirs.memory_gib)} of the memory.")
        if sentences:
            bullets.append((label, " ".join(sentences)))
    return bullets


def as_fast(gain: Speed) -> str:
    """A ratio of speeds with its range, unless two digits do not show it: "1.3 (1.2 to 1.4) times as fast"."""
    median, low, high = (f"{value:.2g}" for value in gain)
    return f"{median}{'' if low == high else f' ({low} to {high})'} times as fast"


def seeds(losses: Sequence[Loss]) -> str:
    """The number of seeds behind the losses, for the end of a headline: " (means of 3 seeds)"."""
    counts = sorted({loss.seeds for loss in losses})
    if counts == [1]:
        return " (one seed)" if len(losses) == 1 else " (one seed each)"
    words = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    return f" ({'means' if len(losses) > 1 else 'mean ± standard deviation'} of {words} seeds)"
