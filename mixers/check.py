"""Is a mixer correct? Its output, last state and gradients against the recurrence token by token in fp64.

    gpt-attention check fla-gdn              a name: recurrent, chunked or fla, and a published mixer
    gpt-attention check my_module:my_mixer   called as `mix` is, or as the functions of flash-linear-attention are

The error of a row, of one token or one channel of a state, is measured in units of the rounding to expect of it: what
the recurrence in fp64 does where each input is changed by one rounding. LIMIT units pass.
"""

import argparse
import inspect
import json
import math
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import IMPLEMENTATIONS
from .cases import DTYPES, B, Case, cases, draw
from .fla import check_device, check_gradients, through_package
from .recurrence import Decay, MixerError, MixerInputs, Recurrence
from .recurrent import recurrent

LIMIT = 10.0
DRAWS = 4  # of changed inputs
SUMMED = 64  # tokens of a chunk
RECURRENCES = {
    "linear": Recurrence(),
    "retnet": Recurrence(Decay.fixed),
    "mamba2": Recurrence(Decay.head),
    "gla": Recurrence(Decay.channel),
    "deltanet": Recurrence(Decay.none, True),
    "gdn": Recurrence(Decay.head, True),
    "kda": Recurrence(Decay.channel, True),
}
NAMES = [f"{way}-{name}" for way in IMPLEMENTATIONS for name in RECURRENCES]
OURS, PACKAGES = {"log_decay", "beta", "initial", "documents"}, {"g", "beta", "initial_state", "cu_seqlens"}
TAKES = frozenset({"beta", "scale", "initial", "documents"})
Mixer = Callable[[MixerInputs, Recurrence, float], tuple[Tensor, Tensor | None]]
Load = Callable[[str], Any]  # what my_module:name or file.py:name names; raises ValueError


class Subject(NamedTuple):
    """A mixer to check.

    takes  of beta, scale, initial and documents, what it has
    """

    name: str
    call: Mixer
    recurrence: Recurrence
    takes: frozenset[str] = TAKES


class Verdict(NamedTuple):
    """The worst row of a result of a case; above a share of 1 its error is not rounding."""

    share: float
    result: str
    row: tuple[int, ...]
    error: float
    case: Case

    def words(self) -> str:
        """For a report."""
        if self.share <= 1:
            return f"worst {self.share:.2f} of what rounding explains ({self.result}, {self.case.dtype})"
        times = f"{self.error:.3g} off, {self.share:.3g} times what rounding explains"
        return f"{self.result} of {self.row} is {times} ({self.case.words()})"


class Line(NamedTuple):
    """The judgement of a group of cases: ok, FAIL or skip."""

    status: str
    group: str
    detail: str


def results(
    mixer: Mixer, inputs: MixerInputs, directions: tuple[Tensor, Tensor], case: Case
) -> dict[str, Tensor | None]:
    """out, state and the gradients of all inputs, by name; None for a gradient that autograd does not give."""
    given = {name: x for name, x in vars(inputs).items() if x is not None and name != "documents"}
    leaves = {name: x.detach().requires_grad_() for name, x in given.items()}
    scale = case.sizes[0] ** -0.5 if case.scale is None else case.scale
    out, state = mixer(replace(inputs, **leaves), case.recurrence, scale)
    ends = [(x, d.to(x.dtype)) for x, d in zip((out, state), directions, strict=True) if x is not None]
    ends = [(x, d) for x, d in ends if x.requires_grad]
    found = torch.autograd.grad([x for x, _ in ends], list(leaves.values()), [d for _, d in ends], allow_unused=True)
    return {"out": out, "state": state} | {f"d{name}": x for name, x in zip(leaves, found, strict=True)}


