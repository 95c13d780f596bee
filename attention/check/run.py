"""Runs cases and judges their results. All parts of a check share a `Session`."""

import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TextIO, TypeVar

import torch
from torch import Tensor

from ..gpu import HAS_TRITON, INTERPRET
from .cases import Case, draw
from .results import Refused, results
from .subject import CheckError, Subject

USUAL_LENGTHS = (64, 128, 256)  # of the first calls: the next where one is refused
Item = TypeVar("Item")


@dataclass
class Failure:
    """A failure, and a program that reproduces it.

    what  the failure in words
    case  the smallest case that fails
    code  a program of about ten lines that ends in AssertionError; empty where there is none
    """

    what: str
    case: Case
    code: str = ""


@dataclass
class Line:
    """A verdict: a line of the report.

    status   ok, FAIL, note (a property that is no fault) or skip (with the reason)
    calls    the number of cases or calls that support it
    share    the largest error, as a share of the limit; None where nothing was compared
    section  of the report; set for the lines of a part together
    """

    name: str
    status: str
    detail: str
    calls: int = 0
    share: float | None = None
    failures: list[Failure] = field(default_factory=list)
    section: str = ""


def failed(name: str, what: str, case: Case, code: str = "", calls: int = 1, share: float | None = None) -> Line:
    """The line of a failure."""
    return Line(name, "FAIL", what, calls, share, [Failure(what, case, code)])


