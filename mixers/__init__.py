"""Linear attention: one recurrence (recurrence.py), computed in three ways.

recurrent.py  token by token: the definition, on any device
chunked.py    chunks of tokens in plain PyTorch: trains on CPUs and GPUs
fla.py        the kernels of the package flash-linear-attention, on NVIDIA GPUs
"""

from functools import partial

import torch
from torch import Tensor

from .chunked import chunked
from .fla import fla
from .recurrence import Decay, MixerError, MixerInputs, Recurrence, of_length_1
from .recurrent import recurrent

IMPLEMENTATIONS = {"recurrent": recurrent, "chunked": chunked, "fla": fla}


@torch.compiler.disable  # a compiler would unroll the chunks, and takes minutes for a thousand
def mix(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    recurrence: Recurrence,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial: Tensor | None = None,
    documents: Tensor | None = None,
    unit: bool = False,
    mixer: str = "chunked",
) -> tuple[Tensor, Tensor]:
    """The output (B, H, T, V) of a recurrence in v's dtype, and its last state (B, H, K, V) in fp32 (fp64 from fp64).

    q, k, v    (B, H, T, K) twice, (B, H, T, V)
    log_decay  log a, finite and at most 0: (B, H, T, 1), or (B, H, T, K) for a decay of each channel
    beta       (B, H, T); None: 1
    scale      of the queries; None: K ** -0.5
    initial    the state before the first token, (B, H, K, V)
    documents  (B, T) integers that change where another document begins: the state starts again at zero
    unit       whether q and k are divided by their lengths: x / sqrt(|x|^2 + 1e-6)
    mixer      recurrent, chunked or fla

    Raises MixerError where shapes do not fit, and where the package or a GPU is missing.
    """
    if mixer not in IMPLEMENTATIONS:
        raise MixerError(f"mixer={mixer} is unknown; choose one of {', '.join(IMPLEMENTATIONS)}.")
    compute = IMPLEMENTATIONS[mixer]
    if unit and mixer == "fla" and recurrence.delta:
        compute = partial(fla, unit=True)
    elif unit:
        q, k = of_length_1(q), of_length_1(k)
    inputs = MixerInputs(q, k, v, log_decay, beta, initial, documents)
    inputs.check(recurrence)
    with torch.autocast(q.device.type, enabled=False):  # the state's products are in fp32
        return compute(inputs, recurrence, q.shape[-1] ** -0.5 if scale is None else scale)


__all__ = ["IMPLEMENTATIONS", "Decay", "MixerError", "Recurrence", "mix"]
