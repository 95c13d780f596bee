"""The report of a check: one page of text, and the same as JSON."""

import json
import platform
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from .accuracy import SECTION as ACCURACY
from .formula import RESULTS
from .run import Line
from .subject import FEATURES, CheckError


@dataclass(frozen=True)
class Report:
    """A finished check.

    target    the name of the implementation, as the user gave it
    style     its calling convention
    features  the features that it declares
    where     versions and the device
    dtypes    the precisions that it takes
    refused   the precisions that it refuses, with the reasons
    unseen    sentences on the parts that were not checked, with the reasons
    allowed   names of lines that may fail
    gradients  whether it has a backward pass
    claims     whether it claims to compute softmax attention, or the user names a reference
    """

    target: str
    style: str
    features: tuple[str, ...]
    where: str
    dtypes: tuple[str, ...]
    refused: dict[str, str]
    lines: list[Line]
    unseen: list[str]
    seconds: float
    seed: int
    allowed: frozenset[str] = frozenset()
    gradients: bool = True
    claims: bool = True

    def failed(self) -> list[Line]:
        """The lines that count against the implementation."""
        return [line for line in self.lines if line.status == "FAIL" and line.name not in self.allowed]

    def compared(self) -> bool:
        """Whether anything was compared with fp64 or with the reference or, where there is nothing to compare with,
        called."""
        if not self.claims:
            return any(line.calls for line in self.lines)
        return any(line.section.startswith(ACCURACY) and line.share is not None for line in self.lines)

    def headline(self) -> str:
        """The verdict in a sentence."""
        checked = [line for line in self.lines if line.status in ("ok", "FAIL")]
        if not self.compared():
            return f"Nothing of {self.target} was compared with fp64."
        if not self.failed():
            name = self.target if self.gradients else f"The forward pass of {self.target}, which gives no gradients,"
            allowed = sum(line.status == "FAIL" for line in checked)
            number = f"{len(checked) - allowed} of {len(checked)} checks, {allowed} allowed"
            number = number if allowed else f"all {len(checked)} checks"
            if not self.claims:
                name += ", which does not claim to be softmax attention,"
            return f"{name} is correct in {number}, {sum(x.calls for x in checked):,} calls."
        return f"{self.target} fails {len(self.failed())} of {len(checked)} checks."


def where(device: torch.device) -> str:
    """torch's version and the device, for a report."""
    name = f"{platform.machine()} CPU with {torch.get_num_threads()} threads"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return f"torch {torch.__version__}, {name}"


def text(report: Report) -> str:
    """The page."""
    width = min(120, max(80, shutil.get_terminal_size((110, 0)).columns))
    indent = " " * 36
    page = [f"gpt-attention check {report.target}", f"{report.where}, {', '.join(report.dtypes)}, seed {report.seed}"]
    page += [*textwrap.wrap(f"called as {report.style}; declares {', '.join(report.features)}", width), ""]
    section = None
    for line in report.lines:
        if line.section != section:
            page.append(line.section)
            section = line.section
        status = "allowed" if line.status == "FAIL" and line.name in report.allowed else line.status
        head = f"  {status:<8}{line.name:<26}"
        calls = f"; {line.calls:,} calls" if line.status in ("ok", "FAIL") else ""
        page += textwrap.wrap(head + line.detail + calls, width, subsequent_indent=indent, break_long_words=False)
    for line in report.lines:
        for failure in line.failures:
            page += ["", *textwrap.wrap(f"{line.name}: {failure.what}", width)]
            if failure.code:
                page += ["", textwrap.indent(failure.code, "    ")]
    if report.unseen:
        page += ["", "Not checked:"]
        for sentence in report.unseen:
            page += textwrap.wrap(sentence, width, initial_indent="  - ", subsequent_indent="    ")
    return "\n".join([*page, "", f"{report.headline()} ({report.seconds:.0f} s)"])


def as_json(report: Report) -> str:
    """The report as JSON. Its field `correct` is the verdict."""
    verdict = {"correct": report.compared() and not report.failed(), "headline": report.headline()}
    return json.dumps(verdict | asdict(report) | {"allowed": sorted(report.allowed)}, indent=1, default=str)


def write(path: Path, content: str, mode: str = "w") -> None:
    """Write a report, or append to one. Raises CheckError where that fails."""
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(content)
    except OSError as error:
        raise CheckError(f"{path} cannot be written ({error.strerror}); name another file.") from error


def unseen(
    features: Sequence[str], dtypes: Sequence[str], refused: dict[str, str], lines: Sequence[Line], gradients: str
) -> list[str]:
    """Sentences on the parts that were not checked, with the reasons.

    gradients  the reason why there were no gradients; empty where there were some
    """
    sentences = []
    missing = sorted(FEATURES - set(features) - {"top_left", "empty", "full", "causal", "lse", "document_rows"})
    if missing:
        sentences.append(f"{', '.join(missing)}: not declared by its parameters (--features adds some).")
    if "lse" not in features:
        sentences.append("The log-sum-exp: the call does not return it.")
    if gradients:
        sentences.append(f"Gradients ({', '.join(x for x in RESULTS if x[0] == 'd')}): {gradients}")
    for dtype, reason in refused.items():
        sentences.append(f"{dtype} is not checked: {reason}")
    if not {"fp32", "fp64"} & set(dtypes):
        sentences.append(
            "Errors below the rounding of 16 bits, such as a scale 0.1 % off: it takes no higher precision."
        )
    short = [line.name for line in lines if "no time" in line.detail]
    if short:
        sentences.append(f"Some cases of {', '.join(short)}: the time was up; more --seconds check them.")
    if any(line.name == "CUDA graph" and "needs" in line.detail for line in lines):
        sentences.append("Races and CUDA graphs: this check ran without a GPU.")
    if any(line.name == "more than 2^31 elements" and line.status == "skip" for line in lines):
        sentences.append("Tensors of more than 2^31 elements.")
    return [*sentences, "Calls on several streams."]
