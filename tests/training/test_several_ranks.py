"""One, two and four ranks are the same training: losses, norms and weights, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.training.test_ranks import free_port
from training.exchange import Counter

ROOT = Path(__file__).parents[2]
Found = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each rank of 1, 2 and 4 found."""
    folder, port = tmp_path_factory.mktemp("ranks"), free_port()
    command = [sys.executable, "-m", "tests.training.several_ranks", str(folder), port]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen(command, cwd=ROOT, env=environment | {"RANK": str(rank)}) for rank in range(4)]
    assert [rank.wait(timeout=240) for rank in ranks] == [0, 0, 0, 0]
    return {
        size: [json.loads((folder / f"{rank}-of-{size}.json").read_text()) for rank in range(size)]
        for size in (1, 2, 4)
    }


def local_tree(terms: list[Tensor]) -> Tensor:
    """((t0 + t1) + (t2 + t3)) + ... by recursion: the left branch is the largest power of two that leaves a right."""
    if len(terms) == 1:
        return terms[0]
    middle = 1 << (len(terms) - 1).bit_length() - 1
    return local_tree(terms[:middle]) + local_tree(terms[middle:])


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13])
def test_terms_that_come_one_by_one_are_added_in_a_tree(count: int) -> None:
    terms = list(torch.randn(count, 1000, generator=torch.Generator().manual_seed(count)))
    counter = Counter()
    for term in terms:
        counter.add(term.clone())
    assert torch.equal(counter.finish(), local_tree(terms))


def test_any_number_of_ranks_has_the_same_losses_norms_and_validation(found: Found) -> None:
    (alone,) = found[1]
    assert len({loss for loss, _ in alone["exact"]["updates"]}) == 8
    for rank in (*found[2], *found[4]):
        assert rank["exact"] == alone["exact"]


def test_an_order_that_the_library_chooses_differs_by_rounding_alone(found: Found) -> None:
    (alone,) = found[1]
    expected = [float.fromhex(loss) for loss, _ in alone["exact"]["updates"]]
    for rank in (*found[2], *found[4]):
        losses = [float.fromhex(loss) for loss, _ in rank["any"]["updates"]]
        assert losses == pytest.approx(expected, abs=1e-4)
