"""Checks, during a run, that an attention computes the same as the reference."""

# The limit for `parity/*` of a correct implementation, in units of `parity/noise_*`. Another order of summation is
# mostly within twice. FlashAttention's delta = rowsum(do * out) costs up to eight times in fp32 and four in bf16, where
# the gradients of queries and keys nearly cancel. Wrong implementations are off by tens to millions after a few
# updates.
PARITY_MARGIN = 10.0
