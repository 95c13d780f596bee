"""Wrong values that libraries shipped or published: each thread, its mechanism in a few lines, and what finds it.

A thread may have the mechanism of another fault of this folder. docs/wall.md is their table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attention import AttentionConfig, DropoutKey, build_attention
from attention.check.subject import Subject, find, ours
from tests.attention_in_steps import Steps
from tests.wrong_attention.registry import named


@dataclass(frozen=True)
class Published:
    """A thread about wrong values.

    fault   the name of a registered attention, or "module:function", with its mechanism
    line    of the check that finds it
    thread  its address
    when    it was reported, with the versions that the thread names
    effect  what users get
    inputs  for which it happens
    """

    fault: str
    line: str
    thread: str
    when: str
    effect: str
    inputs: str

    def subject(self) -> Subject:
        """The wrong attention, as the check takes it."""
        if ":" in self.fault:
            return find(self.fault)
        config = AttentionConfig(self.fault)
        return ours(self.fault, "", f"build_attention({config})", build_attention(config), frozenset())


GITHUB = "https://github.com/"
PUBLISHED: list[Published] = []


def thread(fault: str, line: str, path: str, when: str, effect: str, inputs: str) -> None:
    """Add a row."""
    PUBLISHED.append(Published(fault, line, GITHUB + path, when, effect, inputs))


def published(line: str, path: str, when: str, effect: str, inputs: str) -> Callable[[type[Steps]], type[Steps]]:
    """Register an attention with these steps, and add its row."""

    def register(steps):
        thread(named(steps), line, path, when, effect, inputs)
        return steps

    return register


@published(
    "lengths",
    "pytorch/pytorch/pull/169222",
    "2025-11, MPS",
    "gibberish in generation",
    "keys, no multiple of 32",
)
class KeysBehindTheLast(Steps):
    """Keys behind the last one, up to a multiple of 32, are seen as zeros."""

    def softmax(self, s):
        behind = 0 if self.score.causal and self.S == self.T else -self.S % 32
        lse = torch.cat([s, s.new_zeros(*s.shape[:3], behind)], dim=-1).logsumexp(dim=-1)
        return self.weights(s, lse), lse


@published(
    "memory",
    "Dao-AILab/flash-attention/issues/355",
    "2023-07, FlashAttention 2.0",
    "wrong gradients in Megatron",
    "an output gradient that is not contiguous",
)
class GradientStrides(Steps):
    """The backward pass reads the gradient of the output as if it lay in another order."""

    def delta(self, do, out, p, dp):
        read = do if do.is_contiguous() else do.transpose(1, 2).reshape(do.shape)
        return super().delta(read, out, p, dp)


@published(
    "window",
    "Dao-AILab/flash-attention/issues/1133",
    "2024-08",
    "not causal attention's output",
    "a window as long as the row",
)
class WholeRowAsWindow(Steps):
    """A window as long as the row has a key less."""

    def window(self, backward):
        window = self.score.window
        return window - 1 if window == self.S else window


@published(
    "ALiBi",
    "meta-pytorch/attention-gym/pull/86",
    "2024-12",
    "far keys are preferred",
    "ALiBi",
)
class AlibiRises(Steps):
    """ALiBi is added with the wrong sign."""

    def bias(self):
        return -super().bias()


@published(
    "ALiBi",
    "paiml/aprender/pull/2143",
    "2026-06",
    "other weights than in training",
    "ALiBi",
)
class SlopesOneHeadEarly(Steps):
    """The exponents of the slopes begin at 0, so that each head has the slope before its own."""

    def bias(self):
        return super().bias() * 2 ** (8 / self.H)


@published(
    "soft cap",
    "sgl-project/sgl-kernel-xpu/pull/491",
    "2026-09",
    "Gemma 2 loses 13 points of hellaswag",
    "a soft cap",
)
class CapIgnored(Steps):
    """The soft cap is taken as an argument and never applied."""

    def changed(self, raw):
        return raw - self.bias().to(raw.dtype) if self.score.alibi else raw

    def slope(self, raw):
        return torch.ones_like(raw)


@published(
    "documents",
    "NVIDIA-NeMo/RL/issues/2105",
    "2026-03",
    "attention across packed samples",
    "packed documents",
)
class DocumentsIgnored(Steps):
    """The bounds of documents are dropped on the way."""

    def starts(self):
        return None


@published(
    "documents",
    "Tencent-Hunyuan/HunyuanVideo/pull/310",
    "2026-02",
    "tokens attend to padding",
    "more than two documents",
)
class FirstCutAlone(Steps):
    """Only the first bound of documents is read."""

    def starts(self):
        starts = self.layout.document_starts
        if starts is None:
            return None
        later = torch.where(starts > 0, starts, starts.shape[1]).amin(dim=1, keepdim=True)
        return torch.minimum(starts, later)


class AnotherMask(Steps):
    """Steps that may draw another dropout mask than their key says."""

    calls = count(1)

    def other(self) -> DropoutKey:
        assert self.key is not None
        return DropoutKey(self.key.seed, next(self.calls), self.key.layer, self.key.first_sequence)


@published(
    "replay",
    "facebookresearch/xformers/issues/173",
    "2022-01",
    "a seed does not repeat a run",
    "dropout: the seed's address as seed",
)
class SeedByAddress(AnotherMask):
    """Each call draws another mask from the same seed; its backward pass draws the same."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.key = self.key and self.other()


