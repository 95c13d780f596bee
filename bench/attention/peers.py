"""The candidates of bench.attention: this project's implementations and their peers, each behind one call."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from attention import (
    AttentionConfig,
    AttentionShape,
    DropoutKey,
    DropoutRng,
    KernelPath,
    Layout,
    Score,
    SDPABackend,
    UnsupportedAttention,
    build_attention,
    documents,
)
from attention.score import visible_pairs
from attention.scores.alibi import alibi_slopes

KEY = DropoutKey(seed=1337, step=1, layer=0, first_sequence=0)

WINDOW, DOCUMENT = 1024, 1024  # tokens
VARIANTS = {
    "causal": Score(),
    "full": Score(causal=False),
    "window": Score(window=WINDOW),
    "documents": Score(),  # and rows packed with documents of DOCUMENT tokens
    "alibi": Score(alibi=True),
    "soft_cap": Score(soft_cap=50.0),
    "sinks": Score(sinks=True),
    "temperature": Score(formula="a[h] * s"),
    "soft_cap_formula": Score(formula="50 * tanh(s / 50)"),
    "alibi_formula": Score(formula="s - slope[h] * (i - j)"),
    "fox": Score(formula="s + c[h, i] - c[h, j]"),  # Forgetting Transformer
    "distances": Score(formula="s + bias[h, min(i - j, 127)]"),
}

PLAIN = "flash-plain"  # takes part only where named
Attend = Callable[..., Tensor]  # q, k, v and the tensors of Problem.per_head, in their order, to out


@dataclass(frozen=True)
class Problem:
    """One size of attention: B sequences of T tokens, H heads of D channels."""

    B: int
    H: int
    T: int
    D: int
    variant: str  # one of VARIANTS
    dropout: float
    dtype: torch.dtype
    device: torch.device

    @property
    def score(self) -> Score:
        """Which keys a query sees, and how scores are changed."""
        return VARIANTS[self.variant]

    @property
    def dropout_key(self) -> DropoutKey:
        """KEY as in a training step: fields that change from step to step are tensors on the device."""
        fields = "seed", "step", "first_sequence"
        return replace(KEY, **{name: torch.tensor(getattr(KEY, name), device=self.device) for name in fields})

    def layout(self, sequences: int) -> Layout:
        """The documents of `sequences` rows."""
        if self.variant != "documents":
            return Layout()
        starts = torch.arange(self.T, dtype=torch.int32, device=self.device) // DOCUMENT * DOCUMENT
        return documents(starts.expand(sequences, -1).contiguous())

    def per_head(self) -> dict[str, Tensor]:
        """The further tensors of the score by name, fp32, heads first: sinks, or those that a formula names.

        Forget gates have half-lives from 1 to 300 tokens, from head to head.
        """
        half_lives = torch.logspace(0, math.log10(300), self.H)[:, None]
        generator = torch.Generator().manual_seed(0)
        gates = math.log(2) / half_lives * 2 * torch.rand(self.H, self.T, generator=generator)
        tensors = {
            "sinks": {"sinks": torch.zeros(self.H)},
            "temperature": {"a": torch.ones(self.H)},
            "alibi_formula": {"slope": alibi_slopes(self.H)},
            "fox": {"c": -gates.cumsum(-1)},
            "distances": {"bias": torch.randn(self.H, 128, generator=generator)},
        }
        return {name: x.to(self.device) for name, x in tensors.get(self.variant, {}).items()}

    def tensors(self) -> tuple[list[Tensor], Tensor]:
        """q, k and v, (B, H, T, D), then those of `per_head`, and the gradient of out. q, k and v are views of tensors
        (B, T, H, D), as in a model."""
        generator = torch.Generator(self.device).manual_seed(0)
        shape = (self.B, self.T, self.H, self.D)
        q, k, v, dout = (
            torch.randn(shape, generator=generator, dtype=self.dtype, device=self.device).transpose(1, 2)
            for _ in range(4)
        )
        return [x.requires_grad_() for x in (q, k, v, *self.per_head().values())], dout

    def flops(self) -> tuple[float, float]:
        """Floating-point operations of a forward pass with two matrix products and of a backward pass with five.

        Only visible keys count, so the causal mask halves both.
        """
        lengths = [DOCUMENT] * (self.T // DOCUMENT) + [self.T % DOCUMENT] if self.variant == "documents" else [self.T]
        forward = 4 * self.B * self.H * self.D * sum(visible_pairs(self.score, length) for length in lengths)
        return forward, 2.5 * forward


@dataclass(frozen=True)
class Candidate:
    """An implementation to be measured.

    label   for tables and figures
    build   the call for a problem; raises UnsupportedAttention with the reason where there is none
    ours    whether it belongs to this project, and draws its dropout mask: its error with dropout can be measured
    path    the name of the kernels that compute a problem, where there are several
    """

    label: str
    build: Callable[[Problem], Attend]
    ours: bool = False
    path: Callable[[Problem], str | None] = lambda problem: None


def attention_shape(problem: Problem) -> AttentionShape:
    """The problem as attention/ describes it."""
    return AttentionShape(
        problem.D,
        problem.H,
        problem.H,
        problem.dtype,
        problem.device,
        (problem.score,),
        documents=problem.variant == "documents",
    )


def ours(label: str, config: AttentionConfig) -> Candidate:
    """An implementation that replays its masks."""

    def path(problem: Problem) -> str | None:
        return build_attention(replace(config, dropout=problem.dropout)).path(attention_shape(problem), problem.T)

    return Candidate(label, from_registry(config), True, path)


def from_registry(config: AttentionConfig) -> Callable[[Problem], Attend]:
    """An implementation of attention/, with its checks of the inputs."""

    def build(problem: Problem) -> Attend:
        if config.name == "flex":
            torch._dynamo.reset()  # after some shapes dynamo stops compiling new ones, and flex would run unfused
        rng = DropoutRng.torch if config.name == "sdpa" and problem.dropout else DropoutRng.replay
        attend = build_attention(replace(config, dropout=problem.dropout, rng=rng))
        score, layout, key = problem.score, problem.layout(problem.B), problem.dropout_key
        attend.check(attention_shape(problem))
        names = list(problem.per_head())
        return lambda q, k, v, *further: attend(
            q, k, v, score=score, layout=layout, dropout_key=key, tensors=dict(zip(names, further, strict=True))
        ).out  # fmt: skip

    return build


def from_package(module: str, has_dropout: bool, deterministic: bool = False) -> Callable[[Problem], Attend]:
    """`flash_attn_func` of one of FlashAttention's packages, which take (B, T, H, D)."""

    def build(problem: Problem) -> Attend:
        if problem.dropout and not has_dropout:
            raise UnsupportedAttention(f"{module} has no dropout")
        if problem.variant not in ("causal", "full"):
            raise UnsupportedAttention(f"{module} takes part with the causal and the full mask only")
        flash_attn_func = import_module(module).flash_attn_func
        options = {"causal": problem.score.causal, "softmax_scale": 1 / math.sqrt(problem.D)}
        if has_dropout:
            options["dropout_p"] = problem.dropout
        if deterministic:
            options["deterministic"] = True

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = flash_attn_func(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **options)
            return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

        return attend

    return build


