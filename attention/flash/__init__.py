"""FlashAttention-2 in Triton: a path for each GPU architecture that needs one, behind one contract.

    op.py        the custom operators, their gradients, and the Attention that calls them: start reading here
    forward.py   one kernel: out and lse                                        forward(...)
    backward.py  two kernels: dq (and delta), then dk and dv                    backward(...)
    decode.py    attention to a cache; its kernels in decode_kernel.py: splits of the keys, and their join
    score.py     which tiles of keys and queries see each other
    tiles.py     tiles of (B, H, T, D) tensors, in and out of the chip
    configs.py   block sizes for each head size, dtype, dropout and architecture

Dropout's mask is drawn by attention/dropout/kernel.py. What was tried, and what it gave, is written down in
docs/kernels.md; bench/tune.py finds block sizes.

`forward` and `backward` are the contract between op.py and the kernels. A path for one architecture alone is a file
beside them with functions of the same signatures, which op.py chooses by compute capability.
"""

from .op import FlashAttention

__all__ = ["FlashAttention"]
