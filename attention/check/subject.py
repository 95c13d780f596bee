"""The implementation under test: how it is found, how it is called, and the features that it declares.

The names of its parameters decide how it is called:

    ours          f(q, k, v, score=..., layout=..., scale=..., dropout_key=..., slopes=..., sinks=..., return_lse=...)
    plain         f(q, k, v, causal=..., scale=..., window=..., ...)                    q (B, H, T, D)
    sdpa          f(q, k, v, attn_mask=..., dropout_p=..., is_causal=..., scale=...)    q (B, H, T, D)
    flash         f(q, k, v, dropout_p=..., softmax_scale=..., causal=..., ...)         q (B, T, H, D)
    flex          f(q, k, v, score_mod=..., block_mask=..., scale=..., enable_gqa=...)  q (B, H, T, D)
    varlen        f(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)    q (total, H, D)
    transformers  f(module, q, k, v, attention_mask, scaling=..., dropout=...)          q (B, H, T, D), out (B, T, H, D)

An argument is its code, an expression in q, k, v, slopes, sinks, bias, seen and starts: calls evaluate it, and programs
that reproduce a failure contain it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..errors import AttentionError
from ..from_file import is_in_file, load
from .cases import DTYPES, PATTERNS, Case, Inputs, problem
from .named import NAMED, PACKAGE

# The names that libraries give to the same parameter.
ALIASES = {
    "causal": ("causal", "is_causal"),
    "scale": ("scale", "softmax_scale", "sm_scale", "scaling"),
    "window": ("window", "window_size", "sliding_window"),
    "soft_cap": ("soft_cap", "softcap", "logits_soft_cap"),
    "slopes": ("slopes", "alibi_slopes"),
    "sinks": ("sinks", "sink", "learnable_sink", "s_aux"),
    "bias": ("bias", "attn_bias"),
    "mask": ("attn_mask", "block_mask"),
    "score": ("score_mod",),
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
# sees the keys j <= i, whatever the number of keys. `mask`: a tensor that is true where a query sees a key.
FEATURES = {"causal", "full", "window", "documents", "soft_cap", "alibi", "sinks", "bias", "scale", "dropout", "lse"}
FEATURES |= {"grouped", "empty", "document_rows", "top_left", "mask"}
STYLES = ("ours", "plain", "sdpa", "flex", "flash", "varlen", "transformers")
# From (B, H, T, D) to the axes of a style and back, as code after a tensor; the others have (B, H, T, D).
AXES = {
    "flash": (".transpose(1, 2)", ".transpose(1, 2)"),
    "varlen": (".transpose(1, 2).flatten(0, 1)", ".unflatten(0, ({B}, {T})).transpose(1, 2)"),
}
# What a packed call says of its sequences, by flash-attn and by torch.
BOUNDS = (
    ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
    ("cu_seq_q", "cu_seq_k", "max_q", "max_k"),
)
FLEX = "torch.nn.attention.flex_attention"
OUR_NAMES = ("AttentionConfig", "DropoutKey", "Score", "build_attention", "documents")
DROPOUT_KEY = "DropoutKey({seed}, 11, 3, 5)"  # for an implementation of this library


class CheckError(AttentionError):
    """A check that cannot start; the message names the remedy."""


class Signature:
    """The parameters of a callable."""

    def __init__(self, function: Callable[..., Any]) -> None:
        try:
            called = function.forward if isinstance(function, torch.nn.Module) else function  # its __call__ is (*args)
            self.parameters = dict(inspect.signature(called).parameters)
        except (ValueError, TypeError):
            self.parameters = {}
        if (
            inspect.unwrap(function) is torch.nn.functional.scaled_dot_product_attention
        ):  # Python cannot see a builtin's
            schema = torch.ops.aten.scaled_dot_product_attention.default._schema
            self.parameters = {
                x.name: inspect.Parameter(x.name, inspect.Parameter.KEYWORD_ONLY) for x in schema.arguments
            }
        self.any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in self.parameters.values())

    def name(self, role: str) -> str | None:
        """The name of the parameter with a role of ALIASES, if there is one."""
        return next((name for name in ALIASES[role] if name in self.parameters), None)

    def pair(self) -> bool:
        """Whether a window is a pair (left, right)."""
        name = self.name("window")
        return name is not None and isinstance(self.parameters[name].default, tuple)

    def style(self) -> str:
        """One of STYLES."""
        names = list(self.parameters)
        if {"score", "layout"} <= set(names):
            return "ours"
        if names[:1] == ["module"]:
            return "transformers"
        if any(set(bounds[:2]) <= set(names) for bounds in BOUNDS):
            return "varlen"
        if {"attn_mask", "is_causal"} <= set(names):
            return "sdpa"
        if {"score_mod", "block_mask"} <= set(names):
            return "flex"
        return "flash" if "softmax_scale" in names else "plain"

    def features(self, style: str) -> frozenset[str]:
        """The features that the parameters offer."""
        if style == "ours":
            return frozenset({"causal", "scale", "grouped", "empty"})
        if style == "sdpa":  # a mask can express any of these; the causal flag starts at the upper left
            masked = FEATURES - {"soft_cap", "alibi", "sinks", "lse", "grouped"}
            return frozenset(masked | ({"grouped"} if self.name("grouped") else set()))
        if style == "flex":  # functions express all but these
            return frozenset(FEATURES - {"sinks", "dropout", "lse"} | ({"lse"} if self.name("lse") else set()))
        roles = {role for role in ALIASES if self.name(role)}
        offered = {FEATURE_OF.get(role, role) for role in roles} & FEATURES | {"grouped", "causal", "empty"}
        if "causal" in roles or self.pair():
            offered |= {"full"}
        if style == "varlen":
            offered |= {"documents", "document_rows"}
        return frozenset(offered | ({"document_rows"} if "documents" in roles else set()))


@dataclass
class Subject:
    """A callable, and how to call it.

    name        as the user gave it
    imports     lines of code that import it
    expression  the code that names it
    function    the callable
    style       one of STYLES
    features    those of FEATURES that it supports
    library     for an Attention of this library, the package that it comes from: `attention` or `gpt_attention`
    result      the code that takes the output from the returned value; found by the first call
    exact       whether it claims to compute softmax attention
    reference   the implementation that it is compared with instead of the formula
    """

    name: str
    imports: str
    expression: str
    function: Callable[..., Any]
    style: str
    features: frozenset[str]
    library: ModuleType | None = None
    result: str = ""
    signature: Signature = field(init=False)
    asked_style: str | None = None  # by the user
    exact: bool = True
    reference: Subject | None = None

    def __post_init__(self) -> None:
        self.signature = Signature(self.function)

    def __reduce__(self) -> Any:
        """Another process imports the implementation by its name."""
        return found_again, (self.name, self.asked_style, self.features, self.result, self.reference)

    def __call__(self, case: Case, inputs: Inputs, lse: bool = False) -> tuple[Tensor, Tensor | None]:
        """out (B, H, T, D), and the log-sum-exp (B, H, T) if it is asked for and supported."""
        call = self.prepared(case, inputs, lse)
        if not case.dropout:
            return call(inputs.q, inputs.k, inputs.v)
        with torch.random.fork_rng([inputs.q.device] if inputs.q.is_cuda else []):
            torch.manual_seed(case.seed)
            return call(inputs.q, inputs.k, inputs.v)

    def prepared(
        self, case: Case, inputs: Inputs, lse: bool = False
    ) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]:
        """`__call__` as a function of q, k and v. All other arguments are made in advance."""
        names = {"torch": torch, **vars(inputs)}
        names |= {name: getattr(self.library, name, None) for name in OUR_NAMES}
        positional, named = self.arguments(case, lse)
        if any("seen" in code for code in (*positional, *named.values())):
            names["seen"] = problem(case, inputs).seen
        rest = [eval(code, names) for code in positional]
        options = {name: eval(code, names) for name, code in named.items()}
        function: Any = self.function
        if self.library is not None and function.dropout != case.dropout:
            function = type(function)(dataclasses.replace(function.config, dropout=case.dropout))
        put, take = (eval(f"lambda x: x{code}") for code in self.axes(case))

        def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
            returned = function(put(q), put(k), put(v), *rest, **options)
            if isinstance(returned, Tensor):
                return take(returned), None
            if not isinstance(returned, tuple | list):
                raise TypeError(
                    f"it returns {type(returned).__name__}, neither a tensor nor a tuple that begins with one"
                )
            self.result = ".out" if self.style == "ours" else "[0]"
            out, log_sum = returned[0], returned[1] if lse and len(returned) > 1 else None
            if log_sum is not None and log_sum.ndim == 2:  # of packed tokens, (H, total) or (total, H)
                log_sum = log_sum if log_sum.shape[0] == case.H else log_sum.T
                log_sum = log_sum.unflatten(1, (case.B, case.T)).transpose(0, 1)
            return take(out), log_sum

        return call

    def axes(self, case: Case) -> tuple[str, str]:
        """The code after a tensor (B, H, T, D) that gives it the style's axes, and the code that gives them back."""
        put, take = AXES.get(self.style, ("", ""))
        return put, take.format(B=case.B, T=case.T)

    def arguments(self, case: Case, lse: bool) -> tuple[list[str], dict[str, str]]:
        """The positional arguments of a call after q, k and v, and the named ones, as code."""
        if self.style == "ours":
            return [], self.our_arguments(case, lse)
        positional: list[str] = []
        named: dict[str, str] = {}
        signature, window = self.signature, case.window

        def give(role: str, code: Any) -> None:
            name = signature.name(role) or (ALIASES[role][0] if signature.any else None)
            if name is not None and code is not None:
                named[name] = str(code)

        if self.style == "varlen":
            names = next((names for names in BOUNDS if set(names) <= set(signature.parameters)), None)
            if names is None:
                positional = bounds(case)
            else:  # flash-attn 4 has another parameter before them
                named |= zip(names, bounds(case), strict=True)
        if self.style == "flex":
            if case.sees() != PATTERNS["all"]:
                sizes = f"{case.B}, {case.H}, {case.T}, {case.S}, device=q.device"
                give("mask", f"{FLEX}.create_block_mask(lambda b, h, i, j: {case.sees()}, {sizes})")
            if (changed := changed_score(case)) != "s":
                give("score", f"lambda s, b, h, i, j: {changed}")
        elif "mask" in case.features() or (self.style == "sdpa" and needs_mask(case)):
            give("mask", "bias.masked_fill(~seen, -torch.inf)" if case.bias else "seen")
        else:
            if signature.name("causal"):
                give("causal", case.causal)
            elif signature.pair():  # the window expresses it
                give("window", (-1, 0) if case.causal else (-1, -1))
            if window is not None:
                give("window", (window - 1, 0) if signature.pair() else window)
            if case.documents and self.style == "plain":
                if signature.name("cu_seqlens"):
                    give("cu_seqlens", cumulative(case.documents))
                else:
                    give("documents", "starts")
            if case.bias:
                give("bias", "bias")
        give("scale", case.scale)
        if self.style != "flex":  # whose functions change scores
            if case.alibi:
                give("slopes", "slopes")
            if case.sinks:
                give("sinks", "sinks")
            give("soft_cap", case.soft_cap)
            give("dropout", case.dropout or None)
        if case.dropout and signature.name("seed"):
            give("seed", case.seed)
        for role, asked in (("grouped", case.H_kv != case.H), ("deterministic", True), ("lse", lse)):
            if asked and signature.name(role):
                give(role, True)
        if lse and signature.name("aux") and not signature.name("lse"):
            give("aux", "torch.nn.attention.varlen.AuxRequest(lse=True)")
        return positional, named

    def our_arguments(self, case: Case, lse: bool) -> dict[str, str]:
        """The named arguments of a call of this library's Attention."""
        named: dict[str, str] = {}
        fields = ("causal", "window", "soft_cap", "alibi", "sinks")
        changed = [f"{x}={getattr(case, x)}" for x in fields if getattr(case, x) != getattr(Case, x)]
        if changed:
            named["score"] = f"Score({', '.join(changed)})"
        if case.documents:
            named["layout"] = "documents(starts)"
        if case.scale is not None:
            named["scale"] = repr(case.scale)
        if case.alibi:
            named["slopes"] = "slopes"
        if case.sinks:
            named["sinks"] = "sinks"
        if case.dropout:
            named["dropout_key"] = DROPOUT_KEY.format(seed=case.seed)
        if lse and "lse" in self.features:
            named["return_lse"] = "True"
        return named

    def import_lines(self, case: Case) -> list[str]:
        """The imports of a program that calls the case."""
        code, lines = self.code(case), self.imports.splitlines()
        names = [name for name in OUR_NAMES if f"{name}(" in code and not any(name in line for line in lines)]
        if names:
            lines += [f"from {self.library.__name__ if self.library else PACKAGE} import {', '.join(names)}"]
        modules = ("dataclasses", "torch.nn.attention.varlen", FLEX)
        return lines + [f"import {name}" for name in modules if f"{name}." in code]

    def code(self, case: Case, lse: bool = False) -> str:
        """An expression for the output (B, H, T, D) in q, k, v, slopes, sinks, bias, seen and starts.

        lse  an expression for the log-sum-exp instead
        """
        (positional, named), (put, take) = self.arguments(case, lse), self.axes(case)
        codes = [*(x + put for x in "qkv"), *positional, *(f"{name}={code}" for name, code in named.items())]
        expression = self.expression
        if self.library is not None and case.dropout:
            expression = f"type({expression})(dataclasses.replace({expression}.config, dropout={case.dropout}))"
        call = f"{expression}({', '.join(codes)})"
        return f"{call}[1]" if lse else f"{call}{self.result}{take}"

    def mask(self, case: Case, device: torch.device) -> Tensor | None:
        """The mask that an implementation of this library has to draw, (B, H, T, S); None for other implementations."""
        if self.library is None:
            return None
        key = eval(DROPOUT_KEY.format(seed=case.seed), vars(self.library))
        mask: Tensor = self.library.keep_mask(key, case.dropout, case.B, case.H, case.T, case.S, device=device)
        return mask

    def supports(self, case: Case) -> bool:
        """Whether the subject declares every feature of the case."""
        return case.features() <= self.features and (self.reference is None or self.reference.supports(case))

    def standard(self) -> Subject | None:
        """What its results are judged by: its reference, itself where it claims nothing, or, None, the formula."""
        return self.reference or (None if self.exact else self)

    def refusal(self, case: Case, device: torch.device) -> str:
        """Why an implementation of this library would not train with the case's head size, heads and dtype."""
        if self.library is not None:
            attend: Any = self.function
            try:
                attend.check(self.library.AttentionShape(case.D, case.H, case.H_kv, DTYPES[case.dtype], device))
            except self.library.AttentionError as error:
                return str(error)
        return ""

    def try_lse(self, case: Case, inputs: Inputs) -> None:
        """Call an implementation of this library, which no longer declares lse if it refuses to return it."""
        if self.library is None or "lse" not in self.features:
            return
        with contextlib.suppress(Exception):  # it may refuse the case itself
            self(case, inputs)
            try:
                self(case, inputs, lse=True)
            except self.library.AttentionError:
                self.features -= {"lse"}


