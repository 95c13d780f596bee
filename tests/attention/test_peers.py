"""Attention by other libraries: they get the arguments of the call, and calls that they lack are refused by name.

Where there is no GPU, tests/flash_attn_stand_in.py takes the place of the libraries; tests/gpu/test_peers.py has them.
"""

import warnings
from typing import Any

import pytest
import torch

from attention import AttentionConfig, AttentionShape, Score, UnsupportedAttention, documents
from attention.adapters.peers import VarlenAttention
from attention.check.cases import Case
from attention.check.subject import Subject, find, ours
from tests import flash_attn_stand_in
from tests.attention.reference import build
from tests.attention.subjects import assert_judged_right, subject_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CASES = {
    "causal": Case(T=33, S=33, B=2, H=4, H_kv=2),
    "full": Case(T=20, S=35, D=8, causal=False, scale=0.7),
    "fewer queries": Case(T=9, S=40, B=2, window=7),
    "more queries": Case(T=40, S=9, B=2),
    "window": Case(T=40, S=40, window=5, memory="every other token"),
    "documents": Case(T=40, S=40, B=3, documents=(3, 20, 17)),
    "documents, full": Case(T=40, S=40, B=2, documents=(1, 39), causal=False),
    "soft cap": Case(T=30, S=30, soft_cap=2.0, spread=3.0),
    "sinks": Case(T=30, S=20, B=2, H=3, H_kv=1, sinks=True),
}


@pytest.fixture
def installed(monkeypatch):
    flash_attn_stand_in.install(monkeypatch)


def judge_all(subject: Subject, count: int) -> None:
    tried = [case for case in CASES.values() if subject.supports(case)]
    assert len(tried) == count
    for case in tried:
        assert_judged_right(subject, case)


def test_torchs_varlen_attn_computes_what_was_asked_for(installed):
    subject = subject_of(AttentionConfig("varlen"))
    assert "lse" in subject.features
    judge_all(subject, 7)


def test_flash_attn_4_trains_from_a_file_of_one_line(installed, tmp_path):
    (tmp_path / "fa4.py").write_text("from flash_attn.cute import flash_attn_func as fa4\n")
    attend = build(f"{tmp_path}/fa4.py:fa4")
    assert attend.supports == {"full", "window", "soft_cap", "sinks"}
    judge_all(ours("fa4", "", "fa4", attend, frozenset()), 7)


CALLED = {"fa4": 7, "flash_attn.cute:flash_attn_varlen_func": 9}


@pytest.mark.parametrize("name", CALLED)
def test_the_checker_calls_the_library_as_its_parameters_ask(name, installed):
    judge_all(find(name), CALLED[name])


def test_new_documents_are_cut_anew_also_in_the_same_tensor(installed):
    attend = build("varlen")
    assert isinstance(attend, VarlenAttention)
    starts = torch.tensor([[0, 0, 2, 2, 2], [0, 1, 1, 1, 1]], dtype=torch.int32)
    bounds, longest = attend.sequences(starts, 5)
    assert (bounds.tolist(), longest) == ([0, 2, 5, 6, 10], 4)
    assert attend.sequences(starts, 5).bounds is bounds
    starts[1] = 0
    assert attend.sequences(starts, 5).bounds.tolist() == [0, 2, 5, 10]
    assert attend.sequences(starts, 4).bounds.tolist() == [0, 2, 4, 8]
    with torch.inference_mode():  # torch does not count the changes of a tensor that is made in it
        starts = starts.clone()
        assert attend.sequences(starts, 5).bounds.tolist() == [0, 2, 5, 10]
        starts[0] = 0
        assert attend.sequences(starts, 5).bounds.tolist() == [0, 5, 10]


def shape(device: torch.device = CUDA, dtype: torch.dtype = torch.bfloat16, head_dim: int = 64, **more: Any):
    return AttentionShape(head_dim, 4, 2, dtype, device, **more)


def test_calls_that_the_kernels_lack_are_refused_by_name_when_the_model_is_built(monkeypatch):
    with monkeypatch.context() as context:
        flash_attn_stand_in.install(context)
        attend = build("varlen")
        with pytest.raises(UnsupportedAttention, match=r'"varlen" has no dropout; set dropout=0 instead of 0.1, or'):
            build("varlen", dropout=0.1)
    refused: dict[str, AttentionShape] = {
        r'name="varlen" takes bf16 or fp16, not torch.float32; .*name="flash"': shape(dtype=torch.float32),
        'needs an NVIDIA GPU and the device is cpu; choose name="tiled"': shape(CPU),
        r'name="varlen" does not support alibi=True; leave it out or choose name="flash"': shape(
            scores=(Score(alibi=True),)
        ),
    }
    for sentence, asked in refused.items():
        with pytest.raises(UnsupportedAttention, match=sentence):
            attend.check(asked)
    q = torch.zeros(1, 2, 8, 64)
    with pytest.raises(UnsupportedAttention, match="needs an NVIDIA GPU and the device is cpu"):
        attend(q, q, q)


def test_an_error_of_the_library_becomes_a_refusal_with_its_reason(installed, monkeypatch):
    def no_kernel(*_, **__):
        warnings.warn("an argument is deprecated", stacklevel=1)  # is not the reason
        raise RuntimeError("no kernel image is available")

    attend = build("varlen")
    monkeypatch.setattr(attend, "varlen_attn", no_kernel)
    with pytest.raises(
        UnsupportedAttention, match=r'"varlen" does not support 4 heads .*\(no kernel.*use name="flash"'
    ):
        attend.check(shape(CPU))


def test_documents_need_as_many_queries_as_keys(installed):
    q, layout = torch.zeros(1, 2, 8, 16), documents(torch.zeros(1, 8, dtype=torch.int32))
    with pytest.raises(UnsupportedAttention, match="as many queries as keys, not for 4 and 8"):
        build("varlen")(q[:, :, 4:], q, q, layout=layout)