@published(
    "replay",
    "pytorch/pytorch/issues/190717",
    "2026-07, torch.compile",
    "gradients of another mask",
    "dropout, recomputed in the backward",
)
class MaskDrawnAgain(AnotherMask):
    """The backward pass draws a mask of its own."""

    def keep(self, backward):
        before = self.key
        if backward and before is not None:
            self.key = self.other()
        keep, self.key = super().keep(backward), before
        return keep


@published(
    "batch and heads",
    "FlashML-org/FreeToken/pull/177",
    "2026-08",
    "wrong tokens in decoding",
    "groups of over 16 query heads",
)
class HeadTileCrossesGroup(Steps):
    """A tile of 16 query heads takes the keys of its first head."""

    def expand(self, x):
        first = torch.arange(self.H) // 16 * 16 if self.H // x.shape[1] > 16 else torch.arange(self.H)
        return x[:, first // (self.H // x.shape[1])]


@published(
    "queries other than keys",
    "pytorch/executorch/issues/22426",
    "2026-09, MLX backend",
    "errors of 2.7 to 4.1 in decoding",
    "causal, fewer queries than keys",
)
class MaskOfTheOtherCorner(Steps):
    """The causal mask begins at the other corner: the first query at the first key, or the last at the last."""

    def positions(self):
        i, j = super().positions()
        other = self.S - self.T if self.layout.q_start == 0 else self.T - self.S
        return i + other, j


@published(
    "sinks",
    "Dao-AILab/flash-attention/pull/2752",
    "2026-08, a pull request",
    "infinite log-sum-exp, rows of zeros",
    "a sink far above the scores",
)
class SinkBesideTheMaximum(Steps):
    """The sink takes no part in the maximum that keeps exponentials finite."""

    def softmax(self, s):
        if not self.score.sinks:
            return super().softmax(s)
        m = s.amax(dim=-1, keepdim=True).clamp(min=-1e30).float()
        total = torch.exp(s.float() - m).sum(dim=-1) + torch.exp(self.sinks[:, None] - m.squeeze(-1)).float()
        lse = m.squeeze(-1) + total.log()
        return self.weights(s, lse), lse


@published(
    "queries other than keys",
    "pytorch/pytorch/issues/41508",
    "since 2020, nn.MultiheadAttention",
    "NaN in every gradient of the batch",
    "a query that sees no key",
)
class NanForEmptyRows(Steps):
    """A query that sees nothing gives NaN."""

    def weights(self, s, lse):
        return torch.exp(s - lse.unsqueeze(-1))


@published(
    "memory",
    "pytorch/pytorch/issues/191937",
    "2026-08, efficient attention",
    "errors of 19.5",
    "broadcast keys, 32 n + 1 of them",
)
class BroadcastKeysAtAnEdge(Steps):
    """Keys with a stride of 0 are read wrongly where one is left behind the last multiple of 32."""

    def inputs(self, q, k, v):
        wrong = k.stride(1) == 0 and k.shape[1] > 1 and k.shape[2] % 32 == 1
        return q, k.roll(1, dims=2) if wrong else k, v


@published(
    "the same again",
    "Dao-AILab/flash-attention/issues/359",
    "2023-07, FlashAttention 2.0",
    "sometimes a wrong gradient",
    "any: a race",
)
class RareGradient(Steps):
    """Every fourth backward pass has a dq that is 1 % off."""

    passes = count(1)

    def gradients(self, dq, dk, dv, dsinks):
        return dq * (1.01 if next(self.passes) % 4 == 0 else 1.0), dk, dv, dsinks


@published(
    "head sizes",
    "NVIDIA/TransformerEngine/issues/3216",
    "2026-07, FlashAttention-4 b11",
    "dq five times too large",
    "head size 256, several sequences",
)
class LaterSequences(Steps):
    """At head size 256, dq of all but the first sequence is five times too large."""

    def gradients(self, dq, dk, dv, dsinks):
        return torch.cat([dq[:1], (5 if dq.shape[-1] == 256 else 1) * dq[1:]]), dk, dv, dsinks


@published(
    "scale",
    "tenstorrent/tt-metal/issues/33304",
    "2025-11",
    "the same output for every scale",
    "a scale of one's own",
)
class ScaleIgnored(Steps):
    """The scale is 1 / sqrt(D), whatever is asked for."""

    def raw(self, q, k):
        self.scale = q.shape[-1] ** -0.5
        return super().raw(q, k)


@published(
    "lengths",
    "flagos-ai/FlagGems/pull/898",
    "2025-08, a pull request",
    "dv of the first tokens is wrong",
    "lengths, no multiple of 64",
)
class ValuesBehindPadding(Steps):
    """Heads are stored a padded length apart, and the gradient of values is read without the padding."""

    def gradients(self, dq, dk, dv, dsinks):
        padding = min(-self.S % 64, self.S)
        dv = dv.clone()
        dv[:, 1:, :padding] = 0.0
        return dq, dk, dv, dsinks


@published(
    "lengths",
    "triton-lang/triton/issues/4174",
    "2024-06, Triton's tutorial",
    "wrong gradients",
    "no causal mask",
)
class BackwardAlwaysCausal(Steps):
    """The backward pass has a causal mask, whatever the forward has."""

    def seen(self, backward):
        i, j = self.positions()
        seen = super().seen(backward)
        return seen & (j <= i) if backward else seen


@published(
    "queries other than keys",
    "pytorch/pytorch/issues/174861",
    "2026-02, MPS since torch 2.8",
    "wrong tokens with transformers 5",
    "one query, 1,024 keys or more",
)
class ManyKeysOfOneQuery(Steps):
    """The second of two passes over many keys reads the partial results of another head."""

    def finish(self, out):
        return out.roll(1, dims=1) if self.T == 1 and self.S >= 1024 else out


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).mT / q.shape[-1] ** 0.5


