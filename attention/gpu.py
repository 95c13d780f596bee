"""What Triton and the GPU at hand can do."""

from __future__ import annotations

from importlib.util import find_spec

import torch

HAS_TRITON = find_spec("triton") is not None  # it exists for Linux alone
if HAS_TRITON:
    import triton
    import triton.language as tl

    INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)  # kernels run in Triton's interpreter, without a GPU

ALIGNMENT = 16  # bytes: what Hopper's copy engine asks of a tensor's start and of every stride


def capability(device: torch.device) -> tuple[int, int]:
    """The GPU's compute capability; Triton's interpreter stands in for a Hopper GPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
