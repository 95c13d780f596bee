"""The runs of train.py that the documents show, recorded in bench/results/<experiment>-<device>.json.

    python -m bench.experiments variants               its twelve runs, one after the other
    python -m bench.experiments parity --only flash    only runs whose case has a value "flash"
    python -m bench.experiments optimizers:cpu         on a CPU
    python -m bench.experiments shakespeare -- data=text data.path=input.txt data.tokenizer=bytes

Each run is a separate process, whose output is shown. Words after -- are further overrides of all runs. A row has the
run's case, its overrides and its results; running out of memory is a result. bench/experiments/cases.py lists the runs.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.experiments.cases import EXPERIMENTS, SOURCES, Run
from bench.experiments.sources import sources
from bench.machine import device_name, require_gpu
from bench.record import Recorder, Row, command_line, command_of, measurement, result_file
from bench.runs import python, recorded, train

IDENTITY = ("case",)
CACHE = Path(".cache")


def measure(run: Run, further: Sequence[str], folder: Path) -> Row:
    """The row of one run, and of its second part and evaluations where it has them."""
    overrides = [*run.overrides.split(), *further]
    if any(SOURCES in override for override in overrides):
        text = str(sources(CACHE))
        overrides = [override.replace(SOURCES, text) for override in overrides]
    row: Row = {"case": run.case, "overrides": overrides} | train(overrides, folder, run.gpus)
    if run.gpus > 1:
        row["gpus"] = run.gpus
    if run.then and row["status"] == "completed":
        first = {name: row[name] for name in ("step", "step_ms")}
        output = python(["train.py", f"resume={folder}", *run.then.split()])
        row |= {"status": "failed", "message": output} if output else recorded(folder)
        steps, times = [first["step"], row["step"] - first["step"]], [first["step_ms"], row["step_ms"]]
        row |= {"then": run.then.split(), "training_s": sum(n * ms for n, ms in zip(steps, times, strict=True)) / 1e3}
    elif run.windows and row["status"] == "completed":
        row["training_s"] = row["step"] * row["step_ms"] / 1e3
    if row["status"] == "completed" and run.windows:
        row["whole_validation"] = [whole_validation(folder, length) for length in run.windows]
    if not run.losses:
        row.pop("losses", None)
    return row


def whole_validation(folder: Path, length: int) -> Row:
    """The loss and perplexity of a run's model on its whole validation split, in windows of a length."""
    python(["eval.py", f"run={folder}", f"seq_len={length}"])
    results = json.loads((folder / "summary.json").read_text())["eval"]
    values = next(value for value in results.values() if value["seq_len"] == length)
    return {"seq_len": length, "loss": values["loss"], "perplexity": values["perplexity"]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure an experiment's runs, and record each. Returns 1 if one failed without being a result."""
    parser = command_line("bench.experiments", __doc__, "the experiment's name")
    parser.add_argument("experiment", choices=EXPERIMENTS, metavar="experiment", help=", ".join(EXPERIMENTS))
    parser.add_argument("--only", nargs="+", metavar="VALUE", help="the runs whose case has one of these values")
    parser.add_argument("overrides", nargs="*", help="for train.py, after --")
    args = parser.parse_args(arguments)
    runs = list(EXPERIMENTS[args.experiment]())
    on_cpu = "device=cpu" in runs[0].overrides
    if not on_cpu:
        require_gpu(parser)
    if args.only:
        runs = [run for run in runs if {str(value) for value in run.case.values()} & set(args.only)]
    if not runs:
        parser.error(f"no run of {args.experiment} has a case with {' or '.join(args.only)}")
    device = torch.device("cpu" if on_cpu else "cuda")
    name = args.experiment.partition(":")[0] if args.name == parser.get_default("name") else args.name
    path = result_file(name, device_name(device), args.results)
    failed = False
    with Recorder(path, IDENTITY, measurement(command_of(parser, arguments), device)) as recorder:
        for n, run in enumerate(runs, 1):
            words = ", ".join(f"{name} {value}" for name, value in run.case.items())
            print(f"[{n}/{len(runs)}] {words}", flush=True)
            with tempfile.TemporaryDirectory() as folder:
                row = measure(run, args.overrides, Path(folder) / "run")
            # A loss that is not finite, and too little memory, are results.
            broken = row["status"] == "failed" and "non_finite_step" not in row
            print(f"[{n}/{len(runs)}] {words}: {row['status'].replace('_', ' ')}", flush=True)
            if broken:
                print(row.get("message", ""))
            else:
                recorder.add(row)
            failed |= broken
    print(f"results: {path}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
