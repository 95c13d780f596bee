"""Calling conventions of attention functions, recognised by the names of their parameters.

    ours          f(q, k, v, score=..., layout=..., scale=..., dropout_key=..., slopes=..., sinks=..., return_lse=...)
    plain         f(q, k, v, causal=..., scale=..., window=..., ...)                    q (B, H, T, D)
    sdpa          f(q, k, v, attn_mask=..., dropout_p=..., is_causal=..., scale=...)    q (B, H, T, D)
    flash         f(q, k, v, dropout_p=..., softmax_scale=..., causal=..., ...)         q (B, T, H, D)
    varlen        f(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)    q (total, H, D)
    transformers  f(module, q, k, v, attention_mask, scaling=..., dropout=...)          q (B, H, T, D), out (B, T, H, D)

Each argument is a value and the code of it, for programs that reproduce a failure.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .cases import Case, Inputs, problem

# The names that libraries give to the same parameter.
ALIASES = {
    "causal": ("causal", "is_causal"),
    "scale": ("scale", "softmax_scale", "sm_scale", "scaling"),
    "window": ("window", "window_size", "sliding_window"),
    "soft_cap": ("soft_cap", "softcap", "logits_soft_cap"),
    "slopes": ("slopes", "alibi_slopes"),
    "sinks": ("sinks", "sink", "learnable_sink", "s_aux"),
    "bias": ("bias", "attn_bias"),
    "mask": ("attn_mask",),
    "documents": ("documents", "document_ids"),
    "cu_seqlens": ("cu_seqlens",),
    "dropout": ("dropout_p", "dropout"),
    "seed": ("seed", "dropout_seed"),
    "lse": ("return_lse", "return_softmax_lse", "return_attn_probs"),
    "aux": ("return_aux",),
    "grouped": ("enable_gqa",),
    "deterministic": ("deterministic",),
}
FEATURE_OF = {"slopes": "alibi", "cu_seqlens": "documents", "aux": "lse"}  # where role and feature differ in name
# The features that a call may need. `grouped`: fewer key/value heads than query heads. `empty`: rows that see no key.
# `document_rows`: documents that differ between the sequences of a batch. `top_left`: a causal flag by which query i
# sees the keys j <= i, whatever the number of keys.
FEATURES = {"causal", "full", "window", "documents", "soft_cap", "alibi", "sinks", "bias", "scale", "dropout", "lse"}
FEATURES |= {"grouped", "empty", "document_rows", "top_left"}
STYLES = ("ours", "plain", "sdpa", "flash", "varlen", "transformers")


class Argument(NamedTuple):
    """An argument's value and its code, an expression in q, k, v, slopes, sinks, bias, seen and starts."""

    value: Any
    code: str


class Layout(NamedTuple):
    """The order of axes: functions, and their code, from (B, H, T, D) to a function's shape and back."""

    put: Callable[[Tensor], Tensor]
    put_code: str
    take: Callable[[Tensor, int, int], Tensor]
    take_code: str


HEADS_FIRST = Layout(lambda x: x, "{}", lambda x, B, T: x, "")
TOKENS_FIRST = Layout(
    lambda x: x.transpose(1, 2), "{}.transpose(1, 2)", lambda x, B, T: x.transpose(1, 2), ".transpose(1, 2)"
)
PACKED = Layout(
    lambda x: x.transpose(1, 2).flatten(0, 1),
    "{}.transpose(1, 2).flatten(0, 1)",
    lambda x, B, T: x.unflatten(0, (B, T)).transpose(1, 2),
    ".unflatten(0, ({}, {})).transpose(1, 2)",
)
LAYOUTS = {"ours": HEADS_FIRST, "plain": HEADS_FIRST, "sdpa": HEADS_FIRST, "flash": TOKENS_FIRST, "varlen": PACKED}


# What a packed call says of its sequences, by flash-attn and by torch.
BOUNDS = (
    ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
    ("cu_seq_q", "cu_seq_k", "max_q", "max_k"),
)


def builtin_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> None:
    """The parameters of torch's scaled_dot_product_attention."""


