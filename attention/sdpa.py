"""torch's own scaled_dot_product_attention, the yardstick: one call, several kernels behind it.

`attention.backend` names the kernel; `auto` leaves the choice to torch. None of them can replay the keep mask of
attention/dropout, so dropout needs `attention.rng=torch`: the mask is then the kernel's own, drawn from torch's
default generator, and a run with it can be compared with others in distribution only.
"""

from __future__ import annotations

import contextlib
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention.dropout import DropoutKey
from attention.interface import (
    Attention,
    AttentionConfig,
    AttentionShape,
    DropoutRng,
    SDPABackend,
    UnsupportedAttention,
    causal_mask,
)

TORCH_BACKENDS = {
    SDPABackend.flash: SDPBackend.FLASH_ATTENTION,
    SDPABackend.efficient: SDPBackend.EFFICIENT_ATTENTION,
    SDPABackend.cudnn: SDPBackend.CUDNN_ATTENTION,
    SDPABackend.math: SDPBackend.MATH,
}


class SDPAAttention(Attention):
    """Attention by torch. Does not return the log-sum-exp."""

    name = "sdpa"
    options = frozenset({"rng", "backend"})

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        if config.dropout > 0 and config.rng is not DropoutRng.torch:
            raise UnsupportedAttention(
                f"attention=sdpa cannot replay the mask of attention.dropout={config.dropout}; set attention.rng=torch "
                "to use torch's own, or choose attention=tiled or attention=flash."
            )

    def check(self, shape: AttentionShape) -> None:
        """Let the chosen backend attend once, forward and backward, on two tokens of this shape, dtype and device."""
        if self.config.backend is SDPABackend.auto:
            return
        devices = [shape.device] if shape.device.type == "cuda" else []
        q, k = (
            torch.zeros(1, n, 2, shape.head_dim, dtype=shape.dtype, device=shape.device, requires_grad=True)
            for n in (shape.n_heads, shape.n_kv_heads)
        )
        key = DropoutKey(0, 0, 0, 0)
        with warnings.catch_warnings(record=True) as reasons, torch.random.fork_rng(devices):
            warnings.simplefilter("always")
            try:
                self(q, k, k, dropout_key=key).sum().backward()
            except RuntimeError as error:
                told = [str(reason.message).split(" (Triggered")[0].rstrip(". ") for reason in reasons]
                why = "; ".join(reason for reason in told if not reason.endswith(":"))  # less the headings
                raise UnsupportedAttention(
                    f"attention.backend={self.config.backend.value} cannot serve {shape.n_heads} heads "
                    f"({shape.n_kv_heads} for keys) of size {shape.head_dim} in {shape.dtype} on {shape.device} "
                    f"({why or error}); use attention.backend=auto."
                ) from None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, dropout_key: DropoutKey | None
    ) -> tuple[Tensor, None]:
        T, S = q.shape[2], k.shape[2]
        blind = max(0, T - S) if causal else 0  # the first rows see nothing; torch has no answer of its own for them
        q = q[:, :, blind:]
        # torch aligns its causal mask to the top left, which is ours where T = S; with fewer queries it needs a mask.
        mask = causal_mask(T, S, device=q.device) if causal and 1 < T < S else None
        if mask is not None and self.config.backend is SDPABackend.flash and q.is_cuda:
            raise UnsupportedAttention(
                f"attention.backend=flash cannot align {T} queries with {S} keys; use attention.backend=auto."
            )
        with self.backend():
            out = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                dropout_p=self.dropout if dropout_key is not None else 0.0,
                is_causal=causal and T >= S,
                scale=scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        return F.pad(out, (0, 0, blind, 0)) if blind else out, None

    def backend(self) -> contextlib.AbstractContextManager[None]:
        """Leaves torch no kernel but the chosen one."""
        if self.config.backend is SDPABackend.auto:
            return contextlib.nullcontext()
        return sdpa_kernel(TORCH_BACKENDS[self.config.backend])
