"""The error that a missing line of the online softmax causes, and the tile where it first shows."""

import torch

from attention import Ablation, AttentionConfig
from recipe.training.ablation import growing_scores, measure


def ablated(ablate: Ablation, block: int = 16) -> dict[str, dict[str, object]]:
    entries = measure(AttentionConfig(name="tiled", ablate=ablate, block_q=block, block_k=block))
    return {str(entry["dtype"]): entry for entry in entries}


def first_overflow(limit: float, block: int) -> tuple[int, int]:
    """The tile and row of the first score beyond `limit`, with tiles visited row by row, from the full scores."""
    q, k, _ = growing_scores(4 * block, 4 * block)
    scores = (q.double() @ k.double().mT)[0, 0] / q.shape[-1] ** 0.5
    tiles = (scores > limit).view(4, block, 4, block).transpose(1, 2)  # (i, j, row, column)
    i, j, row, _ = tiles.nonzero()[0].tolist()
    assert i == 0
    return j, row


def test_without_the_maximum_exp_overflows_where_a_score_first_leaves_its_range():
    found = ablated(Ablation.no_max_subtraction)
    for dtype, largest in (("fp16", 65504.0), ("fp32", torch.finfo(torch.float32).max)):
        j, row = first_overflow(torch.tensor(largest).double().log().item(), block=16)
        assert found[dtype]["first_bad_tile"] == (0, j)
        assert found[dtype]["first_bad_row"] == row
        assert found[dtype]["non_finite"]
    assert found["fp16"]["first_bad_tile"] < found["fp32"]["first_bad_tile"]  # type: ignore[operator]


def test_without_rescaling_the_second_tile_is_finite_and_wrong():
    for entry in ablated(Ablation.no_rescaling).values():
        assert entry["first_bad_tile"] == (0, 1)
        assert not entry["non_finite"]
        assert entry["max_error"] > 1.0  # type: ignore[operator]


def test_nothing_left_out_is_nothing_to_report():
    assert measure(AttentionConfig(name="tiled")) == []
