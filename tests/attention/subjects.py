"""Implementations and cases for the tests of `gpt-attention check`."""

from contextlib import AbstractContextManager
from dataclasses import replace
from unittest.mock import patch

import torch

from attention import IMPLEMENTATIONS, AttentionConfig, build_attention
from attention.check.cases import Case
from attention.check.results import verdicts
from attention.check.subject import Subject, ours
from tests import right_attention, wrong_attention

# A small case of each kind of call.
CASES = {
    "causal": Case(T=33, S=33, B=2, H=4, H_kv=2),
    "full": Case(T=20, S=35, D=8, causal=False),
    "more keys": Case(T=9, S=40, window=7, memory="channels not adjacent"),
    "more queries": Case(T=40, S=9, sinks=True),
    "changed": Case(T=36, S=36, soft_cap=2.0, alibi=True, sinks=True, spread=3.0),
    "documents": Case(T=40, S=40, B=2, documents=(3, 20, 17)),
}
# Sizes of a model of transformers.
SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "head_dim": 8}
SMALL |= {"intermediate_size": 48, "vocab_size": 61, "max_position_embeddings": 64, "pad_token_id": 0}


def subject_of(config: AttentionConfig, expression: str = "under_test") -> Subject:
    """The implementation that `config` names, without dropout, as the check takes it."""
    return ours(expression, "", expression, build_attention(replace(config, dropout=0.0)), frozenset())


def assert_judged_right(subject: Subject, case: Case, device: str = "cpu") -> None:
    """The check's judge finds nothing but rounding in a call."""
    for verdict in verdicts(subject, case, torch.device(device)):
        assert verdict.passes, (case, verdict)


def registered() -> AbstractContextManager[object]:
    """Within the block `build_attention` also knows the implementations of the tests."""
    classes = (*wrong_attention.CLASSES, *right_attention.CLASSES)
    return patch.dict(IMPLEMENTATIONS, {cls.name: cls for cls in classes})
