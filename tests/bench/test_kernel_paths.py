"""The table of the kernel paths' speeds."""

from __future__ import annotations

from typing import Any

from bench.kernel_paths import table


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
        "|  | 1024 | 4096 |",
        "| --- | --- | --- |",
        "| D 64, window, hopper | 400/300 | 501/300 |",
        "| D 64, window, plain | 400/300 | 501/300 |",
        "| D 64, window, dropout 0.1, hopper |  | 200/300 |",
        "| D 64, window, dropout 0.1, plain |  | 200/300 |",
    ]
