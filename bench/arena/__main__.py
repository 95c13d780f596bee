"""How often the arena's verdict is right, and the results of small sweeps; writes bench/results/arena-<device>.json.

    python -m bench.arena itself                     400 runs of one configuration, as sweeps of an arm against itself
    python -m bench.arena planted                    a learning rate that is a little worse, with the same seeds
    python -m bench.arena ladder -- data=text data.path=input.txt hydra.launcher.jobs=2
    python -m bench.arena ladder --folder multirun/2026-11-20/10-00-00 --record

Each case trains its runs in .cache/arena/<case> or in --folder, without those that are already complete. It then
records a row: the losses or the verdicts, the overrides, and the commits of the runs. --record trains nothing. Words
after -- are further overrides of all runs. bench/arena/cases.py lists the cases.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.arena.cases import SEEDS, SWEEPS
from bench.arena.sweeps import Losses, against_itself, drawn_against_itself, drawn_pairs, verdicts
from bench.machine import processor
from bench.record import Recorder, Row, command_line, command_of, measurement, result_file
from bench.runs import python
from data.atomic import write_atomically
from data.tasks import TASKS
from recipe.compare.arena.page import as_json as arena_json
from recipe.compare.arena.results import compare_arms
from recipe.compare.arena.statistics import holm_levels, judge, paired
from recipe.compare.page import span
from recipe.compare.runs import Run, find_runs
from recipe.run.queue.launcher import cores
from recipe.run.queue.plan import read_plan

MARGIN = 0.005
SEEDS_ITSELF, SEEDS_PLANTED = 5, 8
SIMULATED = 100_000
CACHE = Path(".cache/arena")
MACHINE = "machine.json"  # in a sweep's folder: where its runs were trained


def train_seeds(folder: Path, last: int, overrides: Sequence[str]) -> None:
    """Train a configuration with the seeds 1, 2, ... in folder/<seed>, without the runs that are already complete."""
    from recipe.run.compose import composed, to_config
    from recipe.run.queue.jobs import Job
    from train import train

    for seed in range(1, last + 1):
        run, given = folder / str(seed), [*overrides, f"seed={seed}"]
        if Job(seed, (), run, 0).status == "completed":
            continue
        run.mkdir(parents=True, exist_ok=True)
        (run / "metrics.jsonl").unlink(missing_ok=True)
        train(to_config(composed(given)), run, given)


def completed(folder: Path) -> dict[int, Run]:
    """The completed runs in a folder by their seed."""
    return {run.seed: run for run in find_runs([folder]).runs if run.status == "completed"}


def losses_of(runs: dict[int, Run], seeds: Sequence[int]) -> Losses:
    return np.array([runs[seed].final("val/loss") for seed in seeds], np.float64)


def origin(runs: Sequence[Run]) -> Row:
    """The overrides without the seed, and the commits, of runs."""
    overrides = [word for word in runs[0].overrides if word.split("=")[0] not in ("seed", "data.path", "data.cache")]
    return {"overrides": overrides, "commits": sorted({run.commit for run in runs})}


def itself(folder: Path) -> Row:
    """Sweeps of an arm against itself: real ones, and ones drawn at random from the losses of the real runs."""
    runs = completed(folder)
    seeds = sorted(runs)
    losses = losses_of(runs, seeds)
    return {
        "case": "itself",
        **origin(list(runs.values())),
        "seeds": SEEDS_ITSELF,
        "run": verdicts(*against_itself(losses, SEEDS_ITSELF), MARGIN)._asdict(),
        "drawn": verdicts(*drawn_against_itself(losses, SEEDS_ITSELF, SIMULATED), MARGIN)._asdict(),
        "losses": [round(loss, 5) for loss in losses.tolist()],
    }


def planted(folder: Path) -> Row:
    """An arm with a known effect: real sweeps, in which each pair appears once, and sweeps of randomly drawn pairs."""
    theirs, ours = completed(folder / "better"), completed(folder / "worse")
    seeds = sorted(ours.keys() & theirs.keys())
    arm, base = losses_of(ours, seeds), losses_of(theirs, seeds)
    whole = len(seeds) // SEEDS_PLANTED * SEEDS_PLANTED
    run = verdicts(arm[:whole].reshape(-1, SEEDS_PLANTED), base[:whole].reshape(-1, SEEDS_PLANTED), MARGIN)
    return {
        "case": "planted",
        **origin(list(ours.values())),
        "baseline": origin(list(theirs.values()))["overrides"],
        "seeds": SEEDS_PLANTED,
        "effect": float((arm - base).mean() / base.mean()),
        "deviation": float((arm - base).std(ddof=1) / base.mean()),
        "pairs": len(seeds),
        "run": run._asdict(),
        "drawn": verdicts(*drawn_pairs(arm, base, SEEDS_PLANTED, SIMULATED), MARGIN)._asdict(),
    }


def judged(case: str, folder: Path) -> Row:
    """The verdicts on arms that were trained at their chosen learning rate: one look, with Holm's correction."""
    first, *others = SEEDS[case].configurations
    runs = {name: completed(folder / name) for name in (first, *others)}
    seeds = sorted(set.intersection(*(set(of_arm) for of_arm in runs.values())))
    losses = {name: losses_of(of_arm, seeds) for name, of_arm in runs.items()}
    tests = {name: paired(losses[name] - losses[first]) for name in others}
    levels = dict(zip(tests, holm_levels([float(test.p) for test in tests.values()]), strict=True))
    margin, arms = MARGIN * losses[first].mean(), {}
    for name, test in tests.items():
        interval = test.interval(levels[name])
        verdict = judge(interval, margin).value
        arms[name] = {"verdict": verdict, "difference": test.mean, "interval_at_level": interval}
    every = [run for of_arm in runs.values() for run in of_arm.values()]
    row = {"case": case, **origin(list(runs[first].values())), "runs": len(every)}
    row["commits"] = sorted({run.commit for run in every})
    return row | plain({"arena": {"seeds": seeds, "baseline": losses[first].mean(), "arms": arms}})


