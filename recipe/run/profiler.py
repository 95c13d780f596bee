"""A recording of some steps by torch's profiler: its trace, and its table of operations.

    profiler = Profiler(run_folder, device, profile=True, start=start, steps=steps)
    for step in range(start, steps):
        if step == profiler.first:
            profiler.start()
        ...                                     # the step
        if step == profiler.last:
            profiler.stop()

`profile/trace.json.gz` in the run folder opens in chrome://tracing or ui.perfetto.dev, where the parts of a step have
names: attention, loss, data and the optimizer's step. `profile/table.txt` has the time of each operation.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import profile

WARMUP_STEPS, PROFILED_STEPS = 10, 5


class Profiler:
    """Records some steps of a run, once.

    first, last   the steps to record; None where nothing is asked for
    """

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        *,
        profile: bool,
        start: int,
        steps: int,
        print: Callable[[str], None] = print,
    ) -> None:
        """The steps recorded are PROFILED_STEPS after WARMUP_STEPS, or earlier in a run of fewer `steps`."""
        self.folder, self.device, self.print = folder / "profile", device, print
        first = max(start, min(start + WARMUP_STEPS, steps - PROFILED_STEPS))
        self.first: int | None = first if profile else None
        self.last: int | None = min(first + PROFILED_STEPS, steps) - 1 if profile else None

    def start(self) -> None:
        """Start recording, before the step `first`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the library prints messages when it starts and stops
        self.profiler = profile()
        self.profiler.start()

    def stop(self) -> None:
        """Stop recording, after the step `last`; write the results, and print where they are."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.profiler.stop()
        path, plain = self.folder / "trace.json.gz", self.folder / "trace.json"
        self.profiler.export_chrome_trace(str(plain))
        path.write_bytes(gzip.compress(plain.read_bytes(), 6))  # torch would compress line by line, for seconds
        plain.unlink()
        order = f"self_{'device' if self.device.type == 'cuda' else 'cpu'}_time_total"
        table = self.profiler.key_averages().table(sort_by=order, max_name_column_width=60)
        (self.folder / "table.txt").write_text(table)
        self.print(f"profile: {self.folder / 'table.txt'}, {path} (open it at ui.perfetto.dev)")
