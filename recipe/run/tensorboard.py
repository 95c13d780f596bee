"""A run's metrics for TensorBoard, under the names of metrics.jsonl."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipe.files import to_json

FOLDER = "tensorboard"


def installed() -> bool:
    """Whether the package that writes TensorBoard's files is installed."""
    return importlib.util.find_spec("tensorboard") is not None


class Board:
    """Event files in `<run folder>/tensorboard`."""

    def __init__(self, run_folder: Path, run_config: Mapping[str, Any], resume_step: int | None) -> None:
        """resume_step  events of later steps are purged; None: all of them, which a killed run may have left"""
        from torch.utils.tensorboard import SummaryWriter  # not every installation has tensorboard

        purged = 0 if resume_step is None else resume_step + 1
        self.writer = SummaryWriter(str(run_folder / FOLDER), purge_step=purged)
        if resume_step is None:
            self.writer.add_text("config", f"```json\n{to_json(run_config, indent=2)}\n```")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the metrics that are numbers."""
        for name, value in metrics.items():
            if isinstance(value, int | float):
                self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is buffered; safe to call twice."""
        self.writer.close()
