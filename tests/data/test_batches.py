"""A batch is a function of the step, however it is divided or fetched, and whatever came before."""

import threading
import time

import numpy as np
import pytest
import torch

from data.batches import Batch, Batches, GlobalBatch, document_starts, eval_batches
from data.errors import DataError
from data.prefetcher import Prefetcher

TOKENS = np.arange(1003, dtype=np.uint16)


def make(tokens=TOKENS, seq_len=16, batch_size=4, seed=1, documents=None, **cut):
    return Batches(tokens, seq_len, GlobalBatch(batch_size, **cut), seed, documents)


def epoch_starts(batches: Batches, epoch: int) -> np.ndarray:
    """The starts of an epoch's windows, read one sequence at a time."""
    n = batches.n_windows
    return np.concatenate([batches.stored(step).inputs[:, 0] for step in range(epoch * n, (epoch + 1) * n)])


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_targets_follow_the_inputs_and_every_token_type_becomes_int64(dtype):
    top = np.iinfo(dtype).max
    inputs, targets, *_ = make(top - np.arange(250, dtype=dtype)).stored(3).widened()
    assert inputs.shape == targets.shape == (4, 16)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs - 1, targets)  # the tokens count down
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert top - 250 < inputs.min() < inputs.max() <= top


@pytest.mark.parametrize("length", [17, 18, 32, 33, 34, 48, 49, 200, 1003])
@pytest.mark.parametrize("epoch", [0, 1, 7])
def test_an_epoch_visits_every_window_once(length, epoch):
    starts = np.sort(epoch_starts(make(TOKENS[:length], batch_size=1), epoch))
    assert len(starts) >= (length - 1) // 16 - 1  # all but what the offset moves in
    assert np.array_equal(np.diff(starts), np.full(len(starts) - 1, 16))  # side by side: no token twice, none left out
    assert starts[0] >= 0
    assert starts[-1] + 16 + 1 <= length


def test_epochs_differ_in_order_and_in_phase():
    batches = make(batch_size=1)
    epochs = [epoch_starts(batches, epoch) for epoch in range(40)]
    assert len({tuple(starts) for starts in epochs}) == 40
    assert len({starts.min() for starts in epochs}) > 10
    assert max(starts.min() for starts in epochs) <= 15


@pytest.mark.parametrize("cut", [(12, 2, 1), (12, 1, 2), (4, 2, 3), (4, 3, 2), (1, 8, 3), (1, 1, 24)])
def test_a_step_is_the_same_however_it_is_cut_into_micro_batches_and_ranks_and_after_any_other(cut):
    batch_size, ranks, micro_steps = cut
    together = make(batch_size=24)
    for step in (1000, 0, 5, 1, 2):  # 61 windows an epoch: steps 2 and 5 straddle two of them
        parts = [
            make(batch_size=batch_size, rank=rank, ranks=ranks, micro_steps=micro_steps).stored(step, micro_step).inputs
            for micro_step in range(micro_steps)
            for rank in range(ranks)
        ]
        assert np.array_equal(np.concatenate(parts), together.stored(step).inputs)


def test_the_order_is_the_same_on_every_platform():
    assert not np.array_equal(make(seed=1).stored(0).inputs, make(seed=2).stored(0).inputs)
    batches = make(seed=1337, batch_size=8)
    assert batches.stored(0).inputs[:, 0].tolist() == [315, 187, 123, 635, 843, 427, 43, 171]
    assert batches.stored(100).inputs[:, 0].tolist() == [150, 102, 870, 326, 374, 342, 598, 454]


def test_too_few_tokens_for_a_window_say_so():
    with pytest.raises(DataError, match=r"the training split has 16 tokens .* seq_len \+ 1 = 17; lower seq_len"):
        make(TOKENS[:16])
    with pytest.raises(DataError, match=r"the validation split has 16 tokens .* seq_len \+ 1 = 17; lower seq_len"):
        eval_batches(TOKENS[:16], 16, 4, 2)


@pytest.mark.parametrize(
    ("length", "count", "sizes"), [(1003, 5, [4] * 5), (1003, 99, [4] * 15), (60, 2, [3]), (17, 2, [1])]
)
def test_evaluation_windows_are_evenly_spaced_and_do_not_overlap(length, count, sizes):
    batches = eval_batches(TOKENS[:length], 16, 4, count)
    assert [len(inputs) for inputs, *_ in batches] == sizes
    assert all(torch.equal(inputs + 1, targets) for inputs, targets, *_ in batches)
    starts = torch.cat([inputs[:, 0] for inputs, *_ in batches])
    gaps = starts.diff()
    assert starts[0] == 0
    if len(starts) > 1:
        assert starts[-1] == length - 17
        assert gaps.min() >= 16
        assert gaps.max() - gaps.min() <= 1


