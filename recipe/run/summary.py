"""A run's environment, summary.json and loss curve."""

from __future__ import annotations

import math
import platform
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from data.atomic import write_atomically
from recipe.files import to_json
from recipe.run.meters import device_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ENVIRONMENT = ("device", "versions", "git")


def environment(device: torch.device, device_count: int = 1) -> dict[str, Any]:
    """{"device": {type, name, count}, "versions": {python, torch, triton, cuda}, "git": {commit, dirty, changes}}.

    None for what is missing (triton, CUDA, a git checkout).
    """
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = None
    return {
        "device": {"type": device.type, "name": device_name(device), "count": device_count},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton,
            "cuda": torch.version.cuda,
        },
        "git": git_state(Path(__file__).parents[2]),
    }


def git_state(folder: Path) -> dict[str, Any]:
    """The commit checked out in `folder`, whether its tracked files differ from it, and a digest of the differences and
    of the .py files that git does not know; None if git fails, or where there are none."""
    commit, changes = git(folder, "rev-parse", "HEAD"), git(folder, "status", "--porcelain", "--untracked-files=no")
    unknown = git(folder, "ls-files", "--others", "--exclude-standard", "-z", "*.py") or ""
    content = [(git(folder, "diff", "--no-ext-diff", "--no-textconv", "HEAD") or "") if changes else ""]
    content += [text_of(folder, name) for name in unknown.split("\0") if name]
    digest = sha256("\0".join(content).encode()).hexdigest()[:8] if any(content) else None
    return {"commit": commit, "dirty": None if changes is None else bool(changes), "changes": digest}


def text_of(folder: Path, name: str) -> str:
    """A file's name and content; the name alone where it cannot be read."""
    with suppress(OSError):
        return f"{name}\0{(folder / name).read_text(encoding='utf-8', errors='replace')}"
    return name


def git(folder: Path, *arguments: str) -> str | None:
    """The output of a git command in a folder; None where git fails."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", errors="replace").strip()


def write_summary(path: Path, summary: dict[str, Any]) -> None:
    """Write summary.json in one step. Numbers that are not finite become "nan", "inf" and "-inf"."""
    write_atomically(path, to_json(summary, indent=2) + "\n")


def draw_loss_curve(records: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draw train and validation loss over steps as PNG. Values that are not finite leave a gap."""
    from matplotlib.figure import Figure  # half a second to import, too long for the start of a run

    from recipe.drawing import COLOURS

    colours = {role: light for role, (light, _) in COLOURS.items()}
    train, val = _series(records, "train/loss"), _series(records, "val/loss")
    figure = Figure(figsize=(7.2, 4.2), dpi=144, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(*train, color=colours["muted"], linewidth=1.0, label="training")
    axes.plot(*val, color=colours["other-0"], linewidth=1.8, marker="o", markersize=3.5, label="validation")
    finite = [(loss, step) for step, loss in zip(*val, strict=True) if math.isfinite(loss)]
    if finite:
        _note_lowest(axes, *min(finite), colours["other-0"])
    _style(axes, title, colours)
    temporary = path.with_name(f".{path.name}.partial")
    figure.savefig(temporary, format="png")
    temporary.replace(path)


def _series(records: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    points = [(record["step"], float(record[name])) for record in records if record.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def _note_lowest(axes: Axes, loss: float, step: int, colour: str) -> None:
    # A validation curve leaves the space above its lowest point free.
    axes.annotate(f"{loss:.4f}", (step, loss), xytext=(0, 8), textcoords="offset points", ha="center", color=colour)


def _style(axes: Axes, title: str, colours: Mapping[str, str]) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, loc="left", fontsize=10, color=colours["ink"])
    axes.set_xlabel("step", color=colours["ink"])
    axes.set_ylabel("loss (nats per token)", color=colours["ink"])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.grid(color=colours["grid"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(colours["muted"])
    axes.tick_params(colors=colours["ink"], length=0)
    axes.margins(x=0.02, y=0.1)
    axes.legend(frameon=False, loc="upper right")
