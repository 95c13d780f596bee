"""Correct attention in many ways, none of which a check may accuse: RIGHT by configuration, NAMES with all others."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from attention import Attention, AttentionConfig, Score, SDPABackend, build_attention
from attention.check.subject import Subject, find, ours
from tests.attention_in_steps import InSteps, Steps, dot

LOG2_E = math.log2(math.e)
Attend = Callable[..., Tensor]  # of q, k, v, causal and scale


class BackwardSteps(Steps):
    """The keys in reverse order."""

    def positions(self):
        i, j = super().positions()
        return i, j.flip(0)

    def keep(self, backward):
        keep = super().keep(backward)
        return keep if keep is None else keep.flip(-1)


class KeysBackwards(InSteps):
    """Another order of sums."""

    name, steps = "keys_backwards", BackwardSteps

    def __call__(self, q, k, v, **options):
        return super().__call__(q, k.flip(2), v.flip(2), **options)


class BaseTwoSteps(Steps):
    """Exponentials to base 2 of scores that were scaled for it, as kernels compute them."""

    def raw(self, q, k):
        return dot(q, self.expand(k).mT) * (self.factor() * LOG2_E) / LOG2_E

    def weights(self, s, lse):
        lse = lse.masked_fill(lse == -torch.inf, 0.0) * LOG2_E
        p = torch.exp2(s * LOG2_E - lse.unsqueeze(-1))
        return p.masked_fill(~self.seen(False).any(dim=-1, keepdim=True), 0.0)


class SplitSteps(Steps):
    """The keys in two parts, joined by their log-sum-exp, as in decoding."""

    def softmax(self, s):
        s = pad(s, (0, 1), value=-torch.inf)
        parts = [part.logsumexp(dim=-1) for part in s.tensor_split(2, dim=-1)]
        if self.score.sinks:
            parts.append(self.sinks.to(s.dtype)[:, None].expand_as(parts[0]))
        lse = torch.stack(parts).logsumexp(dim=0)
        return self.weights(s[..., :-1], lse), lse

    def weigh(self, p, v):
        halves = zip(p.tensor_split(2, dim=-1), self.expand(v).tensor_split(2, dim=2), strict=True)
        first, second = (dot(p.to(v.dtype), v) for p, v in halves)
        return first + second


class WideSteps(Steps):
    """Everything in fp64, rounded once at the end."""

    def raw(self, q, k):
        return super().raw(q.double(), k.double())

    def weigh(self, p, v):
        return p @ self.expand(v.double())

    def rounded(self, ds, dtype):
        return ds

    def log_sum(self, lse):
        return lse.float()


def attention(name: str, steps: type[Steps]) -> type[Attention]:
    """The class of an attention with some steps."""
    return type(steps.__name__.replace("Steps", "Attention"), (InSteps,), {"name": name, "steps": steps})


CLASSES: tuple[type[Attention], ...] = (
    InSteps,
    KeysBackwards,
    attention("base_two", BaseTwoSteps),
    attention("split_keys", SplitSteps),
    attention("wide", WideSteps),
)
RIGHT = {
    "naive": AttentionConfig("naive"),
    "tiled": AttentionConfig("tiled"),
    "tiled in small tiles": AttentionConfig("tiled", block_q=16, block_k=16),
    "tiled in odd tiles": AttentionConfig("tiled", block_q=24, block_k=40),
    "sdpa": AttentionConfig("sdpa", backend=SDPABackend.math),
    **{cls.name: AttentionConfig(cls.name) for cls in CLASSES},
}


def for_each_head(q: Tensor, *shared: Tensor) -> tuple[Tensor, ...]:
    """Keys and values of each query head."""
    return tuple(x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in shared)


def plain(
    q, k, v, causal=True, scale=None, window=None, softcap=None, alibi_slopes=None, s_aux=None, documents=None,
    return_lse=False,
):  # fmt: skip
    """As a textbook has it, in one function, as users write it. Scores are changed in fp32 or better."""
    (T, D), S, wide = q.shape[2:], k.shape[2], torch.promote_types(q.dtype, torch.float32)
    k, v = for_each_head(q, k, v)
    s = (q * (D**-0.5 if scale is None else scale)) @ k.mT
    s = s if softcap is None else softcap * torch.tanh(s.to(wide) / softcap)
    i, j = torch.arange(S - T, S)[:, None], torch.arange(S)
    s = s if alibi_slopes is None else s.to(wide) - alibi_slopes[:, None, None] * (i - j)
    seen = torch.ones(T, S, dtype=torch.bool) if not causal else j <= i
    seen = seen if window is None else seen & (i - j < window)
    seen = seen if documents is None else seen & (documents[:, None, :, None] == documents[:, None, None, :])
    s = s.masked_fill(~seen, -torch.inf)
    joined = s if s_aux is None else torch.cat([s, s_aux[:, None, None].expand(*s.shape[:3], 1)], dim=-1)
    p = joined.softmax(dim=-1)[..., :S].masked_fill(~seen.any(dim=-1, keepdim=True), 0.0)
    out = p.to(v.dtype) @ v
    return (out, joined.to(wide).logsumexp(dim=-1)) if return_lse else out


def torchs(q: Tensor, k: Tensor, v: Tensor, causal: bool = True, scale: float | None = None) -> Tensor:
    T, S = q.shape[2], k.shape[2]
    mask = torch.ones(T, S, dtype=torch.bool).tril(S - T) if causal else None
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)


def of(config: AttentionConfig) -> Attend:
    attend = build_attention(config)
    return lambda q, k, v, causal=True, scale=None: attend(q, k, v, score=Score(causal=causal), scale=scale).out


BASES: dict[str, Attend] = {
    "formula": plain,
    "torch's": torchs,
    "naive": of(AttentionConfig("naive")),
    "tiled": of(AttentionConfig("tiled", block_q=16, block_k=16)),
}


Way = Callable[..., Tensor]  # of an attention, q, k, v, causal and scale


def around(put: Callable[[Tensor], Tensor], take: Callable[[Tensor, Tensor], Tensor] = lambda out, q: out) -> Way:
    """The attention of changed q, k and v; take(out, q) changes the output back."""
    return lambda attend, q, k, v, *rest: take(attend(put(q), put(k), put(v), *rest), q)


def permuted(attend: Attend, q: Tensor, k: Tensor, v: Tensor, *rest: object) -> Tensor:
    group = q.shape[1] // k.shape[1]
    out = attend(q.unflatten(1, (-1, group)).flip(1).flatten(1, 2), k.flip(1), v.flip(1), *rest)
    return out.unflatten(1, (-1, group)).flip(1).flatten(1, 2)


def one_head_each(attend: Attend, q: Tensor, k: Tensor, v: Tensor, *rest: object) -> Tensor:
    heads = zip(q.split(q.shape[1] // k.shape[1], 1), k.split(1, 1), v.split(1, 1), strict=True)
    return torch.cat([attend(*one, *rest) for one in heads], 1)


def one_sequence_each(attend: Attend, q: Tensor, k: Tensor, v: Tensor, *rest: object) -> Tensor:
    return torch.cat([attend(*one, *rest) for one in zip(q.split(1), k.split(1), v.split(1), strict=True)])


def chunks(attend: Attend, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
    """Of queries, each with the keys that it sees."""
    outs, end = [], k.shape[2] - q.shape[2]
    for part in q.split(24, 2):
        end += part.shape[2]
        keys = slice(end if causal else None)
        outs.append(attend(part, k[:, :, keys], v[:, :, keys], causal, scale))
    return torch.cat(outs, 2)


def repeated_heads(attend: Attend, q: Tensor, k: Tensor, v: Tensor, *rest: object) -> Tensor:
    return attend(q, *for_each_head(q, k, v), *rest)


def padded_channels(attend: Attend, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
    D = q.shape[-1]
    q, k, v = (pad(x, (0, -D % 64)) for x in (q, k, v))
    return attend(q, k, v, causal, D**-0.5 if scale is None else scale)[..., :D]


def padded_tokens(attend: Attend, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
    """With keys that no query but those of padding sees."""
    T = q.shape[2]
    return (
        attend(*(pad(x, (0, 0, 0, 31)) for x in (q, k, v)), causal, scale)[:, :, :T]
        if causal
        else attend(q, k, v, causal, scale)
    )


WAYS: dict[str, Way] = {
    "as it is": lambda attend, *call: attend(*call),
    "in fp64": around(lambda x: x.double(), lambda out, q: out.to(q.dtype)),
    "in fp32": around(lambda x: x.to(torch.promote_types(x.dtype, torch.float32)), lambda out, q: out.to(q.dtype)),
    "heads between tokens": around(lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)),
    "sequences backwards": around(lambda x: x.flip(0), lambda out, q: out.flip(0)),
    "channels backwards": around(lambda x: x.flip(3), lambda out, q: out.flip(3)),
    "recomputed": lambda attend, *call: checkpoint(attend, *call, use_reentrant=False),
    "permuted heads": permuted,
    "one head each": one_head_each,
    "one sequence each": one_sequence_each,
    "chunks": chunks,
    "repeated heads": repeated_heads,
    "padded channels": padded_channels,
    "padded tokens": padded_tokens,
}
# Without hf-eager: in 16 bits transformers rounds scores before and after it scales them, which the check finds where
# they are large or capped.
NAMED = ("sdpa-flash", "sdpa-math", "hf-sdpa")
NAMES = [*RIGHT, *NAMED, "compiled", *(f"{base}, {way}" for base in BASES for way in WAYS)]
# Lines of the check that fail, and are right: torch adds -inf to the scores of hidden keys, and NaN stays NaN; its
# flash kernels are wrong where a causal mask meets a negative scale, on a CPU and on a GPU (docs/wall.md).
OF_TORCH = [name for name in NAMES if "sdpa" in name or name.startswith("torch's")]
ALLOWED = dict.fromkeys(OF_TORCH, frozenset({"NaN and infinity", "negative scale"}))


def subject(name: str) -> Subject:
    """The correct attention of a name of NAMES, as the check takes it; RIGHT has to be registered."""
    if name in RIGHT:
        return ours(name, "", "under_test", build_attention(replace(RIGHT[name], dropout=0.0)), frozenset())
    if name in NAMED:
        return find(name)
    base, _, way = name.partition(", ")

    def attend(q, k, v, causal=True, scale=None):
        return WAYS[way](BASES[base], q, k, v, causal, scale)

    function = torch.compile(plain, backend="aot_eager", dynamic=False) if name == "compiled" else attend
    return Subject(name, "", "under_test", function, "plain", frozenset({"causal", "full", "scale", "grouped"}))
