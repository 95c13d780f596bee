"""What is measured on several GPUs, as far as it shows without one."""

from __future__ import annotations

import pytest
import torch

from bench.several_gpus import KINDS, cases, main


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err


@pytest.mark.parametrize("gpus", [2, 4])
def test_every_number_of_gpus_computes_the_same_step(gpus: int) -> None:
    """What bits are compared of has as many tokens a step on one GPU; a sequence is shared by all of them."""
    alone = {(case.kind, case.name): case for case in cases(1)}
    assert {case.kind for case in cases(gpus)} == set(KINDS)
    for case in cases(gpus):
        if case.kind in ("bits", "eager"):
            assert case == alone[case.kind, case.name]
        if case.kind in ("context", "million"):
            assert (case.seq_len, case.parallel.context) == (alone[case.kind, case.name].seq_len, gpus)
