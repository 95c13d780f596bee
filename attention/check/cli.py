"""The command `gpt-attention check`."""

import argparse
import math
import os
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from .. import AttentionError
from .accuracy import Accuracy
from .cases import DTYPES
from .judge import computing_with
from .named import NAMED
from .parts import Parts
from .printing import Report, as_json, text, unseen, where, write
from .run import Session, first_calls, interpreting, multiple_of
from .subject import FEATURES, STYLES, CheckError, Subject, find
from .workers import Ended, Here, Job, Workers

LENGTHS_S = 15.0  # the most seconds to find which lengths it takes
TIME = {"cpu": 300.0, "cuda": 60.0}  # the most seconds that a check takes, by the device
MOST_WORKERS = 12


def check(
    subject: Subject,
    device: torch.device | str = "cpu",
    *,
    dtypes: Sequence[str] = ("fp32", "bf16", "fp16"),
    seconds: float | None = None,
    seed: int = 0,
    quick: bool = False,
    workers: Workers | None = None,
    progress: bool = False,
) -> Report:
    """Check an implementation.

    subject   from `find`
    dtypes    names in cases.DTYPES
    seconds   no new case starts after this time; None: 300 on a CPU, 60 on a GPU
    seed      of all random numbers
    quick     try a twelfth of the cases
    workers   the processes that run the check; None: this process
    progress  show the progress on stderr

    Raises CheckError where the implementation takes none of the precisions.
    """
    device, started = torch.device(device), time.monotonic()
    deadline = started + (TIME[device.type] if seconds is None else seconds)
    session = Session(subject, device, deadline, seed, quick)
    if not progress:
        session.stream = None
    with warnings.catch_warnings(), computing_with(1), interpreting():
        warnings.simplefilter("ignore")  # libraries would repeat theirs hundreds of times
        if workers is not None:
            workers.begin(session)
        runner = workers or Here(session)

        def found(job: Job, result: Any) -> None:
            if isinstance(result, Ended):
                raise CheckError(
                    f"{subject.name} cannot be checked on {device}: in its first calls, of 64 tokens with heads of 64, "
                    f"{result.why}; such a call must return or raise an error."
                )
            for name in ("dtypes", "refused", "gradients", "no_gradients", "grouped", "multiple"):
                setattr(session, name, getattr(result, name))
            subject.features, subject.result = result.subject.features, result.subject.result

        runner.run(iter([partial(first_calls, name="first calls", dtypes=tuple(dtypes))]), found, math.inf)
        if not session.dtypes:
            raise CheckError(
                f"{subject.name} cannot be checked on {device} with two heads of 64 and 64 tokens: "
                f"{next(iter(session.refused.values()))}"
            )

        def multiple_found(job: Job, result: Any) -> None:
            if not isinstance(result, Ended):  # a call of a length that it does not take may end its process, or hang
                session.multiple = result

        runner.run(iter([partial(multiple_of, name="lengths")]), multiple_found, time.monotonic() + LENGTHS_S)
        parts, accuracy = Parts(session, runner.number), Accuracy(session)

        def done(job: Job, result: Any) -> None:
            session.progress(job.keywords.get("name", "accuracy"), accuracy.share())
            (accuracy if "planned" in job.keywords else parts).done(job, result)

        runner.run(chain(parts.jobs(), accuracy.jobs()), done, deadline)
        lines = [*accuracy.report(runner), *parts.report()]
    session.done()
    features = tuple(sorted(subject.features))
    left = unseen(features, session.dtypes, session.refused, lines, session.no_gradients)
    if session.multiple > 1:
        left.insert(0, f"Lengths that are no multiples of {session.multiple}: such calls were refused.")
    if not session.grouped:
        left.insert(0, "Fewer key/value heads than query heads: such a call was refused.")
    if not subject.exact and subject.reference is None:
        left.insert(0, "Accuracy: it does not claim to be softmax attention; --reference compares it with another.")
    took = time.monotonic() - started
    return Report(
        subject.name, subject.style, features, where(device), session.dtypes, session.refused, lines, left, took, seed,
        gradients=session.gradients, claims=subject.exact or subject.reference is not None,
    )  # fmt: skip


def argument_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    names = "\n".join(f"  {name:<16}{named.words}" for name, named in NAMED.items())
    parser = argparse.ArgumentParser(
        prog="gpt-attention check",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Is this attention correct? Judges forward, gradients and log-sum-exp against fp64, and more.",
        epilog=f"implementations with a name:\n{names}\n\nMixers are checked too; see `gpt-attention check chunked-gdn "
        "--help`.\n\nThe exit status is 0 if it is correct, 1 if not, 2 if the check could not start.",
    )
    parser.add_argument("target", help="my_module:my_attention, or a name from the list below")
    parser.add_argument("--style", choices=STYLES, help="how it is called; by default its parameters decide")
    parser.add_argument("--features", default="", metavar="A,B", help=f"declare more: {', '.join(sorted(FEATURES))}")
    parser.add_argument("--reference", metavar="TARGET", help="another implementation to compare it with")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--dtypes", default="fp32,bf16,fp16", metavar="A,B", help="precisions, of fp32, bf16, fp16, fp64"
    )
    parser.add_argument("--seconds", type=float, help="start no call after this time (300, on a GPU 60)")
    parser.add_argument("--seed", type=int, default=0, help="of all random numbers")
    parser.add_argument("--quick", action="store_true", help="a twelfth of the cases")
    parser.add_argument("--allow", default="", metavar="A,B", help='lines that may fail, such as "the same again"')
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    asked = argument_parser().parse_args(arguments)
    try:
        for dtype in asked.dtypes.split(","):
            if dtype not in DTYPES:
                raise CheckError(f"--dtypes {dtype} is not known; choose from {', '.join(DTYPES)}.")
        if asked.json is not None:
            write(asked.json, "", "a")
        try:
            device = torch.device(asked.device)
            torch.zeros(1, device=device)
        except (RuntimeError, AssertionError) as error:
            raise CheckError(f"--device {asked.device} is not here: {str(error).splitlines()[0]}") from error
        if device.type not in TIME:
            raise CheckError(f"--device {asked.device} is not checked; choose {' or '.join(TIME)}.")
        subject = find(asked.target, filter(None, asked.features.split(",")), asked.style)
        if asked.reference is not None:
            subject.reference = find(asked.reference)
        # At most one process for each core and, on a GPU, for each 2 GiB of free memory.
        number = min(os.cpu_count() or 1, MOST_WORKERS)
        if device.type == "cuda":
            number = min(number, torch.cuda.mem_get_info(device)[0] // 2**31)
        workers = Workers(max(number, 1))
        try:
            report = check(
                subject,
                device,
                dtypes=asked.dtypes.split(","),
                seconds=asked.seconds,
                seed=asked.seed,
                quick=asked.quick,
                workers=workers,
                progress=True,
            )
        finally:
            workers.close()
        report = replace(report, allowed=frozenset(filter(None, asked.allow.split(","))))
        print(text(report))
        for name in sorted(report.allowed - {line.name for line in report.lines}):
            print(f"note: --allow {name} names none of these lines.", file=sys.stderr)
        if asked.json is not None:
            write(asked.json, as_json(report))
        return 1 if report.failed() else 0 if report.compared() else 2
    except AttentionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted: nothing is judged", file=sys.stderr)
        return 130
