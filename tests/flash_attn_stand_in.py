"""flash-attn 4 and torch's varlen_attn as their documentation describes them, computed by naive on any device."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from attention import AttentionConfig, Score
from attention.naive import NaiveAttention


def formula(q, k, v, scale, left, right, softcap=0.0, sink=None) -> tuple[Tensor, Tensor]:
    """One sequence: q (T, H, D), k and v (S, H_kv, D) to out (T, H, D) and lse (H, T).

    left, right  the number of keys that a query sees before and after its position, of which there may be 0 after it;
                 the last query has the position of the last key; None: all
    """
    assert right in (None, 0)
    score = Score(right == 0, None if left is None else left + 1, softcap or None, sinks=sink is not None)
    inputs = (x.transpose(0, 1)[None] for x in (q, k, v))
    out, lse = NaiveAttention(AttentionConfig("naive"))(*inputs, score=score, scale=scale, sinks=sink, return_lse=True)
    assert lse is not None
    return out[0].transpose(0, 1), lse[0]


def flash_attn_varlen_func(
    q,
    k,
    v,
    qv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    deterministic=False,
    return_lse=False,
):
    assert qv is None
    left, right = window_size
    outs, lses = [], []
    bounds_q, bounds_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    assert (bounds_q[-1], bounds_k[-1]) == (len(q), len(k))
    for n in range(len(bounds_q) - 1):
        queries, keys = slice(*bounds_q[n : n + 2]), slice(*bounds_k[n : n + 2])
        assert 0 < len(q[queries]) <= max_seqlen_q
        assert 0 < len(k[keys]) <= max_seqlen_k
        inputs = q[queries], k[keys], v[keys], softmax_scale
        out, lse = formula(*inputs, left, 0 if causal else right, softcap, learnable_sink)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses, dim=1) if return_lse else None


def flash_attn_func(
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    deterministic=False,
    return_lse=False,
):
    (B, T), S = q.shape[:2], k.shape[1]
    bounds_q, bounds_k = (torch.arange(B + 1, dtype=torch.int32) * n for n in (T, S))
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    options = causal, window_size, learnable_sink, softcap, deterministic, return_lse
    out, lse = flash_attn_varlen_func(q, k, v, None, bounds_q, bounds_k, T, S, softmax_scale, *options)
    return out.unflatten(0, (B, T)), lse if lse is None else lse.unflatten(1, (B, T)).transpose(0, 1)


def varlen_attn(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    return_aux=None,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
):
    assert enable_gqa or query.shape[1] == key.shape[1]
    window: Any = tuple(None if n == -1 else n for n in window_size)
    out, lse = flash_attn_varlen_func(
        query, key, value, None, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size=window, return_lse=True
    )
    return (out, lse) if return_aux is not None and return_aux.lse else out


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put them in the place of the libraries, for any device and precision."""
    package, cute = ModuleType("flash_attn"), ModuleType("flash_attn.cute")
    cute.flash_attn_func, cute.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    monkeypatch.setattr("attention.adapters.peers.check_kernels", lambda *_: None)
