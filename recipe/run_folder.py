"""What a run recorded of itself in its folder, which may come from a stranger: read as data, in bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from data.untrusted import UntrustedError, read_json, read_yaml

HYDRA = ".hydra"
CONFIG, OVERRIDES = f"{HYDRA}/config.yaml", f"{HYDRA}/overrides.yaml"
SUMMARY = "summary.json"


def read_config_values(folder: Path) -> dict[str, Any]:
    """The configuration of a run, as recorded. Raises OSError, UntrustedError."""
    return _mapping(read_yaml(folder / CONFIG))


def read_overrides(folder: Path) -> list[str]:
    """The overrides of a run, as recorded. Raises OSError, UntrustedError."""
    content = read_yaml(folder / OVERRIDES)
    if not isinstance(content, list) or not all(isinstance(line, str) for line in content):
        raise UntrustedError("is not a list of overrides")
    return content


def read_summary(folder: Path) -> dict[str, Any]:
    """The content of summary.json. Raises OSError, UntrustedError."""
    return _mapping(read_json(folder / SUMMARY))


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UntrustedError("is not a mapping")
    return value
