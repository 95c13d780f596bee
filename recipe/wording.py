"""Numbers and lists as text, for printed lines, tables, figures and sentences."""

import math
from collections.abc import Iterable, Sequence


def duration(seconds: float) -> str:
    """1:05 or 2:03:04."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def size(value: float | None) -> str:
    """A number to two digits or, where it is small, as a power of ten: 0.0014, 3·10⁻⁷."""
    if value is None:
        return "-"
    return f"{value:.2g}" if value == 0 or abs(value) >= 1e-4 else power_of_ten(value)


def power_of_ten(value: float) -> str:
    """1e-06 -> 10⁻⁶, -2e-05 -> -2·10⁻⁵"""
    if value == 0:
        return "0"
    digits, exponent = f"{abs(value):.0e}".split("e")
    power = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{'-' if value < 0 else ''}{'' if digits == '1' else f'{digits}·'}10{power}"


def times(ratio: float) -> str:
    """A factor in words, to two digits: 0.04, 3.2, 170, 25,000 times; "over a billion times" beyond that."""
    if not math.isfinite(ratio):
        return "infinitely many times"
    if ratio >= 1e9:
        return "over a billion times"
    return f"{float(f'{ratio:.2g}'):,.0f} times" if ratio >= 10 else f"{size(ratio)} times"


def percent(share: float | None) -> str:
    """Two digits: 0.13 %, 41 %, 160 %; "under 0.1 %" below a tenth."""
    value = 100 * (share or 0.0)
    return "under 0.1 %" if value < 0.1 else f"{float(f'{value:.2g}'):g} %"


def short_length(n: float) -> str:
    """1024 -> 1k, 524288 -> 512k, 1000 -> 1,000"""
    return f"{int(n) // 1024}k" if n >= 1024 and n % 1024 == 0 else f"{n:,.0f}"


def short_number(value: float) -> str:
    """1500000 -> 1.5M, 40000 -> 40k, 0.05 -> 0.05, 1e-6 -> 10⁻⁶"""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}" if value == 0 or abs(value) >= 1e-2 else power_of_ten(value)


def as_typed(value: object) -> object:
    """A value in the notation of overrides: null, true and false instead of None, True and False."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else value


def memory_unit(every: Iterable[float | None]) -> tuple[str, float]:
    """The unit in which amounts given in GiB are best read, and how many of it make a GiB."""
    return ("GiB", 1.0) if max((value or 0.0 for value in every), default=1.0) >= 0.5 else ("MiB", 1024.0)


def listed(parts: Sequence[str]) -> str:
    """One, two and three."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else "".join(parts)


def markdown_table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table with a heading for each column."""
    written = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |").replace("|  |", "| |") for line in written)
