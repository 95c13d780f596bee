"""The implementation under test: its name, its calling convention and the features that it declares."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import Attention, AttentionConfig, AttentionError, AttentionShape, DropoutKey, Score, documents, keep_mask
from .cases import DTYPES, Case, Inputs
from .known import KNOWN, PACKAGE, Unavailable
from .styles import FEATURES, LAYOUTS, STYLES, Argument, Signature, arguments

OUR_NAMES = ("AttentionConfig", "DropoutKey", "Score", "build_attention", "documents")


class CheckError(AttentionError):
    """A check that cannot start; the message names the remedy."""


def dropout_key(seed: int) -> DropoutKey:
    """The dropout key for an implementation of this library."""
    return DropoutKey(seed=seed, step=11, layer=3, first_sequence=5)


@dataclass
class Subject:
    """A callable, and how to call it.

    name        as the user gave it
    imports     lines of code that import it
    expression  the code that names it
    function    the callable
    style       one of styles.STYLES
    features    the features of styles.FEATURES that it supports
    dropping    for an implementation of this library: the callable with a dropout rate, and its code
    result      the code that takes the output from the returned value; known after the first call
    """

    name: str
    imports: str
    expression: str
    function: Callable[..., Any]
    style: str
    features: frozenset[str]
    dropping: Callable[[float], tuple[Callable[..., Any], str]] | None = None
    result: str = ""
    signature: Signature = field(init=False)

    def __post_init__(self) -> None:
        self.signature = Signature(self.function)

    def __call__(self, case: Case, inputs: Inputs, lse: bool = False) -> tuple[Tensor, Tensor | None]:
        """out (B, H, T, D), and the log-sum-exp (B, H, T) if it is wanted and supported."""
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
        positional, named = self.arguments(case, inputs, lse)
        function = self.function if self.dropping is None else self.dropping(case.dropout)[0]
        layout, rest = LAYOUTS[self.style], [x.value for x in positional[3:]]
        options = {name: x.value for name, x in named.items()}

        def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
            returned = function(layout.put(q), layout.put(k), layout.put(v), *rest, **options)
            if isinstance(returned, Tensor):
                return layout.take(returned, case.B, case.T), None
            if not isinstance(returned, tuple | list):
                raise TypeError(
                    f"it returns {type(returned).__name__}, neither a tensor nor a tuple that begins with one"
                )
            self.result = ".out" if self.style == "ours" else "[0]"
            out, log_sum = returned[0], returned[1] if lse and len(returned) > 1 else None
            if log_sum is not None and log_sum.ndim == 2:  # of packed tokens, (H, total) or (total, H)
                log_sum = log_sum if log_sum.shape[0] == case.H else log_sum.T
                log_sum = log_sum.unflatten(1, (case.B, case.T)).transpose(0, 1)
            return layout.take(out, case.B, case.T), log_sum

        return call

    def arguments(self, case: Case, inputs: Inputs, lse: bool) -> tuple[list[Argument], dict[str, Argument]]:
        """The arguments of a call of the case."""
        if self.style != "ours":
            return arguments(self.style, self.signature, case, inputs, lse)
        changed: dict[str, Any] = {
            name: value
            for name, value in (
                ("causal", case.causal),
                ("window", case.window),
                ("soft_cap", case.soft_cap),
                ("alibi", case.alibi),
                ("sinks", case.sinks),
            )
            if value != getattr(Score(), name)
        }
        named = {}
        if changed:
            named["score"] = Argument(Score(**changed), f"Score({', '.join(f'{n}={v}' for n, v in changed.items())})")
        if inputs.starts is not None:
            named["layout"] = Argument(documents(inputs.starts), "documents(starts)")
        if case.scale is not None:
            named["scale"] = Argument(case.scale, repr(case.scale))
        if case.alibi:
            named["slopes"] = Argument(inputs.slopes, "slopes")
        if case.sinks:
            named["sinks"] = Argument(inputs.sinks, "sinks")
        if case.dropout:
            named["dropout_key"] = Argument(dropout_key(case.seed), f"DropoutKey({case.seed}, 11, 3, 5)")
        if lse and "lse" in self.features:
            named["return_lse"] = Argument(True, "True")
        return [Argument(inputs.q, "q"), Argument(inputs.k, "k"), Argument(inputs.v, "v")], named

    def import_lines(self, case: Case, inputs: Inputs) -> list[str]:
        """The imports of a program that calls the case."""
        code, lines = self.code(case, inputs), self.imports.splitlines()
        names = [name for name in OUR_NAMES if f"{name}(" in code and not any(name in line for line in lines)]
        lines += [f"from {PACKAGE} import {', '.join(names)}"] if names else []
        return lines + (["import dataclasses"] if "dataclasses." in code else [])

    def code(self, case: Case, inputs: Inputs, lse: bool = False) -> str:
        """An expression for the output (B, H, T, D) in q, k, v, slopes, sinks, bias, seen and starts.

        lse  an expression for the log-sum-exp instead
        """
        positional, named = self.arguments(case, inputs, lse)
        given = ", ".join([x.code for x in positional] + [f"{name}={x.code}" for name, x in named.items()])
        expression = self.expression if self.dropping is None else self.dropping(case.dropout)[1]
        if lse:
            return f"{expression}({given})[1]"
        return f"{expression}({given}){self.result}{LAYOUTS[self.style].take_code.format(case.B, case.T)}"

    def mask(self, case: Case, device: torch.device) -> Tensor | None:
        """The mask that an implementation of this library has to draw, (B, H, T, S); None for other implementations."""
        if self.style != "ours":
            return None
        return keep_mask(dropout_key(case.seed), case.dropout, case.B, case.H, case.T, case.S, device=device)

    def supports(self, case: Case) -> bool:
        """Whether the subject declares every feature of the case."""
        return case.features() <= self.features

    def refusal(self, case: Case, device: torch.device) -> str:
        """Why an implementation of this library would not train with the case's head size, heads and dtype."""
        if isinstance(self.function, Attention):
            try:
                self.function.check(AttentionShape(case.D, case.H, case.H_kv, DTYPES[case.dtype], device))
            except AttentionError as error:
                return str(error)
        return ""

    def try_lse(self, case: Case, inputs: Inputs) -> None:
        """Call an implementation of this library, which no longer declares lse if it refuses to return it."""
        if self.style != "ours" or "lse" not in self.features:
            return
        with contextlib.suppress(Exception):  # it may refuse the case itself
            self(case, inputs)
            try:
                self(case, inputs, lse=True)
            except AttentionError:
                self.features -= {"lse"}