def target_positions(length, seq_len, batch_size, count, span):
    """The positions, in order, of the evaluation's targets in a text of `length` tokens."""
    batches = eval_batches(np.arange(length, dtype=np.uint32), seq_len, batch_size, count, span)
    return torch.cat([targets.flatten() for _, targets, *_ in batches]).tolist()


@pytest.mark.parametrize("length", [8193, 30_000, 123_457])  # one piece, three, and more than `count`
def test_with_a_span_every_length_is_evaluated_on_the_same_text(length):
    longest = target_positions(length, 8192, 1, 4, span=8192)
    assert len(longest) == len(set(longest)) == 8192 * min(4, (length - 1) // 8192)
    assert longest[-1] == length - 1  # the pieces reach from the first token to the last
    for seq_len in (512, 1024, 2048, 4096):
        assert target_positions(length, seq_len, 8192 // seq_len, 4, span=8192) == longest
    assert set(target_positions(30_000, 512, 16, 4, span=None)) != set(target_positions(30_000, 8192, 1, 4, span=None))


def test_without_a_span_windows_are_where_they_always_were():
    for span in (None, 16):
        starts = [inputs[:, 0].tolist() for inputs, *_ in eval_batches(TOKENS, 16, 4, 2, span)]
        assert starts == [[0, 140, 281, 422], [563, 704, 845, 986]]


def test_a_span_beyond_the_validation_text_is_refused():
    with pytest.raises(DataError, match=r"validation split has 64 tokens .*eval_span \+ 1 = 65; lower training\."):
        eval_batches(TOKENS[:64], 16, 4, 2, span=64)
    assert len(eval_batches(TOKENS[:65], 16, 4, 2, span=64)) == 1


def test_an_error_of_the_thread_reaches_the_consumer():
    class Broken(Batches):
        def stored(self, step, micro_step=0):
            if step == 2:
                raise OSError("the file went away")
            return super().stored(step, micro_step)

    with Prefetcher(Broken(TOKENS, 16, GlobalBatch(4), 1), "cpu") as prefetcher:
        next(prefetcher), next(prefetcher)
        for _ in range(2):
            with pytest.raises(OSError, match="the file went away"):
                next(prefetcher)


def test_the_prefetcher_runs_ahead_by_its_depth_and_no_further():
    asked: list[int] = []

    class Watched(Batches):
        def stored(self, step, micro_step=0):
            asked.append(step)
            return super().stored(step, micro_step)

    with Prefetcher(Watched(TOKENS, 16, GlobalBatch(4), 1), "cpu") as prefetcher:
        next(prefetcher)
        deadline = time.monotonic() + 10
        while len(asked) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        assert asked == [0, 1, 2, 3]


def test_closing_ends_the_thread_and_the_iteration():
    before = threading.active_count()
    prefetcher = Prefetcher(make(), "cpu")
    next(prefetcher)
    start = time.monotonic()
    prefetcher.close()
    prefetcher.close()
    assert time.monotonic() - start < 2
    assert threading.active_count() == before
    assert list(prefetcher) == []


DOCUMENTS = np.array([0, 5, 7, 40, 41, 120, 130, 1000])


def document_of(position: int) -> int:
    """Where the document that holds a position begins."""
    return max(int(start) for start in DOCUMENTS if start <= position)


def test_each_input_comes_with_the_start_of_its_document():
    batches = make(documents=DOCUMENTS)
    for step in range(8):
        inputs, _, starts, _ = batches.stored(step).widened()
        assert (starts.shape, starts.dtype) == ((4, 16), torch.int32)
        for row, row_starts in zip(inputs.tolist(), starts.tolist(), strict=True):  # the tokens count up from 0
            assert row_starts == [max(document_of(token) - row[0], 0) for token in row]


def test_documents_are_the_same_in_evaluation_and_from_the_prefetcher():
    batches = make(documents=DOCUMENTS, micro_steps=2)
    with Prefetcher(batches, "cpu", start_step=3) as prefetched:
        for step, micro_step in ((3, 0), (3, 1), (4, 0)):
            assert all(
                map(torch.equal, next(prefetched).tensors(), batches.stored(step, micro_step).widened().tensors())
            )
    for inputs, _, starts, _ in eval_batches(TOKENS, 16, 4, 3, documents=DOCUMENTS):
        assert starts is not None
        first = inputs[:, :1]
        begins = torch.tensor([[document_of(token) for token in row] for row in inputs.tolist()])
        assert torch.equal(starts, (begins - first).clamp(min=0).int())


def test_pieces_are_what_documents_leave_of_a_row():
    starts = document_starts(DOCUMENTS, np.array([0, 36, 200]), 16)
    assert starts is not None
    rows = torch.zeros(3, 16)
    assert Batch(rows, rows, torch.from_numpy(starts)).pieces() == [5, 2, 9, 4, 1, 11, 16]
    assert make(batch_size=2).stored(0).pieces() == [16, 16]
