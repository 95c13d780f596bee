"""Tasks: their answers follow from the inputs, and a sequence is a function of its number."""

import numpy as np
import pytest

from data.batches import GlobalBatch
from data.errors import DataError
from data.tasks import (
    IGNORED,
    TASKS,
    TRAINING,
    VALIDATION,
    AssociativeRecall,
    Counting,
    Needle,
    Sequence,
    TaskBatches,
    drawn,
)

LENGTHS = (32, 64, 200)


def solve_mqar(inputs: list[int], i: int) -> tuple[int, int]:
    """The value after the first occurrence of the key, and its position."""
    first = inputs.index(inputs[i])
    return inputs[first + 1], first + 1


def solve_induction(inputs: list[int], i: int) -> tuple[int, int]:
    """The token after the last occurrence of the longest run of tokens that ends here."""
    for n in range(i, 0, -1):
        for end in range(i - 1, n - 2, -1):
            if inputs[end - n + 1 : end + 1] == inputs[i - n + 1 : i + 1]:
                return inputs[end + 1], end + 1
    raise AssertionError


def solve_needle(inputs: list[int], i: int) -> tuple[int, int]:
    (place,) = [at for at, token in enumerate(inputs) if 0 < token <= Needle.NEEDLES]
    return inputs[place], place


def solve_counting(inputs: list[int], i: int) -> tuple[int, int]:
    """The tokens back to one that differs."""
    first = i
    while first and inputs[first - 1] == inputs[i]:
        first -= 1
    return Counting.LETTERS + i - first, first


SOLVERS = {
    "mqar": solve_mqar,
    "induction": solve_induction,
    "needle": solve_needle,
    "counting": solve_counting,
}


def sequences(name: str, T: int, n: int = 40, seed: int = 3) -> list[Sequence]:
    return drawn(TASKS[name], T, seed, TRAINING, range(n))


@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("name", SOLVERS)
def test_the_answers_follow_from_the_inputs_and_the_distance_leads_to_what_decides_them(name, T):
    for inputs, targets, distance in sequences(name, T, n=3):
        asked = np.flatnonzero(targets != IGNORED)
        assert len(asked)
        assert not distance[targets == IGNORED].any()
        for i in asked:
            answer, place = SOLVERS[name](inputs.tolist(), int(i))
            assert (targets[i], i - distance[i]) == (answer, place)


@pytest.mark.parametrize("name", TASKS)
def test_tokens_fit_the_vocabulary_and_every_row_has_as_many_answers(name):
    task = TASKS[name]
    for T in LENGTHS:
        found = sequences(name, T)
        assert len({int((s.targets != IGNORED).sum()) for s in found}) == 1
        for s in found:
            assert s.inputs.shape == s.targets.shape == s.distance.shape == (T,)
            assert 0 <= s.inputs.min() <= s.inputs.max() < task.vocab_size
            assert s.targets.max() < task.vocab_size
            assert (s.distance[s.targets != IGNORED] >= 0).all()


@pytest.mark.parametrize("name", TASKS)
def test_always_giving_the_commonest_answer_is_about_chance(name):
    answers = np.concatenate([s.targets[s.targets != IGNORED] for s in sequences(name, 64, n=400)])
    assert np.bincount(answers).max() / len(answers) < 2.5 * TASKS[name].chance


@pytest.mark.parametrize("name", TASKS)
def test_a_sequence_is_a_function_of_its_number_seed_and_split(name):
    def inputs(seed, split, number):
        (one,) = drawn(TASKS[name], 64, seed, split, range(number, number + 1))
        return one.inputs.tolist()

    assert inputs(1, TRAINING, 5) == inputs(1, TRAINING, 5)
    assert inputs(1, TRAINING, 5) not in [inputs(1, TRAINING, 6), inputs(2, TRAINING, 5), inputs(1, VALIDATION, 5)]


def test_the_sequences_are_the_same_on_every_platform():
    (one,) = drawn(AssociativeRecall(), 32, 7, TRAINING, range(1))
    assert one.inputs.tolist()[:8] == EXPECTED


EXPECTED = [9, 24, 13, 29, 9, 24, 0, 0]


def test_a_micro_batch_has_the_sequences_of_its_step():
    task = AssociativeRecall()
    batch = TaskBatches(task, 32, GlobalBatch(2, rank=1, ranks=3), seed=1).stored(4)
    inputs, targets, _ = zip(*drawn(task, 32, 1, TRAINING, range(26, 28)), strict=True)
    assert (batch.inputs.tolist(), batch.targets.tolist()) == (np.stack(inputs).tolist(), np.stack(targets).tolist())


def test_a_sequence_that_is_too_short_is_refused():
    with pytest.raises(DataError, match="data=mqar needs seq_len=32 or more, and seq_len=16 is less"):
        TaskBatches(AssociativeRecall(), 16, GlobalBatch(1), seed=1)