@lru_cache(maxsize=256)
def expected(case: Case, device: torch.device, has_state: bool) -> dict[str, tuple[Tensor, Tensor]]:
    """For each result its values in fp64, and the rounding to expect of each row."""
    inputs, (d_out, d_state) = draw(case, device)
    generator = torch.Generator(device).manual_seed(1)
    precision = torch.finfo(DTYPES[case.dtype])
    u = precision.eps / 2

    def several(x: Tensor) -> Tensor:
        """x itself, and changed by rounding DRAWS times, as further sequences in fp64."""
        if not x.is_floating_point():
            return x.repeat(1 + DRAWS, 1)
        unit = min(u, torch.finfo(x.dtype).eps / 2)
        x = x.double().repeat(1 + DRAWS, *[1] * (x.ndim - 1))
        noise = torch.randn(x.shape, generator=generator, device=device, dtype=x.dtype)
        noise[:B] = 0
        return x * (1 + unit * noise)

    many = replace(inputs, **{name: several(x) for name, x in vars(inputs).items() if x is not None})
    if inputs.log_decay is not None and many.log_decay is not None:
        # Chunks sum the decay's logarithms and subtract the sums: an error of rounding the sums.
        sums = torch.finfo(inputs.log_decay.dtype).eps / 2 * SUMMED * inputs.log_decay.double().mean(2, keepdim=True)
        many.log_decay[B:] += sums.repeat(DRAWS, 1, 1, 1) * torch.randn(
            many.log_decay[B:].shape, generator=generator, device=device, dtype=torch.float64
        )
    found = results(recurrent, many, (several(d_out), several(d_state) * has_state), case)
    expectations = {}
    for name, x in found.items():
        assert x is not None
        exact, *changed = x.detach().unflatten(0, (1 + DRAWS, B))
        squares = torch.stack([rows(name, (y - exact).square()) for y in changed]).mean(0)
        squares = squares + u * u * rows(name, exact.square())
        if name == "dbeta":  # a single number, which may be small by chance
            squares = torch.maximum(squares, squares.mean(2, keepdim=True))
        if name == "dlog_decay":  # the difference of sums of q dq and k dk over the later tokens
            terms = [(getattr(many, x) * found[f"d{x}"]).detach()[:B].square().mean(-1) for x in "qk"]
            squares = squares + u * u * (terms[0] + terms[1]).sum(2, keepdim=True)
        smallest = precision.smallest_normal * precision.eps
        expectations[name] = exact, squares.sqrt() + smallest
    return expectations


def rows(name: str, x: Tensor) -> Tensor:
    """The means over the channels of each token or, of a state, over its columns."""
    return x if name == "dbeta" else x.mean(-1)


