"""The choices of attention.path=auto against the measured speeds of the kernel paths."""

from __future__ import annotations

import torch

from attention.dropout import drop_threshold
from attention.flash.call import Problem
from attention.flash.hopper.configs import is_faster
from attention.spec import Spec
from bench.attention.peers import VARIANTS
from bench.record import RESULTS, read


def test_the_kernels_that_auto_chooses_were_measured_to_be_no_slower_than_the_plain_ones() -> None:
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
