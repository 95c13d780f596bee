"""Forward, gradients and log-sum-exp against fp64, in all cases of grid.py."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from .cases import Case
from .formula import RESULTS
from .grid import groups
from .judge import Verdict, worst_of
from .plan import Plan, Planned
from .program import crashing, inaccurate
from .results import USUAL, Refused, Way, verdicts
from .run import Failure, Line, Session
from .shrink import smallest
from .workers import Ended, Job, Runner

SECTION = "accuracy against"
SHOWN = 3  # failures that are reduced to a small case and printed
SMALLER_S = 20.0  # seconds to reduce all of them
QUICK = 12  # a quick check tries one case in 12
CRASHES = 8  # the check of accuracy stops after so many


class Accuracy:
    """The calls of all cases as jobs, and the lines of the report that follow from their results."""

    def __init__(self, session: Session) -> None:
        self.session = session
        reference = session.subject.reference
        self.section = f"{SECTION} {reference.name if reference else 'fp64'}"
        supports, one_of = session.subject.supports, QUICK if session.quick else 1
        self.groups = {
            name: [case if name == "lengths" else session.fitting(case) for case in cases if supports(case)]
            for name, cases in groups(session.seed).items()
            if reference is not None or session.subject.exact
        }
        self.plan = Plan(self.groups, session.dtypes, session.seed, one_of)
        self.worst: dict[str, tuple[Case, Verdict]] = {}
        self.failed: dict[str, int] = Counter()
        self.unjudged: dict[str, int] = Counter()
        self.calls: dict[str, int] = Counter()
        self.refused: dict[str, list[str]] = defaultdict(list)
        self.crashes: dict[str, list[Failure]] = defaultdict(list)

    def jobs(self) -> Iterator[Job]:
        """The cases, until the time is up."""
        while self.plan.todo and not self.session.out_of_time():
            yield partial(judged_call, planned=self.plan.todo.pop(0))

    def done(self, job: Job, result: list[Verdict] | str | Ended) -> None:
        """Record the result of a job."""
        planned = job.keywords["planned"]
        group, case = planned.group, planned.case
        if isinstance(result, Ended):
            if result.why:
                self.crashed(planned, result.why)
            else:
                self.plan.todo.append(planned)
            return
        self.plan.tried.append(planned)
        if isinstance(result, str):
            self.refused[group].append(result)
            return
        verdict = worst_of(result)
        self.calls[group] += 1
        self.failed[group] += not verdict.passes
        self.unjudged[group] += sum(verdict.unjudged for verdict in result)
        if group not in self.worst or verdict.share > self.worst[group][1].share:
            self.worst[group] = case, verdict

    def crashed(self, planned: Planned, why: str) -> None:
        """Record a call that ended its process, and leave out other calls with its memory layout: they would end theirs
        too, and each costs seconds."""
        case = planned.case
        self.plan.tried.append(planned)
        self.calls[planned.group] += 1
        self.failed[planned.group] += 1
        more = self.plan.give_up(case.memory) if case.memory != "contiguous" else 0
        left_out = f"; {more} more with {case.memory} are left out" if more else ""
        self.crashes[planned.group].append(Failure(f"{why} ({case.words()}){left_out}", case))
        if sum(map(len, self.crashes.values())) >= CRASHES:
            self.plan.todo.clear()

    def share(self) -> float:
        """The share of the calls that have been tried."""
        return len(self.plan.tried) / max(len(self.plan.tried) + len(self.plan.todo), 1)

    def report(self, runner: Runner) -> list[Line]:
        """A line for each group of cases. The worst failures are reduced to small cases."""
        lines = [replace(self.line(group), section=self.section) for group in self.groups]
        for line in lines:
            for crash in self.crashes[line.name][:1]:
                session = self.session
                crash.code = crashing(session.subject, crash.case, session.device, session.gradients)
                line.failures.append(crash)
        self.show(runner, [line for line in lines if line.share is not None and line.share > 1])
        return lines

    def line(self, group: str) -> Line:
        """The report's line on a group."""
        if not self.groups[group]:
            return Line(group, "skip", "not declared")
        refused, crashes = self.refused[group], self.crashes[group]
        if group not in self.worst and not crashes:
            return Line(group, "skip", f"refused: {refused[0]}" if refused else "no time was left")
        details, share, passes = list[str](), None, not crashes
        if crashes:
            details.append(f"{len(crashes)} of {self.calls[group]} end their process: {crashes[0].what}")
        if group in self.worst:
            case, verdict = self.worst[group]
            share, passes = verdict.share, verdict.passes and passes
            wrong = self.failed[group] - len(crashes)
            details.append(
                f"{f'{wrong} of {self.calls[group]} wrong, ' if wrong else ''}worst {in_words(verdict, case)}"
            )
        if group == "shifts" and len(self.session.dtypes) > 1:
            details.append("16 bits leave dq few digits there: s and delta are rounded")
        if rows := self.unjudged[group]:
            details.append(f"{rows:,} rows are not judged: the reference is not finite there")
        if refused:
            ((reason, _),) = Counter(refused).most_common(1)
            details.append(f"refused {len(refused)}: {reason}")
        if left_out := self.plan.left_out(group):
            details.append(left_out)
        return Line(group, "ok" if passes else "FAIL", "; ".join(details), self.calls[group], share)

    def show(self, runner: Runner, wrong: list[Line]) -> None:
        """Reduce the worst failures to small cases, and add them to their lines."""
        wrong = sorted(wrong, key=lambda line: -self.worst[line.name][1].share)[:SHOWN]
        shown = {}

        def jobs() -> Iterator[Job]:
            for line in wrong:
                self.session.progress(f"the smallest case of {line.name}", 1.0)
                case, verdict = self.worst[line.name]
                yield partial(smallest_failure, case=case, verdict=verdict)

        def done(job: Job, result: Failure | Ended) -> None:
            case, verdict = job.keywords.values()
            shown[verdict] = Failure(in_words(verdict, case), case) if isinstance(result, Ended) else result

        runner.run(jobs(), done, time.monotonic() + SMALLER_S)
        cases = set[Case]()
        for line in wrong:
            failure = shown[self.worst[line.name][1]]
            if replace(failure.case, seed=0) not in cases:
                cases.add(replace(failure.case, seed=0))
                line.failures.append(failure)


