"""The benchmark of several GPUs, as far as it can be tested without a GPU."""

from __future__ import annotations

import pytest

from bench.several_gpus import KINDS, Case, cases, speeds


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


def key_of(case: Case) -> tuple[str, str]:
    return case.kind, case.name


def test_the_table_has_multiples_of_one_gpu_and_says_where_bits_differ() -> None:
    fields = {"kind": "bits", "name": "shard", "seq_len": 1024, "peak_allocated_gib": 12.0}
    rows = [
        fields | {"gpus": 1, "tokens_per_s": 5e5, "digest": "a"},
        fields | {"gpus": 2, "tokens_per_s": 9e5, "digest": "a"},
        fields | {"gpus": 4, "tokens_per_s": 1.9e6, "digest": "b"},
    ]
    assert speeds(rows).splitlines()[2:] == [
        "| bits, shard | 1 | 1,024 | 500,000 | | 12.0 | |",
        "| bits, shard | 2 | 1,024 | 900,000 | 1.80 | 12.0 | yes |",
        "| bits, shard | 4 | 1,024 | 1,900,000 | 3.80 | 12.0 | no |",
    ]
