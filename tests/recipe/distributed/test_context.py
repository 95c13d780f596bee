"""A sequence spread over ranks is attended to as in one process, with the same dropout masks."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from attention import UnsupportedAttention
from attention.score import take_rows
from model.score import ScoreConfig
from recipe.distributed.context import ContextBy, rows_of, shared_by
from recipe.distributed.options import ParallelConfig
from recipe.distributed.sharing import Sharing
from recipe.distributed.world import World
from recipe.run.build import build_model
from recipe.run.config import Config
from tests.equal import assert_equal
from tests.programs import completed
from tests.recipe.distributed.context_ranks import CASES, COMPILED, CPU, T, attend
from tests.recipe.distributed.test_ranks import free_port


@pytest.fixture(scope="module")
def found(tmp_path_factory, forked):
    """The results of each of four ranks."""
    folder = tmp_path_factory.mktemp("context")
    completed("-m", "tests.recipe.distributed.context_ranks", folder, free_port(), OMP_NUM_THREADS="1")
    return [torch.load(folder / f"{rank}.pt") for rank in range(4)]


def assembled(parts: list[Tensor], by: ContextBy) -> Tensor:
    """The ranks' parts of a tensor, (B, H, T / W, ...) each, concatenated in the order of positions."""
    positions = torch.cat([take_rows(torch.arange(T), rows_of(r, len(parts), T, by), 0) for r in range(len(parts))])
    return torch.cat(parts, dim=2)[:, :, positions.argsort()]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("by", [ContextBy.heads, ContextBy.keys])
@pytest.mark.parametrize("case", CASES)
def test_ranks_that_share_a_sequence_attend_as_one(found, case, by, size):
    H, H_kv, *_ = CASES[case]
    if by is ContextBy.heads and (H % size or H_kv % size):
        assert shared_by(H, H_kv, size) is ContextBy.keys
        return
    ranks = [rank[f"{case}, {size} by {by.value}"] for rank in found[:size]]
    expected = attend(case, None)
    for name in ("out", "lse", "dq", "dk", "dv"):
        # Sharing by heads changes the products' shapes, and with them the order in which the library adds.
        torch.testing.assert_close(
            assembled([rank[name] for rank in ranks], by), expected[name], rtol=1e-5, atol=2e-6, msg=name
        )
    for name in expected.keys() & {"dsinks", "dslope", "dtable", "dx"}:
        torch.testing.assert_close(sum(rank[name] for rank in ranks), expected[name])


@pytest.mark.slow
@pytest.mark.parametrize("by", ContextBy)
def test_compiled_as_one_graph_it_gives_the_same(found, by):
    for rank in found[:2]:
        assert_equal(rank[f"compiled by {by.value}"], rank[f"{COMPILED[by]}, 2 by {by.value}"])


def test_ranks_that_share_a_sequence_refuse_tensors_that_are_made_from_the_input():
    gates = ScoreConfig(formula="s + c[h, i] - c[h, j]", tensors={"c": "model.forget_gate"})
    config, world = Config(score=gates, parallel=ParallelConfig(context=2)), World(rank=0, size=2, context=2)
    model = build_model(config, 256, CPU, torch.float32, world)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with pytest.raises(UnsupportedAttention, match=r"context=2 does not support .*score\.tensors\.c; use"):
            Sharing(model, world, config.parallel, CPU, torch.float32)
    finally:
        dist.destroy_process_group()


def test_every_row_has_one_rank_and_causal_work_is_shared_evenly():
    rows = [rows_of(rank, 4, T, ContextBy.keys) for rank in range(4)]
    assert torch.cat([torch.arange(*part) for own in rows for part in own]).sort().values.tolist() == list(range(T))
    assert len({sum(start + stop for start, stop in own) for own in rows}) == 1
