"""The loss by position in the window: how much a model gains from its context, also beyond the trained length.

In Olsson et al. 2022, "In-context Learning and Induction Heads", the in-context score is the loss of the 500th token
less the loss of the 50th. Here it is the mean loss of the last twentieth of the window less the mean loss of a
twentieth that begins after a tenth of it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from model.gpt import GPT
from recipe.training.recall.probe import Probe, lengths_for, stretched

WINDOWS = 64
BINS = 24  # of positions, as wide as the logarithm of the position


class PositionLoss(Probe):
    """Over windows that are spread evenly over the validation text."""

    name = "position_loss"

    def __init__(self, tokens: np.ndarray, seq_len: int) -> None:
        """
        tokens   of the validation split, 1-D
        seq_len  the trained length
        """
        self.tokens, self.seq_len = tokens, seq_len

    def measure(self, model: GPT) -> dict[str, float]:
        losses = self.losses(model, self.seq_len)
        return {"probe/in_context_score": in_context_score(losses)}

    def details(self, model: GPT) -> tuple[dict[str, float], dict[str, Any]]:
        lengths = [T for T in lengths_for(model, self.seq_len, self.longest) if len(self.tokens) > T]
        longest = lengths[-1] if lengths else self.seq_len
        with stretched(model, longest):
            losses = self.losses(model, longest)
        edges = np.unique(np.geomspace(1, longest + 1, BINS + 1).round().astype(int)) - 1
        means = [float(losses[low:high].mean()) for low, high in pairwise(edges)]
        metrics = {}
        for before, T in pairwise(lengths):
            metrics[f"probe/loss_beyond_x{T // self.seq_len}"] = float(losses[before:T].mean())
        return metrics, {"trained": self.seq_len, "positions": edges[:-1].tolist(), "loss": means}

    def losses(self, model: GPT, T: int) -> np.ndarray:
        """The mean loss at each position of windows of T tokens: (T,)."""
        device, total = model.wte.weight.device, torch.zeros(T, dtype=torch.float64)
        starts = np.linspace(0, len(self.tokens) - T - 1, WINDOWS).astype(int)
        with self.watch(f"{self.name}: windows of {T:,} tokens", len(starts)) as advance:
            for start in starts:
                window = torch.from_numpy(self.tokens[start : start + T + 1].astype(np.int64)).to(device)
                logits = model(window[None, :-1])[0].float()
                total += F.cross_entropy(logits, window[1:], reduction="none").double().cpu()
                advance(1)
        return (total / len(starts)).numpy()


def in_context_score(losses: np.ndarray) -> float:
    """The mean loss of the last twentieth of a window less the mean loss of the twentieth after its first tenth;
    negative where the model gains from its context."""
    T = len(losses)
    width, early = max(1, T // 20), T // 10
    return float(losses[T - width :].mean() - losses[early : early + width].mean())