def needs_mask(case: Case) -> bool:
    """Whether torch's scaled_dot_product_attention needs a mask, because its causal flag starts at the upper left."""
    aligned = case.T == case.S or case.top_left or not case.causal
    return bool(case.window is not None or case.documents or case.bias or not aligned)


def changed_score(case: Case) -> str:
    """The score of query i and key j in head h, as code in their product s."""
    score = "s" if case.soft_cap is None else f"{case.soft_cap} * torch.tanh(s / {case.soft_cap})"
    score += f" - slopes[h] * (i + {case.first_position()} - j)" if case.alibi else ""
    return score + (" + bias[0, h, i, j]" if case.bias else "")


def bounds(case: Case) -> list[str]:
    """cu_seqlens of queries and of keys, and the greatest lengths of both, for packed sequences, as code."""
    queries, keys = (case.T,) * case.B, (case.S,) * case.B
    if case.documents:
        queries = keys = tuple(length for lengths in case.document_lengths() for length in lengths)
    return [cumulative(queries), cumulative(keys), str(max(queries)), str(max(keys))]


def cumulative(lengths: tuple[int, ...]) -> str:
    """The code of cu_seqlens for some lengths."""
    ends = [0, *accumulate(lengths)]
    return f"torch.tensor({ends}, dtype=torch.int32, device=q.device)"


