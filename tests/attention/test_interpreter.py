"""The faster interpreter of the tests computes the same bits as Triton's."""

import subprocess
import sys

import pytest
import torch

from tests.equal import assert_equal
from tests.interpreter import INTERPRETED, ROOT

# Attention with everything, in 16 bits, forward and backward, whose kernels call most of what kernels call.
SCRIPT = """
import sys
import torch
from attention import AttentionConfig, build_attention
from tests.attention.reference import KEY, Case, gradients

case = Case(1, 1, 1, 10, 70, 16, window=40, soft_cap=2.0, alibi=True, sinks=True, documents=(30, 40))
attend = build_attention(AttentionConfig("flash", dropout=0.3))

def run(q, k, v, sinks):
    return attend(q, k, v, score=case.score, layout=case.layout(), sinks=sinks, dropout_key=KEY)

results = gradients(run, *case.tensors(torch.bfloat16), sinks=case.sink_logits())
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@INTERPRETED
def test_the_interpreter_as_it_is_gives_the_same_bits(tmp_path):
    path = tmp_path / "results.pt"
    script = f"{SCRIPT}\ntorch.save(results, {str(path)!r})"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=200)
    here: dict = {}
    exec(SCRIPT, here)
    expected = torch.load(path)
    assert expected.keys() == {"out", "dq", "dk", "dv", "dsinks"}
    assert_equal(here["results"], expected)
