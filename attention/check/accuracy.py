"""Forward, gradients and log-sum-exp against fp64, in all cases of grid.py."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

from .cases import Case
from .formula import RESULTS
from .grid import groups, in_order
from .judge import Verdict
from .program import inaccurate
from .run import Failure, Line, Refused, Session, verdicts
from .shrink import smallest

SECTION = "accuracy against fp64"
SHOWN = 3  # failures that are made small and printed
QUICK = 12  # a quick check tries one case of so many


def accuracy(session: Session) -> list[Line]:
    """A line for each group of cases."""
    subject, device = session.subject, session.device
    cases = {name: [case for case in its if subject.supports(case)] for name, its in groups(session.seed).items()}
    one_of = QUICK if session.quick else 1
    todo = list(in_order({name: its for name, its in cases.items() if its}, session.dtypes, session.seed, one_of))
    worst: dict[str, tuple[Case, Verdict]] = {}
    failed: dict[str, int] = Counter()
    refused: dict[str, list[str]] = defaultdict(list)
    calls: dict[str, int] = Counter()
    planned = Counter(group for group, _ in todo)
    for n, (group, case) in enumerate(todo):
        if session.out_of_time():
            break
        session.progress(group, n / len(todo))
        try:
            found = max(verdicts(subject, case, device, session.gradients), key=lambda verdict: verdict.share)
        except Refused as error:
            refused[group].append(str(error))
            continue
        calls[group] += 1
        failed[group] += not found.passes
        if group not in worst or found.share > worst[group][1].share:
            worst[group] = case, found
    lines = []
    for group, its in cases.items():
        if not its:
            lines.append(Line(SECTION, group, "skip", "not declared"))
        elif group not in worst:
            why = f"refused: {refused[group][0]}" if refused[group] else "no time was left"
            lines.append(Line(SECTION, group, "skip", why))
        else:
            case, verdict = worst[group]
            detail = f"worst {in_words(verdict, case)}"
            if failed[group]:
                detail = f"{failed[group]} of {calls[group]} wrong, {detail}"
            if refused[group]:
                ((reason, _),) = Counter(refused[group]).most_common(1)
                detail += f"; refused {len(refused[group])}: {reason}"
            if calls[group] + len(refused[group]) < planned[group]:
                detail += f"; no time for {planned[group] - calls[group] - len(refused[group])} more"
            status = "ok" if verdict.passes else "FAIL"
            lines.append(Line(SECTION, group, status, detail, calls[group], verdict.share))
    show(session, [(line, worst[line.name]) for line in lines if line.status == "FAIL"])
    return lines


def show(session: Session, wrong: list[tuple[Line, tuple[Case, Verdict]]]) -> None:
    """Find the smallest cases that fail, and give each line its failure."""
    shown: list[Failure] = []
    for line, (case, verdict) in sorted(wrong, key=lambda x: -x[1][1].share):
        if len(shown) == SHOWN:
            break
        session.progress(f"the smallest case of {line.name}", 1.0)
        failure = smallest_failure(session, case, verdict)
        if all(replace(failure.case, seed=0) != replace(other.case, seed=0) for other in shown):
            shown.append(failure)
            line.failures.append(failure)


def smallest_failure(session: Session, case: Case, verdict: Verdict) -> Failure:
    """The failure of a case, with the smallest case that shows one."""
    subject, device = session.subject, session.device

    def judged(case: Case) -> Verdict | None:
        if not subject.supports(case):
            return None
        try:
            wrong = [v for v in verdicts(subject, case, device, session.gradients) if not v.passes]
        except Refused:
            return None
        return min(wrong, key=lambda v: RESULTS.index(v.name), default=None)

    again = judged(case)
    if again is None:
        what = f"{in_words(verdict, case)}; the same call again was right, so it is not the input that decides"
        return Failure(what, case)
    if "fp32" in session.dtypes and judged(replace(case, dtype="fp32")):  # where the error stands out
        case = replace(case, dtype="fp32")
    case = smallest(case, lambda case: judged(case) is not None)
    found = judged(case)
    if found is None:
        return Failure(f"{in_words(verdict, case)}; not every call shows it", case)
    return Failure(in_words(found, case), case, inaccurate(subject, case, found, device))


def in_words(verdict: Verdict, case: Case) -> str:
    """A verdict on one line."""
    if verdict.passes:
        return f"{verdict.share:.2f} of what rounding explains ({verdict.name}, {case.dtype})"
    times = "" if verdict.share == float("inf") else f", {verdict.share:.3g} times what rounding explains"
    return f"{verdict.name} of {verdict.place()} is {verdict.error:.3g} off{times} ({case.words()})"
