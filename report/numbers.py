"""Small numbers as a reader takes them in."""

from __future__ import annotations


def size(value: float) -> str:
    """A number to two digits or, where it is small, as a power of ten: 0.0014, 3·10⁻⁷."""
    return f"{value:.2g}" if value == 0 or abs(value) >= 1e-4 else power_of_ten(value)


def power_of_ten(value: float) -> str:
    """1e-06 -> 10⁻⁶, -2e-05 -> -2·10⁻⁵"""
    if value == 0:
        return "0"
    digits, exponent = f"{abs(value):.0e}".split("e")
    power = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{'-' if value < 0 else ''}{'' if digits == '1' else f'{digits}·'}10{power}"
