"""The error of the online softmax when one of its lines is left out, and the first tile and row that are wrong.

attention=tiled visits the keys tile by tile, and after each tile its output is attention over the keys seen so far. A
call with the keys cut off after tile j therefore shows the state of query tile i after tile (i, j). Each such state is
compared with the textbook formula in fp64.

The scores grow along the keys, from 0 to beyond the range of exp in fp32. Without the line that keeps exp in range the
result is wrong from a certain tile on: early in fp16, whose largest number is 65504 = exp(11.1), and later in fp32,
where it is exp(88.7). Without the line that rescales earlier tiles to a new maximum it is wrong from the second tile of
every row on, in any precision.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from attention import Ablation, Attention, AttentionConfig, Score, build_attention
from attention.check.cases import DTYPES

TILES = 4  # in each direction
HEAD_DIM = 64
STEEPEST = 40.0  # standard deviation of the last key's scores: of 64 keys a few stand beyond 88, none beyond 200
# A row may be off by this many times the error of the intact algorithm.
MARGIN = 8.0
FULL = Score(causal=False)


def measure(config: AttentionConfig) -> list[dict[str, object]]:
    """The `ablation` entry of a run with `config.ablate`, in fp16 and in fp32; empty where nothing is left out."""
    if config.ablate is Ablation.none:
        return []
    return [broken(replace(config, dropout=0.0), name) for name in ("fp16", "fp32")]


def broken(config: AttentionConfig, name: str) -> dict[str, object]:
    """The failure of an ablated algorithm in the precision of this name: an entry of `ablation` in summary.json.

    first_bad_tile  (i, j) of queries and keys, in the order in which tiles are visited: the first that is further off
                    than the intact algorithm ever is; None: all are right
    first_bad_row   the query, counted from the start of the sequence
    max_error       of the finished output's finite entries against fp64; None where none is finite
    non_finite      whether the finished output has inf or NaN
    """
    attend, intact = build_attention(config), build_attention(replace(config, ablate=Ablation.none))
    exact = build_attention(AttentionConfig(name="naive"))
    q, k, v = growing_scores(TILES * config.block_q, TILES * config.block_k)
    q, k, v = (x.to(DTYPES[name]) for x in (q, k, v))

    stops = range(config.block_k, k.shape[2] + 1, config.block_k)

    def after_each_tile(attend: Attention) -> Tensor:
        """The largest error of each query's state after each tile of keys, (TILES, T); inf where it is not finite."""
        after = (errors(attend, exact, q, k[:, :, :stop], v[:, :, :stop]) for stop in stops)
        return torch.stack([error.nan_to_num(nan=math.inf).amax(dim=(0, 1, 3)) for error in after])

    bad = after_each_tile(attend) > MARGIN * after_each_tile(intact).max()
    # In the order in which tiles are visited: tile of queries, tile of keys, row.
    visited = bad.view(TILES, TILES, config.block_q).transpose(0, 1).nonzero().tolist()
    i, j, row = visited[0] if visited else (0, 0, 0)

    error = errors(attend, exact, q, k, v)
    finite = error[error.isfinite()]
    return {
        "ablate": config.ablate.value,
        "dtype": name,
        "first_bad_tile": (i, j) if visited else None,
        "first_bad_row": i * config.block_q + row if visited else None,
        "max_error": finite.max().item() if len(finite) else None,
        "non_finite": len(finite) < error.numel(),
    }


def errors(attend: Attention, exact: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """|out - fp64|, as large as out; not finite where out is not."""
    return (attend(q, k, v, score=FULL).out.double() - exact(q.double(), k.double(), v.double(), score=FULL).out).abs()


def growing_scores(T: int, S: int) -> tuple[Tensor, Tensor, Tensor]:
    """q (1, 1, T, D) and k, v (1, 1, S, D) whose scores at key j are normal with deviation STEEPEST * (j + 1) / S."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, length, HEAD_DIM, generator=generator) for length in (T, S, S))
    return q, k * STEEPEST * torch.arange(1, S + 1)[:, None] / S, v
