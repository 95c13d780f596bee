"""The page: the ladder with its checks, the walk through FlashAttention, and the bytes it moves, in one file.

Every number that the page shows was recorded from the functions of this package (tracing.py). The page holds all
recordings, compressed, and needs no network.
"""

from __future__ import annotations

import base64
import inspect
import itertools
import json
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import torch
from torch import Tensor

from learn import traffic
from learn.flash import block_sizes, lowest
from learn.ladder import Measured, silent_error
from learn.problem import Problem, prepared
from learn.tracing import Recording, record
from learn.why import reasons

TEMPLATES = Path(__file__).parent / "templates"
# The choices of the page's controls. A window is causal.
CHOICES: dict[str, tuple[Any, ...]] = {
    "algorithm": ("flash_1", "flash_2"),
    "direction": ("forward", "backward"),
    "N": (5, 8),
    "d": (2, 3),
    "M": (36, 59, 120),
    "mask": ("full", "causal", "window 2"),
    "dropout": (0.0, 0.25),
}
FIRST = {"algorithm": "flash_2", "direction": "forward", "N": 5, "d": 3, "M": 59, "mask": "full", "dropout": 0.0}
BYTES = 4  # of a number: fp32


def problem_of(choice: dict[str, Any]) -> Problem:
    """The problem of a setting of the controls."""
    mask = choice["mask"]
    window = int(mask.split()[1]) if mask.startswith("window") else 0
    return Problem(choice["N"], choice["d"], choice["M"], mask != "full", window, choice["dropout"])


def record_choice(choice: dict[str, Any]) -> Recording:
    """Run the algorithm of a setting, and record it."""
    ready = prepared(problem_of(choice), choice["algorithm"], backward=choice["direction"] == "backward")
    return record(ready.function, ready.slow, ready.arguments)


def choices() -> Iterator[dict[str, Any]]:
    """Every setting of the controls."""
    for values in itertools.product(*CHOICES.values()):
        yield dict(zip(CHOICES, values, strict=True))


def key_of(choice: dict[str, Any]) -> str:
    """The key of a recording in the page."""
    return "|".join(str(choice[name]) for name in CHOICES)


def shown(value: float) -> str:
    """A number as the page shows it."""
    if math.isnan(value):
        return "nan"
    if value <= lowest(torch.float32):
        return "−∞" if math.isinf(value) else "lowest"
    return f"{value:.2f}".replace("-", "−")


def numbers(tensor: Tensor) -> list[list[str]]:
    """A matrix as the page shows it, row by row."""
    return [[shown(value) for value in row] for row in tensor.reshape(len(tensor), -1).tolist()]


def packed(recording: Recording, choice: dict[str, Any]) -> dict[str, Any]:
    """The recording of a setting for the page: after each step only what changed."""
    problem = problem_of(choice)
    steps: list[dict[str, Any]] = []
    before: dict[str, dict[str, Tensor]] = {"fast": {}, "slow": {}}
    for step in recording.steps:
        entry: dict[str, Any] = {"line": step.line, "read": step.read, "written": step.written}
        entry |= {name: [rows.start, rows.stop] for name, rows in step.tile.items()}
        if step.idle:
            entry["idle"] = sorted(step.idle)
        if step.moves:
            entry["moves"] = [[move.name, move.rows.start, move.rows.stop, move.kind] for move in step.moves]
        for kind, tensors in (("fast", step.fast), ("slow", step.slow)):
            old = before[kind]
            entry[kind] = {
                name: numbers(tensor)
                for name, tensor in tensors.items()
                if name not in old or not torch.equal(tensor, old[name])
            }
            before[kind] = tensors
        steps.append(entry)
    B_r, B_c = block_sizes(problem.d, problem.M)
    return {
        "source": recording.source,
        "why": reasons(f"{choice['algorithm']}_{choice['direction']}", recording.source),
        "steps": steps,
        "B_r": B_r,
        "B_c": B_c,
        "visible": problem.visible().int().tolist(),
        "kept": (problem.dropout_factors() != 0).int().tolist(),
    }


def compressed(value: Any) -> str:
    """JSON, deflated, in base64: a browser can unpack it without a library."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


@torch.inference_mode()
def render(ladder: list[Measured]) -> str:
    """The page as HTML."""
    recordings = {key_of(choice): packed(record_choice(choice), choice) for choice in choices()}
    line, wrong, right = silent_error()
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    curves = traffic.count()
    return environment.get_template("page.html.j2").render(
        ladder=[(entry, inspect.getsource(entry.rung.function)) for entry in ladder],
        silent={"line": line, "wrong": wrong, "right": right},
        choices=CHOICES,
        labels=traffic.LABELS,
        first=json.dumps({name: str(value) for name, value in FIRST.items()}),
        order=json.dumps(list(CHOICES)),
        recordings=compressed(recordings),
        curves=curves,
        chart=traffic.draw(curves),
        bytes=BYTES,
        style=(TEMPLATES / "style.css").read_text(encoding="utf-8"),
        script=(TEMPLATES / "walk.js").read_text(encoding="utf-8"),
        isinf=math.isinf,
    )
