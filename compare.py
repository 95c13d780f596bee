"""Compare runs: is each attention implementation the reference, up to rounding, and what does it cost? And of an arena
(experiment=arena): which arm is better, by how much, how sure is that, and does it hold when the model grows?

    python compare.py multirun/2026-11-20/10-00-00
    python compare.py outputs/2026-11-20/10-00-00-naive outputs/2026-11-20/10-05-00-flash out=comparison

Reads run folders alone: no GPU, no W&B, no network. Writes index.html (one page, figures within), figures/
(PNG), and runs.csv.

    <folder> ...          run folders, or folders that hold some (a sweep)
    out=<folder>          where to write; report/ in the given folder, or report-out/ where several are given
    reference=<label>     the implementation to compare with (naive)
    wandb=<mode>          online, offline or disabled: log the page to a W&B run beside the runs (as the runs did)

Is a commit better than the best of a track so far (docs/referee.md)? Exit status 0: kept, 1: dropped, 2: not valid.

    python compare.py referee=mini commit=HEAD
    python compare.py referee=mini                    the leaderboard

    referee=<track>       a folder of records/
    commit=<name>         the commit to judge
    salt=<n>              with other initial weights, where the track allows it: a change of noise alone
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from recipe.compare.arena_page import write_arena_report
from recipe.compare.page import MODES, mode_of, publish, write_report
from recipe.compare.referee import KEPT, Judge
from recipe.compare.referee_page import leaderboard, verdict, write_referee_page
from recipe.compare.runs import ReportError, find_runs
from recipe.compare.sweeps import label_order, labels_of
from recipe.errors import UserError, fail, refuse_windows_lines
from recipe.run.arguments import parse as key_values
from recipe.run.plan import Plan, read_plan
from recipe.wording import markdown_table


@dataclass
class CompareConfig:
    """The options; the module's docstring describes them."""

    out: str | None = None
    reference: str | None = None
    wandb: str | None = None
    referee: str | None = None
    commit: str | None = None
    salt: int = 0


def main(arguments: list[str]) -> int:
    """Write the report that the command line asks for. Returns the exit status. Raises UserError."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    folders, config = parse(arguments)
    if config.referee is not None:
        return referee(config)
    collected = find_runs(folders)
    plan = planned(folders, config)
    reference = config.reference or "naive"
    labels = sorted(set(labels_of(collected.runs).values()), key=label_order)
    if config.reference and reference not in labels:
        raise ReportError(f"reference={reference} is not among the runs; there are {', '.join(labels)}.")
    out = Path(config.out or (folders[0] / "report" if len(folders) == 1 else "report-out"))
    try:
        with written_at_once(out) as partial:
            if plan:
                report = write_arena_report(collected, plan, folders[0], partial)
            else:
                report = write_report(collected, partial, reference)
    except OSError as error:
        raise ReportError(
            f"the report cannot be written to {out} ({error.strerror}), and nothing of it was; free space there, or "
            "name another folder with out=<folder>."
        ) from error
    print(f"{report.headline.text}.")
    for label, found in report.lines:
        print(f"  {label}: {found}")
    for title, command in report.commands:
        print(f"{title}:\n  {command}")
    if report.notes:
        print(f"notes on these runs: {len(report.notes)}, on the page")
    print(f"report: {out / 'index.html'}")
    mode = config.wandb or mode_of(collected.runs)
    if mode != "disabled":
        print(publish(collected.runs, out, mode))
    return 0


def referee(config: CompareConfig) -> int:
    """Judge a commit, or print the leaderboard. Returns 0 for a commit that is kept, 1 for one that is dropped, and 2
    where there was no valid attempt."""
    try:
        judge = Judge(config.referee or "", config.out)
        if config.commit is None:
            board = leaderboard(judge)
            print(f"{board.title}\n\n{markdown_table(board.columns, board.rows)}")
            return 0
        with judge:
            edit = judge.judge(config.commit, config.salt)
            print(verdict(edit))
            if page := write_referee_page(judge, edit):
                print(f"page: {page}")
            return int(edit["verdict"] != KEPT)
    except UserError as error:
        print(f"not valid: {error}", file=sys.stderr)
        return 2


@contextmanager
def written_at_once(out: Path) -> Iterator[Path]:
    """A folder whose files move into `out` when all are written, and vanish otherwise."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as partial:
        yield Path(partial)
        for path in sorted(Path(partial).rglob("*")):
            target = out / path.relative_to(partial)
            if path.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                path.replace(target)


def planned(folders: list[Path], config: CompareConfig) -> Plan | None:
    """The plan of the arena in the given folder; None for other runs. Raises UserError."""
    folder, plan = next(((folder, plan) for folder in folders if (plan := read_plan(folder))), (None, None))
    if plan and len(folders) > 1:
        raise ReportError(f"{folder} is an arena, and its arms are not compared with other runs; give it alone.")
    if plan and config.reference:
        raise ReportError("reference= names an implementation; the baseline of an arena is the first arm of its plan.")
    return plan


def parse(arguments: list[str]) -> tuple[list[Path], CompareConfig]:
    """Folders and options. Raises UserError for an option or a value that is not known."""
    folders = [argument for argument in arguments if "=" not in argument or Path(argument).exists()]
    config = key_values([argument for argument in arguments if argument not in folders], CompareConfig, "compare.py")
    if config.referee is None and (config.commit or config.salt):
        raise ReportError("commit= and salt= are for the referee; name a track with referee=<track>.")
    if config.referee is not None and (folders or config.reference or config.wandb):
        raise ReportError("referee= takes commit=, salt= and out=, and no folders of runs; leave the others out.")
    if not folders and config.referee is None:
        raise ReportError("compare.py needs a folder of runs, such as multirun/2026-11-20/10-00-00.")
    if config.wandb not in (None, *MODES):
        raise ReportError(f"wandb={config.wandb} is not a mode; choose one of {', '.join(MODES)}.")
    return [Path(folder) for folder in folders], config


if __name__ == "__main__":
    refuse_windows_lines()
    try:
        status = main(sys.argv[1:])
        sys.stdout.flush()
        os._exit(status)  # a W&B that hangs does not hold the process
    except UserError as error:
        fail(error)
    except KeyboardInterrupt:
        sys.exit(130)