def find(target: str, features: Iterable[str] = (), style: str | None = None) -> Subject:
    """The implementation that a user names: one of named.NAMED, or module:name.

    features  further features, besides those that its parameters show
    style     one of STYLES; None: the parameters decide

    Modules in the current folder can be imported. Raises AttentionError.
    """
    declared, asked_style = frozenset(features), style
    for feature in declared:
        if feature not in FEATURES:
            raise CheckError(f"--features {feature} is not known; choose from {', '.join(sorted(FEATURES))}.")
    if target in NAMED:
        imports, expression, named_style, _, needs = NAMED[target]
        try:
            function, style = eval(expression, namespace(imports)), named_style or style
        except ImportError as error:
            raise CheckError(f"{target} needs {needs}, and importing it failed: {error}.") from error
    else:
        imports, expression, function = imported(target)
    signature = Signature(function)
    style = style or signature.style()
    if style == "transformers":
        imports += f"\nfrom {PACKAGE}.check.named import as_plain"
        expression, style = f"as_plain({expression})", "plain"
        function = eval(expression, namespace(imports))
        signature = Signature(function)
    if library_of(type(function)) is not None:
        return ours(target, imports, expression, function, declared)
    offered = signature.features(style)
    declared |= getattr(function, "features", frozenset())
    if "full" in declared and style == "plain" and signature.name("causal") is None:
        offered -= {"causal"}  # without a parameter it computes one of the two
    return Subject(
        target,
        imports,
        expression,
        function,
        style,
        (offered | declared) - getattr(function, "without", frozenset()),
        asked_style=asked_style,
        exact=getattr(function, "exact", True),
    )


