"""The machine, the software and the commit that a measurement depends on."""

import argparse
import platform
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from recipe.run import summary

ROOT = Path(__file__).parents[1]
WRITTEN = ("bench/results", "docs", "README.md")  # measuring and `make tables` change these


def environment(device: torch.device, packages: Sequence[str] = ()) -> dict[str, Any]:
    """The conditions needed to repeat a result: the device, the versions of the software, the commit, and the date.

    packages   more packages, whose versions are recorded if they are installed
    """
    versions = summary.environment(device)["versions"]
    if device.type == "cuda":
        versions["cudnn"] = torch.backends.cudnn.version()
    versions |= {name: number for name in packages if (number := summary.version(name))}
    changed = summary.git(
        ROOT, "status", "--porcelain", "--untracked-files=no", "--", ".", *(f":!{path}" for path in WRITTEN)
    )
    return {
        "device": device_name(device),
        "versions": versions,
        "commit": summary.git(ROOT, "rev-parse", "HEAD"),
        "dirty": None if changed is None else bool(changed),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def device_name(device: torch.device) -> str:
    """A GPU's name, or the processor as the system calls it with the number of threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    match = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return f"{match[1] if match else platform.machine()}, {torch.get_num_threads()} threads"


def slug(device: str) -> str:
    """A device's name as part of a file name: NVIDIA H200 -> nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def require_gpu(parser: argparse.ArgumentParser, advice: str = "") -> None:
    """Exit with status 2 and one sentence where there is no CUDA GPU."""
    if torch.cuda.device_count() == 0:
        parser.error(f"this benchmark needs a CUDA GPU, and torch finds none here{advice}")
