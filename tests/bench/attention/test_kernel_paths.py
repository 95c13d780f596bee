"""The table of the kernel paths' speeds, and what `auto` makes of them."""

from __future__ import annotations

from typing import Any

import torch

from attention.dropout import drop_threshold
from attention.flash.call import Problem
from attention.flash.hopper.configs import is_faster
from attention.spec import Spec
from bench.attention.kernel_paths import table
from bench.attention.peers import VARIANTS
from bench.record import RESULTS, read


def row(length: int, dropout: float, forward: float) -> dict[str, Any]:
    speed = {"forward": {"ms": 1.0, "tflops": forward}, "backward": {"ms": 2.0, "tflops": 300.4}}
    return {
        "head_size": 64,
        "variant": "window",
        "dropout": dropout,
        "length": length,
        "hopper": speed,
        "plain": speed,
    }


def test_a_line_has_the_speeds_of_a_path_by_length_and_a_gap_where_none_was_measured():
    assert table([row(4096, 0.0, 500.6), row(1024, 0.0, 400.0), row(4096, 0.1, 200.0)]).splitlines() == [
        "| | 1024 | 4096 |",
        "| --- | --- | --- |",
        "| D 64, window, hopper | 400/300 | 501/300 |",
        "| D 64, window, plain | 400/300 | 501/300 |",
        "| D 64, window, dropout 0.1, hopper | | 200/300 |",
        "| D 64, window, dropout 0.1, plain | | 200/300 |",
    ]


def test_what_auto_chooses_was_measured_to_take_no_longer_than_the_plain_kernels() -> None:
    """Forward and backward together, to half a percent; the forward alone, as in an evaluation, to two."""
    slower = []
    for measured in read(RESULTS / "kernel-paths-nvidia-h200.json"):
        head_size, variant, rate, length = problem = [
            measured[k] for k in ("head_size", "variant", "dropout", "length")
        ]
        plain, chosen = {}, {}
        for way in ("forward", "backward"):
            score, documents = VARIANTS[variant], variant == "documents"
            spec = Spec(score, scale=1.0, documents=documents, threshold=drop_threshold(rate))
            hopper = is_faster(Problem(spec, head_size, torch.bfloat16, length, length, (9, 0)), way == "backward")
            plain[way] = measured["plain"][way]["ms"]
            chosen[way] = measured["hopper"][way]["ms"] if hopper else plain[way]
        alone = not rate and chosen["forward"] > 1.02 * plain["forward"]
        if alone or sum(chosen.values()) > 1.005 * sum(plain.values()):
            slower.append(problem)
    assert not slower
