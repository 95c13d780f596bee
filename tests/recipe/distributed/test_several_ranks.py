"""One, two and four ranks are the same training: losses, norms and weights, bit for bit."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from attention.gpu import HAS_TRITON
from recipe.distributed.exchange import Counter, add_pairwise
from recipe.distributed.ranks import PATIENCE_S
from recipe.distributed.sharded_update import with_bits_of_wholes
from recipe.distributed.sharing import Sharing
from recipe.distributed.world import World
from recipe.run.metrics import read_metrics
from tests.programs import completed
from tests.recipe.distributed.several_ranks import KINDS, PARALLEL, RESUMED, local_tree, parallels
from tests.recipe.distributed.test_ranks import free_port

Found = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, forked):
    """The files with the results of each rank of 1, 2 and 4."""
    folder, ports = tmp_path_factory.mktemp("ranks"), [free_port() for _ in range(8)]
    completed("-m", "tests.recipe.distributed.several_ranks", folder, *ports, OMP_NUM_THREADS="1")
    return folder


@pytest.fixture(scope="module")
def found(folder):
    """The results of each rank of 1, 2 and 4; under 0 those of a run continued on 4, 2, 1 and again 4 ranks."""
    found = {
        size: [json.loads((folder / f"{rank}-of-{size}.json").read_text()) for rank in range(size)]
        for size in (1, 2, 4)
    }
    found[0] = [json.loads((folder / f"{rank}-resumed.json").read_text()) for rank in range(4)]
    return found


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13])
def test_terms_that_come_one_by_one_are_added_in_a_tree(count):
    terms = list(torch.randn(count, 1000, generator=torch.Generator().manual_seed(count)))
    counter = Counter()
    for term in terms:
        counter.add(term.clone())
    assert torch.equal(counter.finish(), local_tree(terms))


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_pass_over_the_terms_of_all_ranks_adds_them_in_a_tree(dtype):
    from recipe.distributed.pairwise_kernel import launch_add_pairwise

    for ranks in range(1, 10):
        drawn = torch.Generator().manual_seed(ranks)
        x, exponents = (torch.randn(ranks, 1500, generator=drawn) for _ in range(2))
        terms, out = (x * 3**exponents).to(dtype), torch.empty(1500)
        launch_add_pairwise(terms, out)
        assert torch.equal(out, local_tree(list(terms.float())))
        assert torch.equal(add_pairwise(terms, torch.empty(1500)), out)


def test_an_optimizer_that_derives_from_adamw_keeps_its_update():
    class Other(torch.optim.AdamW):
        pass

    optimizer = Other([torch.nn.Parameter(torch.zeros(2**10, 2**10))], fused=True)
    ranks: Any = SimpleNamespace(world=World(0, 2, 0), sharded=False)
    assert Sharing.share_update(ranks, optimizer) is optimizer


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_ranks_has_the_same_losses_norms_and_validation(found, kind):
    (alone,), (sizes, _) = found[1], KINDS[kind]
    expected = alone[f"exact, {kind}"]
    assert len({loss for loss, _ in expected["updates"]}) == len(expected["updates"]) > 1
    for size in sizes[1:]:
        exact = [name for name in parallels(kind, size) if PARALLEL[name].context == 1]
        assert exact
        assert [[rank[f"{name}, {kind}"] for name in exact] for rank in found[size]] == [[expected] * len(exact)] * size


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_replicate_under_autocast_compute_with_rounded_copies(found, size):
    assert all(rank["rounded"] > 2 * 2 * 128 * 32 for rank in found[size])  # elements: the MLPs' matrices and others


@pytest.mark.slow
def test_replicated_ranks_share_the_moments_of_matrices(found):
    for size in (1, 2, 4):
        assert all(1 <= size * rank["part of the moments"] < 1 + 0.03 * size for rank in found[size])


@pytest.mark.slow
def test_ranks_that_share_sequences_give_up_after_the_timeout_of_the_run(found):
    assert [rank["seconds of patience"] for rank in found[4]] == [PATIENCE_S] * 4


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_with_different_configurations_are_all_refused(found, size):
    assert "refused" not in found[1][0]
    for rank in found[size]:
        assert rank["refused"].startswith("Rank 1 has another optimizer than rank 0")
        assert "start every rank with the same overrides" in rank["refused"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", RESUMED)
def test_checkpoints_are_read_on_another_number_of_ranks(found, kind):
    """From four sharded ranks to two, from two to one, from one to four replicated ranks. In bf16 all are replicated:
    each has the fp32 weights of its rows alone."""
    alone = found[1][0][f"{kind} to the end"]
    for resumed in found[0]:
        for step, updates in resumed[kind].items():
            assert updates[0] == alone["updates"][int(step)]
    assert list(found[0][0][kind]) == ["0", "1", "2", "3"]
    assert found[0][0][kind]["3"][1] == [alone["validation of the average"]]


@pytest.mark.slow
def test_a_run_on_several_ranks_probes_evaluates_and_samples_as_on_one_and_is_profiled(folder):
    def run(size):
        """What a run logs, but for its speed, and the text that its model writes."""
        lines = read_metrics(folder / f"run-{size}" / "metrics.jsonl")
        timed = ("throughput/", "memory/", "profile/")
        logged = [{key: value for key, value in line.items() if not key.startswith(timed)} for line in lines]
        said = (folder / f"run-{size}" / "said.txt").read_text()
        return logged, said.partition("step 3/3")[2].partition("\n")[2].partition("run folder")[0]

    logged, text = run(4)
    assert (logged, text) == run(1)
    assert ["parity/grad_rel_err" in line for line in logged] == [False, True, False, True]
    assert ["val/loss" in line for line in logged] == [True, False, False, True]
    assert len(text.strip()) > 5
    assert read_metrics(folder / "run-4" / "metrics.jsonl")[2]["profile/exchange_percent"] > 0
    assert (folder / "run-4" / "profile" / "trace.json.gz").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["", "muon"])
def test_sums_of_three_ranks_differ_by_rounding_alone(folder, found, kind):
    (alone,) = found[1]
    for rank in range(3):
        updates = json.loads((folder / f"{rank}-of-3.json").read_text())
        assert len(updates) == 4
        for name in ("exact", "sharded"):
            for ours, one in zip(updates[f"{name}, {kind}"], alone["six micro-batches"][f"exact, {kind}"], strict=True):
                # Loss and norm: of the latter the first steps clip.
                assert [float.fromhex(x) for x in ours] == pytest.approx([float.fromhex(x) for x in one], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["heads, ", "keys, sharded, "])
def test_shared_sequences_differ_by_rounding_alone(found, name):
    """Other dropout masks would make a larger difference; test_context.py compares what each row gets."""
    (alone,) = found[1]
    exact = alone["exact, "]
    expected = [float.fromhex(loss) for loss, _ in exact["updates"]]
    validation = float.fromhex(exact["validation"])
    for rank in found[4]:
        assert [float.fromhex(loss) for loss, _ in rank[name]["updates"]] == pytest.approx(expected, abs=1e-4)
        assert float.fromhex(rank[name]["validation"]) == pytest.approx(validation, abs=1e-4)


def test_torchs_adamw_keeps_its_update_of_a_cpus_shards_where_it_has_options_that_ours_lacks():
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        shard = torch.nn.Parameter(DTensor.from_local(torch.zeros(3, 3), mesh, [Shard(0)]))
        several: list[dict[str, Any]] = [{}, {"maximize": True}, {"amsgrad": True}]
        for options in several:
            optimizer = torch.optim.AdamW([shard], fused=True, **options)
            assert (with_bits_of_wholes(optimizer) is optimizer) == bool(options)
    finally:
        dist.destroy_process_group()
