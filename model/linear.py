"""The linear layers of the blocks, as the class by which ranks find them."""

from torch import nn


class Linear(nn.Linear):
    """nn.Linear whose weight is read by products alone, which autocast takes in its own precision: ranks exchange the
    weight in that precision."""
