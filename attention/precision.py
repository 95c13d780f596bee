"""The precision of sums."""

import torch


def accum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype for sums of `dtype`: fp32 for bf16, fp16 and fp32, and fp64 for fp64, which gradcheck uses."""
    return torch.promote_types(dtype, torch.float32)
