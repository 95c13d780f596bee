"""JSON and settings in the form of the run folder."""

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any


def plain(value: Any) -> Any:
    """`value`, such as a configuration of dataclasses, in JSON's types, with non-finite numbers as "nan", "inf" and
    "-inf", which `float` reads back.

    JSON has no such numbers, and null would make an overflowed loss look like one that was not measured.
    """
    if is_dataclass(value):
        value = {f.name: getattr(value, f.name) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if hasattr(value, "item"):  # a scalar of numpy or torch
        return plain(value.item())
    return str(value)


def to_json(value: Any, **options: Any) -> str:
    """Strictly valid JSON of `plain(value)`."""
    return json.dumps(plain(value), allow_nan=False, ensure_ascii=False, **options)


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"model": {"n_heads": 4}} -> {"model.n_heads": 4}"""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def number(value: Any) -> float | None:
    """A finite number, or None."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def recorded_number(value: Any) -> float | None:
    """A number as `to_json` writes it, where one that is not finite is a word; None for anything else."""
    return float(value) if isinstance(value, int | float) or value in ("nan", "inf", "-inf") else None