def sweep(name: str, folder: Path) -> Row:
    """The results of an arena, as its report has them. Raises SystemExit for another folder."""
    runs = find_runs([folder]).runs
    plan = read_plan(folder)
    row: Row = {"case": name, **origin(runs), "runs": len(runs)}
    row["wall_s"] = sum(float(run.summary.get("wall_time_s") or 0.0) for run in runs)
    row |= {"took_s": span(runs), "trained_on": trained_on(folder)}
    if plan:
        arena = compare_arms(plan, runs)
        probes = {arm: last_of_probes(list(result.runs.values())) for arm, result in arena.arms.items()}
        maps = {arm: maps_of_tasks(list(result.runs.values())) for arm, result in arena.arms.items()}
        return row | {"arms": plan.arms, "arena": plain(arena_json(arena)), "probes": probes, "maps": plain(maps)}
    raise SystemExit(f"error: {folder} is no arena; name the folder of one.")


def trained_on(folder: Path) -> str | None:
    """The processor and number of cores of a sweep; None for a sweep that this module did not start."""
    path = folder / MACHINE
    return str(json.loads(path.read_text())["trained_on"]) if path.exists() else None


def last_of_probes(runs: Sequence[Run]) -> dict[str, float]:
    """The final results of each probe, averaged over the runs."""
    names = sorted({name for run in runs for name in run.metrics if name.startswith("probe/")})
    ends = {name: [run.series(name).last() for run in runs] for name in names}
    return {name: float(np.mean([value for value in values if value is not None])) for name, values in ends.items()}


def maps_of_tasks(runs: Sequence[Run]) -> dict[str, Row]:
    """The accuracy on each task by length and distance, averaged over the runs."""
    maps = {}
    for task in sorted({name for run in runs for name in run.recorded("probes") if name in TASKS}):
        details = [run.recorded("probes")[task] for run in runs if task in run.recorded("probes")]
        cells = np.array([one["accuracy"] for one in details], np.float64).mean(0)  # what was not asked is NaN
        accuracy = [[None if np.isnan(cell) else round(cell, 4) for cell in row] for row in cells.tolist()]
        maps[task] = {"lengths": details[0]["lengths"], "distances": details[0]["distances"], "accuracy": accuracy}
    return maps


def plain(value: Any) -> Any:
    """A value as in a report's JSON file."""
    from recipe.files import to_json

    return json.loads(to_json(value))


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the missing runs of a case, and record its row."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    words, further = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    parser = command_line("bench.arena", __doc__, "arena")
    parser.add_argument("case", choices=(*SEEDS, *SWEEPS))
    parser.add_argument("--folder", type=Path, help=".cache/arena/<case>")
    parser.add_argument("--record", action="store_true", help="train nothing")
    args = parser.parse_args(words)
    folder = args.folder or CACHE / args.case
    if not args.record:
        measure(args.case, folder, further)
    whole = {"itself": itself, "planted": planted}
    if args.case in whole:
        row = whole[args.case](folder)
    else:
        row = judged(args.case, folder) if args.case in SEEDS else sweep(args.case, folder)
    head = measurement(command_of(parser, given), torch.device("cpu"))
    # Each row is a comparison by itself, and stays when others are measured with newer software.
    with Recorder(result_file(args.name, head["device"], args.results), ("case",), head, software=()) as recorder:
        recorder.add(row)
    print(json.dumps({key: value for key, value in row.items() if key != "losses"}, indent=1))


def measure(case: str, folder: Path, further: Sequence[str]) -> None:
    """Train the missing runs of a case. Exits where its sweep fails."""
    if case in SEEDS:
        for name, overrides in SEEDS[case].configurations.items():
            train_seeds(folder / name, SEEDS[case].seeds, [*overrides.split(), *further])
        return
    folder.mkdir(parents=True, exist_ok=True)
    here, before = f"{processor()}, {cores()} cores", trained_on(folder)
    machines = here if before in (None, here) else f"{before}; then {here}"
    write_atomically(folder / MACHINE, json.dumps({"trained_on": machines}) + "\n")
    if python(["train.py", *shlex.split(SWEEPS[case]), *further, f"hydra.sweep.dir={folder}"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