def judge(subject: Subject, case: Case, device: torch.device) -> Verdict:
    """The verdict on a case. Raises what the mixer raises."""
    inputs, directions = draw(case, device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = results(subject.call, inputs, directions, case)
    worst = Verdict(0.0, "out", (), 0.0, case)
    for name, (exact, unit) in expected(case, device, found["state"] is not None).items():
        x = found[name]
        if name == "state" and x is None:
            continue
        x = torch.full_like(exact, math.nan) if x is None or x.shape != exact.shape else x.detach().double()
        error = (x - exact).abs().nan_to_num(nan=math.inf)
        error = error if name == "dbeta" else error.amax(-1)
        share = error / (unit * LIMIT * math.sqrt(1 + math.log(exact.numel())))
        if share.max() > worst.share:
            row = torch.unravel_index(share.argmax(), share.shape)
            place = tuple(int(i) for i in row)
            worst = Verdict(share.max().item(), name, place, error[place].item(), case)
    return worst


def check(
    subject: Subject, device: torch.device, dtypes: Sequence[str], chunk: int, sizes: tuple[int, int]
) -> Iterator[Line]:
    """A line for each group of cases."""
    judged: dict[str, list[Verdict]] = defaultdict(list)
    refused: dict[str, list[str]] = defaultdict(list)
    for case in cases(subject.recurrence, sizes, chunk, subject.takes):
        for dtype in dtypes:
            if case.group == "long" and DTYPES[dtype].itemsize > 2:
                continue
            try:
                judged[case.group].append(judge(subject, replace(case, dtype=dtype), device))
            except Exception as error:
                refused[case.group].append(str(error).partition("\n")[0])
    for group in dict.fromkeys((*judged, *refused)):
        verdicts, reasons = judged[group], refused[group]
        if not verdicts:
            yield Line("skip", group, f"refused: {reasons[0]}")
            continue
        worst, wrong = max(verdicts, key=lambda verdict: verdict.share), sum(v.share > 1 for v in verdicts)
        words = (f"{wrong} of {len(verdicts)} wrong, " if wrong else "") + worst.words()
        more = f"; refused {len(reasons)}: {reasons[0]}" if reasons else ""
        yield Line("FAIL" if wrong else "ok", group, f"{words}; {len(verdicts)} calls{more}")
    for name in sorted(TAKES - subject.takes):
        yield Line("skip", name, "not among its parameters")


def parameters_of(function: Callable[..., Any]) -> set[str]:
    """The names of a function's parameters."""
    return set(inspect.signature(function).parameters)


def takes_on(arguments: Sequence[str], load: Load) -> bool:
    """Whether the arguments of `gpt-attention check` name a mixer, and no attention."""
    target = next((argument for argument in arguments if argument in NAMES or ":" in argument), "")
    if target in NAMES or any(argument.startswith("--mixer") for argument in arguments):
        return True
    try:
        return bool(parameters_of(load(target)) & (OURS | PACKAGES) - {"documents", "cu_seqlens"})
    except (TypeError, ValueError):  # it cannot be loaded, or has no signature
        return False


def named(target: str, device: torch.device) -> Subject:
    """The mixer of a name of NAMES. Raises MixerError."""
    way, _, kind = target.partition("-")
    if way == "fla":
        check_device(device)
        check_gradients(RECURRENCES[kind], device)
    return Subject(target, IMPLEMENTATIONS[way], RECURRENCES[kind])


def of_function(target: str, function: Callable[..., Any], name: str | None, device: torch.device) -> Subject:
    """The mixer that a function is, which computes the recurrence of `name`. Raises MixerError.

    name  None: the recurrence that a call of a few tokens is nearest to
    """
    names = parameters_of(function)
    if PACKAGES & names - OURS:
        call: Mixer = partial(through_package, function)
        theirs = {"initial_state": "initial", "cu_seqlens": "documents"}
        takes = {theirs.get(name, name) for name in names}
    else:
        call, takes = partial(called, function, names), names
    subject = Subject(target, call, Recurrence(), TAKES & takes)
    if name is not None:
        return subject._replace(recurrence=RECURRENCES[name])
    kinds = (Decay.head, Decay.channel) if {"g", "log_decay"} & names else (Decay.none,)
    distances = {}
    for recurrence in RECURRENCES.values():
        if recurrence.decay in kinds:
            case = Case("lengths", recurrence, (16, 16), (5,), has_beta="beta" in takes)
            try:
                out = results(call, *draw(case, device), case)["out"]
                assert out is not None
                exact, _ = expected(case, device, False)["out"]
                distances[recurrence] = (out - exact).norm().nan_to_num(nan=math.inf).item()
            except Exception as error:
                reason = str(error)
    if not distances:
        raise MixerError(f"{target} computed none of the recurrences on 5 tokens: {reason}")
    return subject._replace(recurrence=min(distances, key=distances.__getitem__))


def called(
    function: Callable[..., Any], names: set[str], inputs: MixerInputs, recurrence: Recurrence, scale: float
) -> tuple[Tensor, Tensor | None]:
    """A function with parameters of `mix`'s names, and its output alone or with the last state."""
    options = {name: x for name in OURS & names if (x := getattr(inputs, name)) is not None}
    if "scale" in names:
        options["scale"] = scale
    result = function(inputs.q, inputs.k, inputs.v, **options)
    return (result, None) if isinstance(result, Tensor) else result


def main(arguments: Sequence[str], load: Load) -> int:
    """Run `gpt-attention check` for a mixer; returns the exit status: 0 if it is correct, 1 if not, 2 if unknown."""
    parser = argparse.ArgumentParser(prog="gpt-attention check", description=__doc__)
    parser.add_argument("target", help=f"my_module:my_mixer, or one of {', '.join(NAMES)}")
    parser.add_argument("--mixer", choices=RECURRENCES, help="what it computes; by default what it is nearest to")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtypes", default="fp32,bf16,fp16", help="precisions, of fp32, bf16, fp16, fp64")
    parser.add_argument("--chunk", type=int, default=64, help="tokens of its chunks, around which lengths are tried")
    parser.add_argument("--json", type=Path, help="a file for the result as JSON")
    asked = parser.parse_args(arguments)
    dtypes = asked.dtypes.split(",")
    try:
        for dtype in dtypes:
            if dtype not in DTYPES:
                raise MixerError(f"--dtypes {dtype} is not known; choose from {', '.join(DTYPES)}.")
        if asked.chunk < 1:
            raise MixerError(f"--chunk {asked.chunk} must be 1 or more.")
        if asked.json:
            asked.json.touch()
        try:
            device = torch.device(asked.device)
            torch.zeros(1, device=device)
        except (RuntimeError, AssertionError) as error:
            raise MixerError(f"--device {asked.device} is not here: {error}") from error
        target = asked.target
        subject = named(target, device) if target in NAMES else of_function(target, load(target), asked.mixer, device)
    except (ValueError, OSError) as error:  # MixerError, or of `load` or the file
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(
        f"{subject.name} on {device}: decay={subject.recurrence.decay.value}, "
        f"{'with' if subject.recurrence.delta else 'without'} the delta rule\n"
    )
    lines = []
    for line in check(subject, device, dtypes, asked.chunk, (64, 64) if device.type == "cuda" else (16, 24)):
        print(f"  {line.status:<6}{line.group:<12}{line.detail}")
        lines.append(line)
    statuses = {line.status for line in lines}
    status = 1 if "FAIL" in statuses else 0 if "ok" in statuses else 2
    print(f"\n{('correct', 'wrong', 'nothing was compared')[status]}")
    if asked.json:
        asked.json.write_text(
            json.dumps(
                {
                    "mixer": subject.name,
                    "device": asked.device,
                    "correct": status == 0,
                    "lines": [line._asdict() for line in lines],
                },
                indent=1,
            )
        )
    return status
