"""A user's attention that computes another function than the reference."""

import torch

from attention.naive import NaiveAttention


class ScalableSoftmax(NaiveAttention):
    """Scores grow with the logarithm of the number of keys that a query sees (Nakanishi 2025), without a parameter."""

    name = "scalable_softmax"
    supports = frozenset({"full", "window", "documents"})
    exact = False

    def attend(self, q, k, v, *rest):
        seen = torch.arange(1, q.shape[2] + 1, device=q.device)
        return super().attend(q * seen.log1p()[:, None], k, v, *rest)
