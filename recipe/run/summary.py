"""A run's environment, summary.json and loss curve."""

from __future__ import annotations

import platform
import subprocess
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from data.atomic import write_atomically
from recipe.files import to_json
from recipe.run.meters import device_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ENVIRONMENT = ("device", "versions", "git")


def environment(device: torch.device, device_count: int = 1) -> dict[str, Any]:
    """{"device": {type, name, count}, "versions": {python, torch, triton, cuda}, "git": {commit, dirty, changes}}.

    None for what is missing (triton, CUDA, a git checkout).
    """
    return {
        "device": {"type": device.type, "name": device_name(device), "count": device_count},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": version("triton"),
            "cuda": torch.version.cuda,
        },
        "git": git_state(Path(__file__).parents[2]),
    }


def version(package: str) -> str | None:
    """The installed version, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def git_state(folder: Path) -> dict[str, Any]:
    """The commit checked out in `folder`, whether its tracked files differ from it, and a digest of the differences and
    of the .py files that git does not know; None if git fails, or where there are none."""
    commit, changes = git(folder, "rev-parse", "HEAD"), git(folder, "diff", "--no-ext-diff", "--no-textconv", "HEAD")
    listed = git(folder, "ls-files", "--others", "--exclude-standard", "-z", "*.py") or ""
    unknown = [name for name in listed.split("\0") if name]
    content = [changes or "", *unknown]
    content += [git(folder, "hash-object", "--", *unknown) or ""] if unknown else []
    digest = sha256("\0".join(content).encode()).hexdigest()[:8] if any(content) else None
    return {"commit": commit, "dirty": None if changes is None else bool(changes), "changes": digest}


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
    # Takes half a second, too long for the start of a run.
    from recipe.drawing import COLOURS, Chart, finish_steps, render_png

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.plot(*_series(records, "train/loss"), color=COLOURS["muted"], linewidth=1.0, label="training")
        axes.plot(
            *_series(records, "val/loss"), color=COLOURS["other-0"], marker="o", markersize=3.5, label="validation"
        )
        finish_steps(figure, axes, f"{title}: loss in nats per token")

    write_atomically(path, render_png(Chart("loss", title, "", draw)))


def _series(records: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    points = [(record["step"], float(record[name])) for record in records if record.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]
