"""Dropout's masks as a pure function of counters: the single definition, for every implementation.

mask.py     the scheme, and the mask in plain PyTorch: the reference    DropoutKey, keep_mask
kernel.py   the same bits inside Triton kernels                         load_key, dropped_tile, drop
"""

from .mask import (
    RATES,
    DropoutKey,
    drop_threshold,
    is_valid_rate,
    keep_mask,
    keep_scale,
    moved,
    philox,
)

__all__ = ["RATES", "DropoutKey", "drop_threshold", "is_valid_rate", "keep_mask", "keep_scale", "moved", "philox"]
