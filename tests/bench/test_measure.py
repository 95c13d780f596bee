"""Times that can be compared, and the environment that is recorded with them."""

import time
from functools import partial
from itertools import pairwise

import pytest
import torch

from bench.attention.__main__ import main as attention
from bench.attention.host import main as host
from bench.measure import MIN_SAMPLES, Timing, interleaved
from bench.record import RESULTS
from bench.several_gpus import main as several_gpus
from bench.train_step import main as train_step

CPU = torch.device("cpu")


def test_candidates_take_turns_in_changing_order():
    order: list[str] = []
    timings = interleaved({name: partial(partial, order.append, name) for name in "abcd"}, CPU, seconds=1.0)
    assert all(isinstance(timing, Timing) for timing in timings.values())
    timed = order[8:]  # after two calls each that decide how often to measure
    for name in "abcd":
        assert len({x for x, y in pairwise(timed) if x != y == name}) > 1


def test_preparation_is_not_timed():
    def prepare():
        time.sleep(0.02)
        return lambda: None

    timing = interleaved({"a": prepare}, CPU, seconds=0.01)["a"]
    assert isinstance(timing, Timing)
    assert timing.samples == MIN_SAMPLES
    assert timing.ms < 1


def test_one_that_fails_drops_out_and_the_others_go_on():
    def fail():
        raise torch.OutOfMemoryError("too much")

    timings = interleaved({"a": lambda: fail, "b": lambda: lambda: None}, CPU, seconds=0.001)
    assert isinstance(timings["a"], torch.OutOfMemoryError)
    assert isinstance(timings["b"], Timing)


def test_one_outlier_does_not_move_the_result():
    timing = Timing.of([1.0, 1.1, 0.9, 1.0, 50.0])
    assert (timing.ms, timing.samples) == (1.0, 5)
    assert 0.9 <= timing.low <= timing.ms <= timing.high <= 1.1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("main", [attention, host, several_gpus, train_step])
def test_without_a_gpu_a_benchmark_says_so_once_and_leaves_nothing(main, capsys):
    before = sorted(RESULTS.iterdir())
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert capsys.readouterr().err.count("needs a CUDA GPU, and torch finds none here") == 1
    assert sorted(RESULTS.iterdir()) == before
