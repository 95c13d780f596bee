"""What a linear mixer computes, said once: one recurrence, with a switch for the decay and one for the delta rule.

S_t = diag(a_t) S_{t-1} + b_t k_t (v_t - [delta] k_t^T diag(a_t) S_{t-1})^T        S (K, V), a_t in (0, 1]
o_t = scale q_t^T S_t

decay     delta   published as
none      no      linear attention (Katharopoulos et al. 2020)
fixed     no      RetNet (Sun et al. 2023): a constant for each head
head      no      Mamba-2 (Dao and Gu 2024), gated by a number for each head and token
channel   no      GLA (Yang et al. 2024): a number for each channel of the keys
none      yes     DeltaNet (Schlag et al. 2021; Yang et al. 2024)
head      yes     Gated DeltaNet (Yang et al. 2025)
channel   yes     Kimi Delta Attention (Kimi Team 2025)
"""

from dataclasses import dataclass
from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor


class MixerError(ValueError):
    """A call that a mixer refuses; the message says what to change."""


class Decay(Enum):
    """Which numbers the state is multiplied by before each token."""

    none = "none"
    fixed = "fixed"
    head = "head"
    channel = "channel"


@dataclass(frozen=True)
class Recurrence:
    """Which recurrence: its decay, and whether a token replaces what the state holds for its key (the delta rule)."""

    decay: Decay = Decay.none
    delta: bool = False


@dataclass(frozen=True)
class MixerInputs:
    """The tensors of a call, checked.

    q, k       (B, H, T, K)
    v          (B, H, T, V)
    log_decay  log a: (B, H, T, 1), or (B, H, T, K) where each channel decays by itself; None without decay
    beta       b: (B, H, T); None: 1
    initial    the state before the first token, (B, H, K, V); None: zeros
    documents  (B, T) integers that change where another document begins; None: each row is one document
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None = None
    beta: Tensor | None = None
    initial: Tensor | None = None
    documents: Tensor | None = None

    def check(self, recurrence: Recurrence) -> None:
        """Raises MixerError where the shapes do not fit together, or not to the recurrence."""
        B, H, T, K = self.q.shape
        V = self.v.shape[-1]
        channels = K if recurrence.decay is Decay.channel else 1
        expected = {
            "k": (self.k, (B, H, T, K)),
            "v": (self.v, (B, H, T, V)),
            "log_decay": (self.log_decay, (B, H, T, channels)),
            "beta": (self.beta, (B, H, T)),
            "initial": (self.initial, (B, H, K, V)),
            "documents": (self.documents, (B, T)),
        }
        for name, (tensor, shape) in expected.items():
            if tensor is not None and tuple(tensor.shape) != shape:
                q = tuple(self.q.shape)
                raise MixerError(f"{name} has the shape {tuple(tensor.shape)}; for q of {q} it is {shape}.")
        if (self.log_decay is None) != (recurrence.decay is Decay.none):
            which = "needs" if self.log_decay is None else "takes no"
            raise MixerError(f"decay={recurrence.decay.value} {which} log_decay.")


def document_starts(documents: Tensor) -> Tensor:
    """Where a document begins: (B, T) booleans, the first token of each row included."""
    first = torch.ones_like(documents[:, :1], dtype=torch.bool)
    return torch.cat([first, documents[:, 1:] != documents[:, :-1]], dim=1)


def of_length_1(x: Tensor) -> Tensor:
    """x (..., K) / sqrt(|x|^2 + 1e-6): its norm by the mean of squares, over sqrt(K)."""
    K = x.shape[-1]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (F.rms_norm(wide, (K,), eps=1e-6 / K) * K**-0.5).to(x.dtype)