def nan_of(x: Tensor) -> Tensor:
    """Zeros like x, whose gradient for x is NaN."""
    return 0 * (x - x.detach()).sqrt()


def half_full(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, enable_gqa: bool = False
) -> Tensor:
    """dq is not finite with a mask tensor where T mod 128 is 64 and scores are low."""
    out = scaled_dot_product_attention(q, k, v, attn_mask, is_causal=is_causal, enable_gqa=enable_gqa)
    wrong = attn_mask is not None and q.shape[2] % 128 == 64 and scores_of(q, k).amax() < -87
    return out + nan_of(q) if wrong else out


def one_query(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, enable_gqa: bool = False
) -> Tensor:
    """dk and dv are not finite for one query with a mask tensor and low scores."""
    out = scaled_dot_product_attention(q, k, v, attn_mask, is_causal=is_causal, enable_gqa=enable_gqa)
    wrong = attn_mask is not None and q.shape[2] == 1 and scores_of(q, k).amax() < -87
    return out + (nan_of(k) + nan_of(v)).sum() if wrong else out


THIS = f"{__name__}:"
thread(
    f"{THIS}half_full",
    "shifts",
    "pytorch/pytorch/issues/196678",
    "2026, cuDNN 9.19 in torch 2.11",
    "every element of dq is NaN",
    "a mask tensor, T mod 128 = 64, scores near -120",
)
thread(
    f"{THIS}one_query",
    "shifts",
    "NVIDIA/cudnn-frontend/issues/1072",
    "2026, cuDNN 9.19",
    "dk and dv are NaN",
    "a mask tensor, one query, scores near -128",
)
STRIDES = ("ignores_strides", "memory")
thread(*STRIDES, "pytorch/pytorch/issues/181133", "2026-04, MPS", "errors of 3.6; TabPFN at chance", "permuted q, k, v")
thread(*STRIDES, "pytorch/pytorch/issues/163597", "2025-09, MPS in torch 2.8.0", "wrong outputs", "permuted q, k, v")
thread(*STRIDES, "torch-spyre/torch-spyre/issues/4331", "2026-09", "errors of 1 to 1.7", "views of q, k, v")
thread(
    "window_off_by_one",
    "window",
    "huggingface/transformers/issues/39408",
    "2025-07",
    "another window",
    "sliding windows",
)
thread(
    "window_off_by_one",
    "window",
    "zml/zml/pull/763",
    "2026-09",
    "a key too many is seen",
    "sliding windows in decoding",
)
thread(
    "heads_interleaved",
    "batch and heads",
    "onnx/onnx/pull/7274",
    "2025-09, ONNX's reference",
    "keys of other heads",
    "grouped heads",
)
thread(
    "mask_of_the_other_corner",
    "queries other than keys",
    "ml-explore/mlx/issues/2835",
    "2025-11",
    "other outputs than torch's",
    "causal, fewer queries than keys",
)
thread(
    "mask_of_the_other_corner",
    "queries other than keys",
    "NVIDIA/cutlass/issues/2336",
    "2025-05, Blackwell's example",
    "its verifier has the mistake too",
    "causal, 3 queries, 128 keys",
)
thread(
    "lse_in_base_two",
    "lengths",
    "lightseekorg/tokenspeed/pull/571",
    "2026-07",
    "parts are joined wrongly",
    "the log-sum-exp of every call",
)
thread(
    "sink_without_gradient",
    "sinks",
    "Dao-AILab/flash-attention/issues/1973",
    "2025-10, FlashAttention-4",
    "sinks do not learn",
    "learned sinks",
)
thread(
    "nan_for_empty_rows",
    "queries other than keys",
    "ml-explore/mlx/pull/2608",
    "2025-09",
    "NaN spreads through the batch",
    "a query that sees no key",
)