class Package(NamedTuple):
    """One of FlashAttention's packages: its module, its name on PyPI, and the options of its call."""

    label: str
    module: str
    package: str
    has_dropout: bool
    deterministic: bool = False  # whether gradients are the same bits in each run, as ours always are


PACKAGES = {
    "fa2": Package("FlashAttention-2", "flash_attn", "flash-attn", True),
    "fa3": Package("FlashAttention-3", "flash_attn_interface", "flash-attn-3", False),
    "fa4": Package("FlashAttention-4", "flash_attn.cute", "flash-attn-4", False),
    "fa4-deterministic": Package("FlashAttention-4, deterministic", "flash_attn.cute", "flash-attn-4", False, True),
}


def candidates() -> dict[str, Candidate]:
    """All candidates on this machine, by their name on the command line."""
    named = {name: ours(name, AttentionConfig(name)) for name in ("naive", "tiled", "flash")}
    named[PLAIN] = ours("flash, plain kernels", AttentionConfig("flash", path=KernelPath.plain))
    for backend in (SDPABackend.flash, SDPABackend.efficient, SDPABackend.cudnn, SDPABackend.math):
        named[f"sdpa-{backend.value}"] = Candidate(
            f"sdpa {backend.value}", from_registry(AttentionConfig("sdpa", backend=backend))
        )
    named["flex"] = Candidate("FlexAttention", from_registry(AttentionConfig("flex")))
    named["varlen"] = Candidate("torch's varlen_attn", from_registry(AttentionConfig("varlen")))
    for name, (label, module, _, has_dropout, deterministic) in PACKAGES.items():
        if installed(module):
            named[name] = Candidate(label, from_package(module, has_dropout, deterministic))
    return named


def installed(module: str) -> bool:
    """Whether a module can be imported.

    A folder without code does not count: FlashAttention-4 installs into flash_attn/, FlashAttention-2's folder.
    """
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:  # its parent is missing
        return False
    return spec is not None and spec.origin is not None
