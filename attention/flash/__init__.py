"""FlashAttention-2 in Triton, and in Gluon for Hopper: several kernel paths behind one contract.

    op.py        the custom operators, their gradients, and the Attention that calls them: start reading here
    paths.py     the kernel paths, and the choice among them
    forward.py   the plain forward, one kernel: out and lse                     forward(...)
    backward.py  the plain backward, two kernels: dq and delta, then dk and dv  backward(...)
    hopper/      the kernels for Hopper
    decode.py    attention to a cache: splits of the keys, and their join
    score.py     the tiles of keys and queries that see each other, and changes to scores
    horizon.py   the distance beyond which ALiBi leaves a key no weight
    formula.py   scores by formula: their functions in Triton; formula_gradients.py has the gradients of learned tensors
    launch.py    launches of kernels, and the replay of calls alike
    tiles.py     tiles of (B, H, T, D) tensors, in and out of the chip
    call.py      a call, its block sizes by head size, dtype, dropout and architecture, and formulas that are options

Dropout's mask is drawn by attention/dropout/kernel.py. docs/notes/kernels.md records experiments.

`forward` and `backward` are the contract between paths.py and the kernels. Another path is a module with functions of
the same signatures, and an entry in PATHS.
"""

from .op import FlashAttention

__all__ = ["FlashAttention"]