def judged_call(session: Session, planned: Planned) -> list[Verdict] | str:
    """The verdicts on a call's results, or why it was refused."""
    try:
        return verdicts(session.subject, planned.case, session.device, session.gradients)
    except Refused as error:
        return str(error)


def smallest_failure(session: Session, case: Case, verdict: Verdict, way: Way = USUAL) -> Failure:
    """The failure of a case, reduced to the smallest case that still fails if it is called in the same way."""
    subject, device = session.subject, session.device

    def judged(case: Case) -> Verdict | None:
        if not subject.supports(case):
            return None
        try:
            wrong = [v for v in verdicts(subject, case, device, session.gradients, way) if not v.passes]
        except Refused:
            return None
        return min(wrong, key=lambda v: RESULTS.index(v.name), default=None)

    if judged(case) is None:
        what = f"{in_words(verdict, case, way)}; a repetition of the call was right, so the input alone does not decide"
        return Failure(what, case)
    if "fp32" in session.dtypes and judged(replace(case, dtype="fp32")):  # in which an error is clearest
        case = replace(case, dtype="fp32")
    case = smallest(case, lambda case: judged(case) is not None)
    smaller = judged(case)
    if smaller is None:
        return Failure(f"{in_words(verdict, case, way)}; not every call shows it", case)
    return Failure(in_words(smaller, case, way), case, inaccurate(subject, case, smaller, device, way))


def in_words(verdict: Verdict, case: Case, way: Way = USUAL) -> str:
    """A verdict on one line."""
    if verdict.passes:
        return f"{verdict.share:.2f} of what rounding explains ({verdict.name}, {case.dtype})"
    times = "" if verdict.share == float("inf") else f", {verdict.share:.3g} times what rounding explains"
    return f"{verdict.name} of {verdict.place()} is {verdict.error:.3g} off{way.words}{times} ({case.words()})"
