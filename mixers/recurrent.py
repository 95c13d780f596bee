"""The recurrence token by token: the definition, on any device. Slow, and what everything else is compared with."""

import torch
from torch import Tensor

from .recurrence import MixerInputs, Recurrence, document_starts


def recurrent(inputs: MixerInputs, recurrence: Recurrence, scale: float) -> tuple[Tensor, Tensor]:
    """The output (B, H, T, V) in v's dtype, and the last state (B, H, K, V) in fp32, or fp64 for inputs in fp64."""
    dtype = torch.promote_types(inputs.v.dtype, torch.float32)
    q, k, v = inputs.q.to(dtype), inputs.k.to(dtype), inputs.v.to(dtype)
    B, H, T, K = q.shape
    state = inputs.initial.to(dtype) if inputs.initial is not None else v.new_zeros(B, H, K, v.shape[-1])
    begins = None if inputs.documents is None else document_starts(inputs.documents)
    out = []
    for t in range(T):
        if begins is not None and t > 0:  # before the first token a row has its initial state
            state = torch.where(begins[:, t, None, None, None], 0, state)
        if inputs.log_decay is not None:
            state = inputs.log_decay[:, :, t].to(dtype).exp()[..., None] * state
        written = v[:, :, t]  # (B, H, V)
        if recurrence.delta:
            written = written - (k[:, :, t, :, None] * state).sum(-2)
        key = k[:, :, t] if inputs.beta is None else inputs.beta[:, :, t, None].to(dtype) * k[:, :, t]
        state = state + key[..., None] * written[:, :, None]
        out.append(scale * (q[:, :, t, :, None] * state).sum(-2))
    return (torch.stack(out, dim=2) if out else v.new_zeros(B, H, 0, v.shape[-1])).to(inputs.v.dtype), state
