"""Results that have the same bits."""

from functools import partial

from torch.testing import assert_close

# Of two tensors, of all tensors of two sequences, or of all tensors of two dicts.
assert_equal = partial(assert_close, rtol=0, atol=0)