class Signature:
    """The parameters of a callable."""

    def __init__(self, function: Callable[..., Any]) -> None:
        if inspect.unwrap(function) is torch.nn.functional.scaled_dot_product_attention:
            function = builtin_sdpa  # Python cannot see a builtin's parameters
        try:
            known = function.forward if isinstance(function, torch.nn.Module) else function  # its __call__ is (*args)
            self.parameters = dict(inspect.signature(known).parameters)
        except (ValueError, TypeError):
            self.parameters = {}
        self.any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in self.parameters.values())

    def name(self, role: str) -> str | None:
        """The name of the parameter with a role of ALIASES, if there is one."""
        return next((name for name in ALIASES[role] if name in self.parameters), None)

    def pair(self, name: str | None) -> bool:
        """Whether a window is given as (left, right)."""
        return name is not None and name in self.parameters and isinstance(self.parameters[name].default, tuple)

    def style(self) -> str:
        """One of STYLES."""
        names = list(self.parameters)
        if {"score", "layout"} <= set(names):
            return "ours"
        if names[:1] == ["module"]:
            return "transformers"
        if {"cu_seqlens_q", "cu_seqlens_k"} <= set(names) or {"cu_seq_q", "cu_seq_k"} <= set(names):
            return "varlen"
        if {"attn_mask", "is_causal"} <= set(names):
            return "sdpa"
        return "flash" if "softmax_scale" in names else "plain"

    def features(self, style: str) -> frozenset[str]:
        """The features that the parameters offer."""
        if style == "sdpa":  # a mask can express any of these; the causal flag starts at the upper left
            masked = FEATURES - {"soft_cap", "alibi", "sinks", "lse", "grouped"}
            return frozenset(masked | ({"grouped"} if self.name("grouped") else set()))
        roles = {role for role in ALIASES if self.name(role)}
        offered = {FEATURE_OF.get(role, role) for role in roles} & FEATURES | {"grouped", "causal", "empty"}
        if "causal" in roles or self.pair(self.name("window")):
            offered |= {"full"}
        if style == "varlen":
            offered |= {"documents", "document_rows"}
        return frozenset(offered | ({"document_rows"} if "documents" in roles else set()))


def arguments(
    style: str, signature: Signature, case: Case, inputs: Inputs, lse: bool
) -> tuple[list[Argument], dict[str, Argument]]:
    """The positional and the named arguments of a call of a case, in any style but `ours` and `transformers`."""
    named: dict[str, Argument] = {}

    def give(role: str, value: Any, code: str | None = None) -> None:
        name = signature.name(role) or (ALIASES[role][0] if signature.any else None)
        if name is not None:
            named[name] = Argument(value, repr(value) if code is None else code)

    layout = LAYOUTS[style]
    positional = [
        Argument(layout.put(x), layout.put_code.format(name))
        for name, x in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v))
    ]
    if style == "varlen":
        packed = bounds(case, inputs.q.device)
        names = next((names for names in BOUNDS if set(names) <= set(signature.parameters)), None)
        if names is None:
            positional += packed
        else:  # flash-attn 4 has another parameter before them
            named.update(zip(names, packed, strict=True))
    window, masked = signature.name("window"), style == "sdpa" and needs_mask(case)
    if masked and inputs.bias is not None:
        mask = inputs.bias.masked_fill(~problem(case, inputs).seen, -torch.inf)
        give("mask", mask, "bias.masked_fill(~seen, -torch.inf)")
    elif masked:
        give("mask", problem(case, inputs).seen, "seen")
    else:
        if signature.name("causal"):
            give("causal", case.causal)
        elif signature.pair(window):  # the window expresses it
            give("window", (-1, 0) if case.causal else (-1, -1))
        if case.window is not None:
            give("window", (case.window - 1, 0) if signature.pair(window) else case.window)
        if case.documents and style == "plain":
            if signature.name("cu_seqlens"):
                give("cu_seqlens", *cumulative(case.documents, inputs.q.device))
            else:
                give("documents", inputs.starts, "starts")
        if case.bias:
            give("bias", inputs.bias, "bias")
    wanted: tuple[tuple[str, Any, str | None], ...] = (
        ("scale", case.scale, None),
        ("soft_cap", case.soft_cap, None),
        ("slopes", inputs.slopes, "slopes"),
        ("sinks", inputs.sinks, "sinks"),
        ("dropout", case.dropout or None, None),
        ("seed", case.seed if case.dropout and signature.name("seed") else None, None),
        ("grouped", True if case.H_kv != case.H and signature.name("grouped") else None, None),
        ("deterministic", True if signature.name("deterministic") else None, None),
        ("lse", True if lse and signature.name("lse") else None, None),
    )
    for role, value, code in wanted:
        if value is not None:
            give(role, value, code)
    if lse and signature.name("aux"):
        from torch.nn.attention.varlen import AuxRequest

        give("aux", AuxRequest(lse=True))
    return positional, named


def needs_mask(case: Case) -> bool:
    """Whether torch's scaled_dot_product_attention needs a mask, because its causal flag starts at the upper left."""
    aligned = case.T == case.S or case.top_left or not case.causal
    return bool(case.window is not None or case.documents or case.bias or not aligned)


def bounds(case: Case, device: torch.device) -> list[Argument]:
    """cu_seqlens of queries and of keys, and the greatest lengths of both, for packed sequences."""
    queries, keys = (case.T,) * case.B, (case.S,) * case.B
    if case.documents:
        queries = keys = tuple(length for lengths in case.document_lengths() for length in lengths)
    greatest = [Argument(max(lengths), repr(max(lengths))) for lengths in (queries, keys)]
    return [Argument(*cumulative(queries, device)), Argument(*cumulative(keys, device)), *greatest]


def cumulative(lengths: tuple[int, ...], device: torch.device) -> tuple[Tensor, str]:
    """cu_seqlens of some lengths, and the code for it."""
    ends = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    return torch.tensor(ends, dtype=torch.int32, device=device), f"torch.tensor({ends}, dtype=torch.int32)"
