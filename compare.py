"""Compare runs: is each attention implementation the reference, up to rounding, and what does it cost?

    python compare.py multirun/2026-11-20/10-00-00
    python compare.py outputs/2026-11-20/10-00-00-naive outputs/2026-11-20/10-05-00-flash out=comparison

Reads run folders alone: no GPU, no W&B, no network. Writes index.html (one page, figures within), report.md, figures/
(SVG and PNG, light and dark), runs.csv and curves.csv.

    <folder> ...          run folders, or folders that hold some (a sweep)
    out=<folder>          where to write; report/ in the given folder, or report-out/ where several are given
    reference=<label>     the implementation to compare with (naive)
    wandb=<mode>          online, offline or disabled: log figures and tables to a W&B run beside the runs
                          (as the runs did)
"""

from __future__ import annotations

import sys
from pathlib import Path

from errors import UserError
from report.groups import label_order
from report.page import write_report
from report.publish import MODES, mode_of, publish
from report.runs import ReportError, find_runs

OPTIONS = ("out", "reference", "wandb")


def main(arguments: list[str]) -> None:
    """Write the report that the command line asks for. Raises UserError."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(__doc__)
        return
    folders, options = parse(arguments)
    found = find_runs(folders)
    reference = options.get("reference", "naive")
    labels = sorted({run.label for run in found.runs}, key=label_order)
    if "reference" in options and reference not in labels:
        raise ReportError(f"reference={reference} is not among the runs; there are {', '.join(labels)}.")
    out = Path(options.get("out") or (folders[0] / "report" if len(folders) == 1 else "report-out"))
    try:
        report = write_report(found, out, reference)
    except OSError as error:
        raise ReportError(
            f"the report cannot be written to {out} ({error.strerror}); name another folder with out=<folder>."
        ) from error
    for note in report.notes:
        print(f"note: {note}")
    print(report.verdict.sentence)
    print(f"report: {out / 'index.html'}")
    mode = options.get("wandb") or mode_of(found.runs)
    if mode != "disabled":
        print(publish(found.runs, out, mode))


def parse(arguments: list[str]) -> tuple[list[Path], dict[str, str]]:
    """Folders and key=value options. Raises ReportError for a key or a value that is not known."""
    options: dict[str, str] = {}
    folders: list[Path] = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or Path(argument).exists():
            folders.append(Path(argument))
        elif key not in OPTIONS:
            raise ReportError(f"{argument} is not an option of compare.py; there are {', '.join(OPTIONS)}.")
        else:
            options[key] = value
    if not folders:
        raise ReportError("compare.py needs a folder of runs, such as multirun/2026-11-20/10-00-00.")
    if options.get("wandb", "offline") not in MODES:
        raise ReportError(f"wandb={options['wandb']} is not a mode; choose one of {', '.join(MODES)}.")
    return folders, options


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
