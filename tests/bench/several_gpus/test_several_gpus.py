"""The benchmark of several GPUs, as far as it can be tested without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.record import Recorder, read
from bench.several_gpus.__main__ import IDENTITY, Progress, record, train_in_groups
from bench.several_gpus.cases import KINDS, Case, cases
from bench.several_gpus.views import speeds


@pytest.mark.parametrize("gpus", [2, 4])
def test_every_number_of_gpus_computes_the_same_step(gpus: int) -> None:
    """Cases whose bits are compared have as many tokens per step as on one GPU; a long sequence is split over all."""
    alone = {key_of(case): case for case in cases(1)}
    several = {key_of(case): case for case in cases(gpus)}
    assert {kind for kind, _ in several} == set(KINDS)
    for case in several.values():
        if case.kind in ("bits", "eager", "muon"):
            assert case == alone[key_of(case)]
            assert case.tokens is not None
            assert case.tokens % (case.sequences * case.seq_len * gpus) == 0
        if case.kind in ("quarter", "half", "million"):
            assert (case.seq_len, case.parallel.context) == (alone[key_of(case)].seq_len, gpus)
        if case.kind in ("xl-long", "four"):  # each GPU has as much as one of four has
            whole = 2**20 if case.kind == "xl-long" else 2**22
            assert (case.seq_len * 4, case.parallel.context) == (whole * gpus, gpus)


def key_of(case: Case) -> tuple[str, str]:
    return case.kind, case.name


def test_a_time_that_includes_compiling_replaces_none_that_does_not(tmp_path: Path) -> None:
    now = {"device": "some", "versions": {"torch": "2"}, "sizes": {}}
    row = {"kind": "million", "name": "heads", "gpus": 4, "step_ms": 9}
    compiling = row | {"step_ms": 70, "compiles": True}
    recorder = Recorder(tmp_path / "some.json", IDENTITY, now)
    for fresh, kept in ((compiling, 70), (row | {"compiles": False}, 9), (compiling, 9)):
        record(recorder, fresh)
        assert [found["step_ms"] for found in read(recorder.path)] == [kept]


def test_progress_shows_the_median_so_far_and_that_the_first_steps_compiled() -> None:
    seconds = {0: 70.0, 2: 4.0, 5: 9.0, 8: 5.0}
    case = Case("speed", "exact", 1024, 32, groups=3, group=3, first=2)
    assert [*train_in_groups(case, lambda step, count: seconds[step] if count == (3 if step else 2) else -1)] == [
        Progress(2, 70.0, True), Progress(5, 4.0, False), Progress(8, 6.5, False), Progress(11, 5.0, False),
    ]  # fmt: skip
    single = Case("million", "heads", 2**20, 1, groups=1, group=1, first=0)
    assert [*train_in_groups(single, lambda step, count: 120.0)] == [Progress(1, 120.0, True)]


def test_the_table_has_multiples_of_one_gpu_and_says_where_bits_differ() -> None:
    fields = {"kind": "bits", "name": "shard", "seq_len": 1024, "peak_allocated_gib": 12.0, "compiles": False}
    rows = [
        fields | {"gpus": 1, "tokens_per_s": 5e5, "digest": "a"},
        fields | {"gpus": 2, "tokens_per_s": 9e5, "digest": "a"},
        fields | {"gpus": 4, "tokens_per_s": 1.9e6, "digest": "b"},
        fields | {"kind": "four", "gpus": 4, "tokens_per_s": 5e3, "compiles": True},
    ]  # fmt: skip
    assert speeds(rows).splitlines()[2:] == [
        "| bits, shard | 1 | 1,024 | 500,000 | | 12.0 | |",
        "| bits, shard | 2 | 1,024 | 900,000 | 1.80 | 12.0 | yes |",
        "| bits, shard | 4 | 1,024 | 1,900,000 | 3.80 | 12.0 | no |",
        "| four, shard | 4 | 1,024 | 5,000 with compiling | | 12.0 | |",
    ]