def find(target: str, features: Iterable[str] = (), style: str | None = None) -> Subject:
    """The implementation that a user names: one of known.KNOWN, or module:name.

    features  further features, besides those that its parameters show
    style     one of STYLES; None: the parameters decide

    Modules in the current folder can be imported. Raises CheckError.
    """
    declared = frozenset(features)
    for feature in declared:
        if feature not in FEATURES:
            raise CheckError(f"--features {feature} is not known; choose from {', '.join(sorted(FEATURES))}.")
    if style is not None and style not in STYLES:
        raise CheckError(f"--style {style} is not known; choose one of {', '.join(STYLES)}.")
    imports, expression, function, style = load(target, style)
    signature = Signature(function)
    style = style or signature.style()
    if style == "transformers":
        imports += f"\nfrom {PACKAGE}.check.known import as_plain"
        expression, style = f"as_plain({expression})", "plain"
        function = eval(expression, namespace(imports))
        signature = Signature(function)
    if isinstance(function, Attention):
        return ours(target, imports, expression, function, declared)
    offered = frozenset({"causal", "scale", "grouped", "empty"}) if style == "ours" else signature.features(style)
    declared |= getattr(function, "features", frozenset())
    if "full" in declared and style == "plain" and signature.name("causal") is None:
        offered -= {"causal"}  # without a parameter it computes one of the two
    supported = (offered | declared) - getattr(function, "without", frozenset())
    return Subject(target, imports, expression, function, style, supported)


def load(target: str, style: str | None) -> tuple[str, str, Any, str | None]:
    """The imports, the expression, the callable and, if it is known, the style of a target."""
    if target in KNOWN:
        known = KNOWN[target]
        try:
            return known.imports, known.expression, eval(known.expression, namespace(known.imports)), known.style
        except (ImportError, Unavailable) as error:
            raise CheckError(f"{target} needs {known.needs}, and importing it failed: {error}.") from error
    module, _, name = target.partition(":")
    if not name:
        raise CheckError(f"{target} is neither module:name nor one of {', '.join(KNOWN)}.")
    imports = f"from {module} import {name.partition('.')[0]}"
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function: Any = importlib.import_module(module)
    except ImportError as error:
        raise CheckError(f"{target} cannot be imported: {error}.") from error
    except (Exception, SystemExit) as error:
        raise CheckError(f"{target} cannot be imported: {type(error).__name__}: {error}.") from error
    try:
        for part in name.split("."):
            function = getattr(function, part)
    except AttributeError as error:
        raise CheckError(f"{target} is not there: {error}.") from error
    if isinstance(function, type) and issubclass(function, Attention):
        imports += f"\nfrom {PACKAGE} import AttentionConfig"
        name = f"{name}(AttentionConfig({function.name!r}))"
        function = function(AttentionConfig(function.name))
    if not callable(function):
        raise CheckError(f"{target} is {type(function).__name__}, which cannot be called; name a function.")
    return imports, name, function, style


def ours(target: str, imports: str, expression: str, attend: Attention, declared: frozenset[str]) -> Subject:
    """An implementation of this library's Attention."""
    features = {"causal", "scale", "grouped", "empty", "dropout", *declared} | (
        {"lse"} if attend.returns_lse else set()
    )
    features |= attend.supports & {"full", "window", "soft_cap", "alibi", "sinks"}
    features |= {"documents", "document_rows"} if "documents" in attend.supports else set()
    try:
        type(attend)(dataclasses.replace(attend.config, dropout=0.125))
    except AttentionError:
        features -= {"dropout"}
    built: dict[float, Attention] = {attend.dropout: attend}

    def dropping(rate: float) -> tuple[Attention, str]:
        if rate not in built:
            built[rate] = type(attend)(dataclasses.replace(attend.config, dropout=rate))
        if rate == attend.dropout:
            return built[rate], expression
        if "build_attention(AttentionConfig(" in expression:
            return built[rate], expression.replace("))", f", dropout={rate}))")
        return built[rate], f"type({expression})(dataclasses.replace({expression}.config, dropout={rate}))"

    return Subject(target, imports, expression, attend, "ours", frozenset(features), dropping)


def namespace(imports: str) -> dict[str, Any]:
    """The names that import lines define."""
    names: dict[str, Any] = {}
    exec(imports, names)
    return names