@dataclass
class Session:
    """The state that the parts of a check share.

    deadline      no new case starts after this value of time.monotonic()
    quick         try only some of the cases
    dtypes        the precisions that the implementation takes, by their names in cases.DTYPES
    refused       the other precisions, with the reasons
    gradients     whether the implementation has a backward pass
    no_gradients  the reason why it has none
    grouped       whether it takes fewer key/value heads than query heads
    multiple      the number of which the lengths that it takes are multiples
    threads       the number of torch's threads where a check depends on it; elsewhere it is one, which is faster for
                  small tensors
    """

    subject: Subject
    device: torch.device
    deadline: float
    seed: int = 0
    quick: bool = False
    dtypes: tuple[str, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)
    gradients: bool = True
    no_gradients: str = ""
    grouped: bool = True
    multiple: int = 1
    stream: TextIO | None = field(default_factory=lambda: sys.stderr)
    started: float = field(default_factory=time.monotonic)
    threads: int = field(default_factory=torch.get_num_threads)
    _shown: float = 0.0
    _share: float = 0.0

    def __getstate__(self) -> dict[str, Any]:
        """For another process, which shows no progress."""
        return vars(self) | {"stream": None}

    def kv_heads(self, query_heads: int) -> int:
        """The key/value heads of a case with grouped heads: half of the query heads, or all where they are refused."""
        return query_heads // 2 if self.grouped else query_heads

    def case(self, T: int, S: int | None = None, dtype: str | None = None, **changes: Any) -> Case:
        """A case that the implementation takes: two sequences, four heads and grouped keys, unless `changes` differ."""
        usual = Case(T=T, S=T if S is None else S, D=32, B=2, H=4, H_kv=self.kv_heads(4), seed=self.seed)
        usual = replace(usual, dtype=dtype or self.dtypes[0], causal="causal" in self.subject.features)
        return self.fitting(replace(usual, **changes))

    def fitting(self, case: Case) -> Case:
        """The case with the next lengths that the implementation takes; documents keep theirs."""
        if case.documents:
            return case
        T, S = (-(-length // self.multiple) * self.multiple for length in (case.T, case.S))
        return replace(case, T=T, S=S)

    def out_of_time(self) -> bool:
        return time.monotonic() > self.deadline

    def timely(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items, until the time is up."""
        for item in items:
            if self.out_of_time():
                return
            yield item

    def progress(self, name: str, share: float | None = None) -> None:
        """Show how far the check is: on a terminal a line that changes, elsewhere a line every ten seconds.

        share  the share that is done; None: unchanged
        """
        self._share = share = self._share if share is None else share
        now = time.monotonic()
        if self.stream is None or now - self._shown < (0.1 if self.stream.isatty() else 10.0):
            return
        self._shown = now
        line = f"[{'#' * round(20 * share):<20}] {share:4.0%}  {now - self.started:4.0f} s  {name}"
        self.stream.write(f"\r{line:<79}" if self.stream.isatty() else f"{line}\n")
        self.stream.flush()

    def done(self) -> None:
        """Clear the progress line."""
        if self.stream is not None and self.stream.isatty():
            self.stream.write("\r" + " " * 79 + "\r")


@contextmanager
def interpreting() -> Iterator[None]:
    """Within the block, Triton's interpreter is faster and has a GPU's bf16, if kernels run in it."""
    if not (HAS_TRITON and INTERPRET.value):
        yield
        return
    from .interpreter import bf16_of_a_gpu, hasten

    hasten()
    with bf16_of_a_gpu():
        yield


def prepare(session: Session, dtypes: tuple[str, ...]) -> None:
    """Try which precisions and lengths the implementation takes, and whether it has gradients and takes grouped heads.

    The case has usual sizes; an implementation for other head sizes may refuse it. Raises CheckError for results of
    another form than the formula's.
    """
    usual = usual_case(session)
    sizes = (length for length in USUAL_LENGTHS if any(takes(session, usual, length, dtype) for dtype in dtypes))
    length = next(sizes, USUAL_LENGTHS[0])
    session.multiple = 1 if length == USUAL_LENGTHS[0] else length
    for dtype in dtypes:
        case = session.fitting(replace(usual, dtype=dtype))
        inputs = draw(case, session.device)
        if refusal := session.subject.refusal(case, session.device):
            session.refused[dtype] = refusal
            continue
        try:
            got = results(session.subject, case, inputs, gradients=False)
        except Refused as error:
            session.refused[dtype] = str(error)
            continue
        check_form(session.subject, inputs.q, got)
        session.dtypes += (dtype,)
        try:
            results(session.subject, case, inputs)
        except Refused as error:
            session.gradients, session.no_gradients = False, str(error)
    if session.dtypes:
        case = replace(usual, H=4)
        session.grouped = takes(session, case, session.fitting(case).T, session.dtypes[0])


def usual_case(session: Session) -> Case:
    """A case of usual sizes, which almost every implementation takes."""
    return Case(T=64, S=64, D=64, B=1, H=2, H_kv=2, causal="causal" in session.subject.features)


def takes(session: Session, case: Case, length: int, dtype: str) -> bool:
    """Whether the implementation computes a case of a length and precision, without gradients."""
    case = replace(case, T=length, S=length, dtype=dtype)
    inputs = draw(case, session.device)
    session.subject.try_lse(case, inputs)
    try:
        results(session.subject, case, inputs, gradients=False)
    except Refused:
        return False
    return True


def multiple_of(session: Session, name: str) -> int:
    """The number, a power of two, of which the lengths that the implementation takes are multiples. A job."""
    usual, dtype = usual_case(session), session.dtypes[0]
    length = session.fitting(usual).T
    steps = (2**n for n in range(length.bit_length() - 1))
    return next((step for step in steps if takes(session, usual, length + step, dtype)), length)


def first_calls(session: Session, name: str, dtypes: tuple[str, ...]) -> Session:
    """`prepare` as a job. Returns the session with what it has found."""
    session.progress(name, 0.0)
    prepare(session, dtypes)
    return session


def check_form(subject: Subject, q: Tensor, got: Mapping[str, Tensor | None]) -> None:
    """Raise CheckError unless out has the shape (B, H, T, D) and the dtype of q, and the log-sum-exp, if there is one,
    the shape (B, H, T)."""
    for name, form, shape in (("out", "(B, H, T, D)", q.shape), ("lse", "(B, H, T)", q.shape[:3])):
        x = got.get(name)
        if x is not None and x.shape != shape:
            raise CheckError(
                f"{subject.name} returns {name} of {tuple(x.shape)} where {form} is {tuple(shape)}; it is called as "
                f"{subject.style}, and --style chooses another call."
            )
    out = got["out"]
    assert out is not None
    if out.dtype != q.dtype:
        raise CheckError(f"{subject.name} returns {out.dtype} for q, k and v in {q.dtype}; return their dtype.")
