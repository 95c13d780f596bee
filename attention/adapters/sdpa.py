"""torch's scaled_dot_product_attention, for comparison: one call, several kernels behind it.

`attention.backend` names the kernel; `auto` leaves the choice to torch. None of them can draw the mask of
attention/dropout, so dropout needs `attention.rng=torch`. The kernel then draws its mask from torch's default
generator, and its runs match others in distribution only.

Windows, documents and queries that are not aligned with the keys need a mask in memory, T x S for each sequence. ALiBi,
soft caps and sinks are not supported.
"""

import contextlib

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..errors import Option, UnsupportedAttention
from ..interface import Attention, AttentionOutput, AttentionShape, Call
from ..options import AttentionConfig, DropoutRng, SDPABackend
from ..score import key_intervals
from .trial import attend_once

TORCH_BACKENDS = {
    SDPABackend.flash: SDPBackend.FLASH_ATTENTION,
    SDPABackend.efficient: SDPBackend.EFFICIENT_ATTENTION,
    SDPABackend.cudnn: SDPBackend.CUDNN_ATTENTION,
    SDPABackend.math: SDPBackend.MATH,
}
# What torch's call becomes; but its backend `math`, and with dropout on a CPU, it is many operators.
OPERATORS = frozenset(
    f"aten::_scaled_dot_product_{kernel}"
    for kernel in (
        "flash_attention",
        "flash_attention_for_cpu",
        "efficient_attention",
        "cudnn_attention",
        "fused_attention_overrideable",
    )
)


class SDPAAttention(Attention):
    """Attention by torch. Does not return the log-sum-exp."""

    name = "sdpa"
    options = frozenset({"rng", "backend"})
    supports = frozenset({"full", "window", "documents"})
    returns_lse = False
    operators = OPERATORS
    exact = True

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        if config.backend is SDPABackend.math:
            self.operators = frozenset()  # type: ignore[misc]
        if config.dropout > 0 and config.rng is not DropoutRng.torch:
            raise UnsupportedAttention(
                "{} cannot replay the mask of {}; set {} to use torch's own, or choose {} or {}.",
                Option("attention", "sdpa"),
                Option("attention.dropout", config.dropout),
                Option("attention.rng", DropoutRng.torch.value),
                Option("attention", "tiled"),
                Option("attention", "flash"),
            )

    def check(self, shape: AttentionShape) -> None:
        """Let the chosen backend attend once, forward and backward, on two tokens of this shape, dtype and device."""
        super().check(shape)
        if self.config.backend is SDPABackend.auto:
            return
        chosen, auto = (Option("attention.backend", x.value) for x in (self.config.backend, SDPABackend.auto))
        attend_once(self, shape, chosen, auto)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> AttentionOutput:
        (T, S), score, dropout = (q.shape[2], k.shape[2]), call.spec.score, call.spec.threshold > 0
        n_masked = max(0, T - S) if score.causal else 0  # the first rows see nothing, for which torch has no rule
        seen = key_intervals(score, call.layout, T, S, q.device)
        # torch aligns its causal mask to the top left: the same if T = S; with fewer queries it needs a mask.
        masked = seen.begins or (score.causal and 1 < T < S)
        mask = seen.mask((n_masked, T), (0, S)) if masked else None
        q, scale = q[:, :, n_masked:], call.spec.scale
        if scale <= 0:  # on a CPU torch takes a row's maximum before it scales, which only a positive scale allows
            q, scale = q * scale, 1.0
        backend = self.config.backend
        with contextlib.nullcontext() if backend is SDPABackend.auto else sdpa_kernel(TORCH_BACKENDS[backend]):
            out = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                dropout_p=self.dropout if dropout else 0.0,
                is_causal=score.causal and not masked and T >= S,
                scale=scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        return AttentionOutput(F.pad(out, (0, 0, n_masked, 0)) if n_masked else out)
