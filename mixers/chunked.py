"""The recurrence by chunks of tokens, in plain PyTorch: products of matrices instead of a step for each token.

Within a chunk the tokens' weights are exp(G_i - G_j), i >= j, where G sums the logarithms of the decay from the chunk's
beginning: never a quotient of two exponentials, which overflow. The delta rule is a triangular system for each chunk
(the WY form: Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule", section 3; with a decay for
each channel: Kimi Team 2025, "Kimi Linear", section 3.2).

A document begins a chunk, so no weight and no state crosses to the next document, and a document of a packed row is
computed by the same products as alone.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .recurrence import MixerInputs, Recurrence, document_starts

CHUNK = 16  # tokens
CHANNELS = 16  # of 4 bytes: products of aligned matrices have the same bits wherever a row stands in its batch


def chunks_of(documents: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The place (B, T) of each token among those of its row's chunks, which have at most `size` of one document, and
    whether a chunk (B, N) begins a document that is not the row's first."""
    starts = document_starts(documents)
    positions = torch.arange(documents.shape[1], device=documents.device)
    within = positions - torch.where(starts, positions, 0).cummax(dim=1).values  # of a token in its document
    chunk = (within % size == 0).long().cumsum(dim=1) - 1
    begins = torch.zeros(len(documents), int(chunk.max()) + 1, dtype=torch.bool, device=documents.device)
    rows, tokens = torch.nonzero(starts & (positions > 0), as_tuple=True)
    begins[rows, chunk[rows, tokens]] = True
    return chunk * size + within % size, begins


def chunked(inputs: MixerInputs, recurrence: Recurrence, scale: float, size: int = CHUNK) -> tuple[Tensor, Tensor]:
    """The output (B, H, T, V) in v's dtype, and the last state (B, H, K, V) in fp32, or fp64 for inputs in fp64."""
    dtype = torch.promote_types(inputs.v.dtype, torch.float32)
    B, H, T, K = inputs.q.shape
    V = inputs.v.shape[-1]
    state = inputs.initial.to(dtype) if inputs.initial is not None else inputs.v.new_zeros(B, H, K, V, dtype=dtype)
    if T == 0:
        return inputs.v, state
    place = begins = None
    N = -(-T // size)
    if inputs.documents is not None:
        place, begins = chunks_of(inputs.documents, size)
        N = begins.shape[1]

    def cut(x: Tensor) -> Tensor:
        """x (B, H, T, D) as (B, H, N, size, D or more), with zeros where a chunk has no token, and for channels."""
        x = F.pad(x.to(dtype), (0, -x.shape[-1] % CHANNELS if x.shape[-1] > 1 else 0))
        if place is None:
            return F.pad(x, (0, 0, 0, N * size - T)).unflatten(2, (N, size))
        room = x.new_zeros(B, H, N * size, x.shape[-1])
        return room.scatter(2, place[:, None, :, None].expand_as(x), x).unflatten(2, (N, size))

    q, k, v = cut(inputs.q), cut(inputs.k), cut(F.pad(inputs.v, (0, int(V == 1))))
    state = F.pad(state, (0, v.shape[-1] - V, 0, k.shape[-1] - K))
    beta = None if inputs.beta is None else cut(inputs.beta[..., None])
    row, new = (k, v) if beta is None else (beta * k, beta * v)
    log_decay = inputs.log_decay if inputs.log_decay is not None else q.new_zeros(B, H, T, 1)
    G = cut(log_decay).cumsum(-2)  # (B, H, N, C, K or 1)
    into, out_of = G.exp(), (G[..., -1:, :] - G).exp()
    later = torch.ones(size, size, dtype=torch.bool, device=G.device).triu(1)[..., None]
    decay = (G[..., :, None, :] - G[..., None, :, :]).masked_fill(later, float("-inf")).exp()  # exp(G_i - G_j), j <= i
    scores = weighted(q, k, decay)
    read = None  # what a token reads of the state before its chunk, before it writes
    if recurrence.delta:
        system = weighted(row, k, decay).tril(-1) + torch.eye(size, dtype=dtype, device=q.device)
        right = torch.cat([new, row * into], dim=-1)
        new, read = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split(
            [v.shape[-1], k.shape[-1]], dim=-1
        )
    # All chunks are taken apart at once: the gradient of a slice is as large as all of them.
    kept, keys, news = (x.unbind(2) for x in (into[..., -1, :, None], (k * out_of).mT, new))
    reads = None if read is None else read.unbind(2)
    states, written = [], []
    for n in range(N):
        if begins is not None:
            state = torch.where(begins[:, n, None, None, None], 0, state)
        states.append(state)
        written.append(news[n] if reads is None else news[n] - reads[n] @ state)
        state = kept[n] * state + keys[n] @ written[n]
    out = (q * into) @ torch.stack(states, dim=2) + scores @ torch.stack(written, dim=2)
    out = scale * out.flatten(2, 3)[..., :V]  # (B, H, N C, V)
    out = out[:, :, :T] if place is None else out.gather(2, place[:, None, :, None].expand(B, H, T, V))
    return out.to(inputs.v.dtype), state[..., :K, :V]


def weighted(rows: Tensor, columns: Tensor, decay: Tensor) -> Tensor:
    """The products (..., C, C) of rows and columns (..., C, K), weighted by what decays between them."""
    if decay.shape[-1] == 1:
        return (rows @ columns.mT) * decay[..., 0]
    return torch.einsum("...ik,...jk,...ijk->...ij", rows, columns, decay)
