"""What a run reads: the training batches of this rank, and the windows for the validation loss.

Conversations are packed whole into rows, and their answers alone are learned. They are placed from the longest to the
shortest, each into the row with the least room that is enough (best fit decreasing: Johnson 1974). Each conversation is
a document, so conversations in a row do not see each other and their order has no effect. An epoch visits every row
once, in a random order that differs between epochs:

    sequence g of a run  ->  epoch e = g // n,  row order_e[g % n]

The loss of a step is the mean over the tokens of all its answers, however micro-batches and ranks divide them.
"""

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from data.batches import Batch, Batches, GlobalBatch, MixedBatches, Source, eval_batches, from_arrays, random_draws
from data.errors import DataError
from data.options import DataConfig, Documents
from data.store import PreparedData, TokenFile
from data.tasks import IGNORED, TaskBatches, TaskData, validation_batches


class PackedRows:
    """The conversations of a split in rows of seq_len tokens.

    answers  tokens to learn in each row, (n,) int64
    """

    def __init__(self, split: TokenFile, seq_len: int, end_of_text: int, first: int = 0) -> None:
        """
        end_of_text  the token that fills a row
        first        number of the split's first conversation in its file, from 0

        Raises DataError for conversations that are longer than a row.
        """
        assert split.answers is not None
        self.split, self.marks, self.seq_len, self.end_of_text = split, split.answers, seq_len, end_of_text
        self.starts, self.stops = np.asarray(split.documents), split.stops
        lengths = self.stops - self.starts - 1  # inputs; the last token is a target alone
        if len(too_long := np.flatnonzero(lengths > seq_len)):
            raise DataError(
                f"conversations of data.path are longer than seq_len={seq_len} ({len(too_long)}, the first is number "
                f"{first + too_long[0] + 1}); set seq_len={lengths.max()}, or shorten or remove them."
            )
        self.rows = best_fit(lengths, seq_len)
        learned = np.concatenate([[0], np.cumsum(self.marks, dtype=np.int64)])
        of_conversation = learned[self.stops] - learned[self.starts + 1]
        self.answers = np.array([of_conversation[row].sum() for row in self.rows])

    def stored(self, numbers: np.ndarray, learned: float) -> Batch:
        """The rows with these numbers.

        learned  as in a Batch
        """
        shape = len(numbers), self.seq_len
        inputs = np.full(shape, self.end_of_text, self.split.tokens.dtype)
        targets, begins = np.full(shape, IGNORED, np.int32), np.zeros(shape, np.int32)
        for i, number in enumerate(numbers):
            at = 0
            for conversation in self.rows[number]:
                start, stop = self.starts[conversation], self.stops[conversation]
                tokens, answers = self.split.tokens[start:stop], self.marks[start:stop]
                places = slice(at, at + stop - start - 1)
                inputs[i, places], begins[i, places] = tokens[:-1], at
                targets[i, places] = np.where(answers[1:], tokens[1:].astype(np.int32), IGNORED)
                at = places.stop
            begins[i, at:] = at
        return from_arrays(inputs, targets, begins, np.array(learned, np.float32))


def best_fit(lengths: np.ndarray, room: int) -> list[list[int]]:
    """Items in rows of `room`: for each row the indices of its items, whose lengths are at most `room` each."""
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(room + 1)]  # rows by the room left in them
    some = 0  # bit r: there is a row with r left
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        enough = some >> length
        if enough:
            left = length + (enough & -enough).bit_length() - 1
            row = with_room[left].pop()
            if not with_room[left]:
                some ^= 1 << left
        else:
            left, row = room, len(rows)
            rows.append([])
        rows[row].append(item)
        with_room[left - length].append(row)
        some |= 1 << (left - length)
    return rows


class ChatBatches(Source):
    """The training batches of one rank, from packed conversations."""

    def __init__(self, rows: PackedRows, global_batch: GlobalBatch, seed: int) -> None:
        self.rows, self.global_batch = rows, global_batch
        self._order = lru_cache(maxsize=2)(
            lambda epoch: np.argsort(random_draws(seed, epoch, len(rows.rows)), kind="stable")
        )

    def numbers(self, sequences: np.ndarray) -> np.ndarray:
        """The rows of sequences, which are numbered over the run."""
        places = (divmod(number, len(self.rows.rows)) for number in sequences.tolist())
        return np.array([self._order(epoch)[place] for epoch, place in places])

    def stored_of(self, sequences: np.ndarray) -> Batch:
        cut = self.global_batch
        first = sequences[0] // cut.sequences * cut.sequences  # of the step
        learned = max(1, self.rows.answers[self.numbers(first + np.arange(cut.sequences))].sum())
        return self.rows.stored(self.numbers(sequences), learned / (cut.ranks * cut.micro_steps))


def chat_windows(rows: PackedRows, batch_size: int, count: int) -> list[Batch]:
    """At most `count` batches of rows that are evenly spread over all, the same in every run, on the CPU."""
    n = min(count * batch_size, len(rows.rows))
    n = n // batch_size * batch_size or n
    numbers = np.arange(n) * len(rows.rows) // n
    of_batches = np.split(numbers, range(batch_size, n, batch_size))
    learned = max(1, rows.answers[numbers].sum()) / len(of_batches)
    return [rows.stored(part, learned).widened() for part in of_batches]


Data = PreparedData | TaskData


@dataclass(frozen=True)
class Feed:
    """
    data     that they are of
    batches  of this rank, for training
    windows  batches for the validation loss
    mixture  of several corpora, the weight and the windows of each, by its path
    """

    data: Data
    batches: Source
    windows: list[Batch]
    mixture: dict[str, tuple[int, list[Batch]]] = field(default_factory=dict)


def feed(
    data: Data, options: DataConfig, seq_len: int, share: GlobalBatch, seed: int, count: int, span: int | None
) -> Feed:
    """The batches of a run.

    seq_len  tokens of a sequence, T
    share    the sequences of a step, and this rank's
    seed     of their order
    count    batches for the validation loss
    span     tokens of a piece of validation text, as in `eval_batches`

    Raises DataError where a split does not fill a window.
    """
    if isinstance(data, TaskData):
        windows = validation_batches(data.task, seq_len, share.batch_size, count)
        return Feed(data, TaskBatches(data.task, seq_len, share, seed), windows)
    if data.train.answers is not None:
        train = PackedRows(data.train, seq_len, data.tokenizer.eot_token)
        val = PackedRows(data.val, seq_len, data.tokenizer.eot_token, len(data.train.documents))
        return Feed(data, ChatBatches(train, share, seed), chat_windows(val, share.batch_size, count))
    separates = options.documents is not Documents.ignore
    sources, windows_of = [], []
    for text in data.parts.values() or [data]:
        of_train, of_val = (split.documents if separates else None for split in (text.train, text.val))
        sources.append(Batches(text.train.tokens, seq_len, share, seed, of_train))
        windows_of.append(eval_batches(text.val.tokens, seq_len, share.batch_size, count, span, of_val))
    if not data.parts:
        return Feed(data, sources[0], windows_of[0])
    weights = options.mixture
    mixture = {path: (weights[path], windows) for path, windows in zip(data.parts, windows_of, strict=True)}
    windows = [window for of_text in windows_of for window in of_text]
    return Feed(data, MixedBatches(sources, list(weights.values())), windows, mixture)
