"""What is measured on several GPUs, as far as it shows without one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench.several_gpus import KINDS, Case, cases, main, merged


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err


@pytest.mark.parametrize("gpus", [2, 4])
def test_every_number_of_gpus_computes_the_same_step(gpus: int) -> None:
    """Cases whose bits are compared have as many tokens per step as on one GPU; a long sequence is split over all."""
    alone = {key_of(case): case for case in cases(1)}
    several = {key_of(case): case for case in cases(gpus)}
    assert {kind for kind, _ in several} == set(KINDS) - ({"four"} if gpus == 2 else set())
    for case in several.values():
        if case.kind in ("bits", "eager"):
            assert case == alone[key_of(case)]
            assert case.tokens is not None
            assert case.tokens % (case.sequences * case.seq_len * gpus) == 0
        if case.kind in ("quarter", "half", "million"):
            assert (case.seq_len, case.parallel.context) == (alone[key_of(case)].seq_len, gpus)


def key_of(case: Case) -> tuple[str, str]:
    return case.kind, case.name


def test_a_fresh_row_replaces_its_own_and_those_of_other_software(tmp_path: Path) -> None:
    old, new = {"versions": {"torch": "1"}}, {"versions": {"torch": "2"}}
    first, second = ({"kind": "speed", "name": name, "gpus": 2} for name in ("exact", "any order"))
    assert merged(tmp_path / "none.json", first | new) == [first | new]
    path = tmp_path / "some.json"
    path.write_text(json.dumps({"rows": [first | new | {"step_ms": 9}, second | new, second | old | {"gpus": 4}]}))
    assert merged(path, first | new | {"step_ms": 8}) == [first | new | {"step_ms": 8}, second | new]