def found_again(
    target: str, style: str | None, features: frozenset[str], result: str, reference: Subject | None
) -> Subject:
    """The subject of a name as another process has found it."""
    return dataclasses.replace(find(target, style=style), features=features, result=result, reference=reference)


def imported(target: str) -> tuple[str, str, Any]:
    """The import lines, the expression and the callable of module:name or file.py:name. Raises AttentionError."""
    module, _, name = target.partition(":")
    if not name:
        raise CheckError(f"{target} is neither file.py:name, module:name nor one of {', '.join(NAMED)}.")
    function, imports = load(target), f"from {module} import {name.partition('.')[0]}"
    if is_in_file(target):
        imports, name = f"from {PACKAGE}.from_file import load", f"load({target!r})"
    if isinstance(function, type) and (library := library_of(function)) is not None:
        imports += f"\nfrom {library.__name__} import AttentionConfig"
        name = f"{name}(AttentionConfig({function.name!r}))"  # type: ignore[attr-defined]
        function = function(library.AttentionConfig(function.name))  # type: ignore[attr-defined]
    return imports, name, function


def library_of(cls: type) -> ModuleType | None:
    """The package whose Attention a class extends: this one, or the same in a checkout beside an installed one."""
    for base in cls.__mro__:
        if base.__name__ == "Attention" and base.__module__ in ("attention.interface", "gpt_attention.interface"):
            return sys.modules[base.__module__.removesuffix(".interface")]
    return None


def ours(target: str, imports: str, expression: str, attend: Any, declared: Iterable[str]) -> Subject:
    """The subject for an Attention of this library."""
    library = library_of(type(attend))
    assert library is not None
    features = {"causal", "scale", "grouped", "empty", "dropout", *declared}
    features |= {"lse"} if attend.returns_lse else set()
    features |= attend.supports & {"full", "window", "soft_cap", "alibi", "sinks"}
    features |= {"documents", "document_rows"} if "documents" in attend.supports else set()
    try:
        type(attend)(dataclasses.replace(attend.config, dropout=0.125))
    except library.AttentionError:
        features -= {"dropout"}
    return Subject(target, imports, expression, attend, "ours", frozenset(features), library, exact=attend.exact)


def namespace(imports: str) -> dict[str, Any]:
    """The names that import lines define."""
    names: dict[str, Any] = {}
    exec(imports, names)
    return names
