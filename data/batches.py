"""Batches as a pure function of (seed, step, micro-step, rank).

A window is seq_len + 1 successive tokens: the inputs and, shifted by one, the targets. An epoch cuts the tokens
into n windows side by side, from a random offset on, and visits them in a random order:

    sequence g of a run  ->  epoch e = g // n,  window (offset_e + seq_len * order_e[g % n])

Sequences are numbered over the whole run, across micro-batches and ranks. So the way a global batch is cut does not
change its content, and a step in mid-epoch does not depend on the steps before it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor

from data.errors import DataError


class Batch(NamedTuple):
    """A micro-batch. Sources make it on the CPU, with tokens in the small type in which they are stored.

    inputs           (B, T) int64
    targets          (B, T) int64: the token after each input
    document_starts  (B, T) int32: for each input the position in its row at which its document begins; None where
                     attention does not separate documents
    learned          0-dim float32, only with document_starts: the sum of the losses is divided by it. It is the mean
                     number of targets to learn in the micro-batches of the step; None: the targets of this one
    """

    inputs: Tensor
    targets: Tensor
    document_starts: Tensor | None = None
    learned: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """The batch of function(x) for each of its tensors x."""
        return Batch(*(function(tensor) for tensor in self.tensors()))

    def widened(self, move: Callable[[Tensor], Tensor] = lambda x: x) -> Batch:
        """The batch with int64 tokens, whose tensors `move` takes to the device before they grow."""
        moved = self.map(move)
        return moved._replace(inputs=moved.inputs.long(), targets=moved.targets.long())

    def beginning(self, sequences: int, tokens: int) -> Batch:
        """The first tokens of the first sequences."""
        return self._replace(learned=None).map(lambda tensor: tensor[:sequences, :tokens].contiguous())

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that are not None, in the order of the fields."""
        return tuple(tensor for tensor in self if tensor is not None)

    def pieces(self) -> list[int]:
        """The lengths of the pieces into which documents cut the rows; without documents, that of each row."""
        if self.document_starts is None:
            return [len(row) for row in self.inputs]
        return [n for row in self.document_starts for n in row.unique(return_counts=True)[1].tolist()]


def from_arrays(*arrays: np.ndarray | None) -> Batch:
    """The batch of these fields."""
    return Batch(*(None if x is None else torch.from_numpy(x) for x in arrays))  # type: ignore[arg-type]


@dataclass(frozen=True)
class GlobalBatch:
    """The sequences of a step, and one rank's share of them in each micro-step.

    The sequences are numbered by micro-step, and within a micro-step by rank. A sequence's number determines its tokens
    and its dropout masks, and only `first_sequence` computes it: so a sequence has the same masks on every rank and in
    every micro-batch.

    batch_size   sequences of a micro-batch on one rank, B
    rank, ranks  this rank, and the number of ranks that have different sequences
    micro_steps  micro-batches of a step on one rank
    """

    batch_size: int
    rank: int = 0
    ranks: int = 1
    micro_steps: int = 1

    @property
    def sequences(self) -> int:
        """Of the whole step."""
        return self.batch_size * self.ranks * self.micro_steps

    def first_sequence(self, micro_step: int) -> int:
        """The number of this rank's first sequence in a micro-step; its others follow."""
        return (micro_step * self.ranks + self.rank) * self.batch_size

    def numbers(self, step: int, micro_step: int) -> np.ndarray:
        """The numbers of this rank's sequences in a micro-step, counted over the run: (B,) int64."""
        return step * self.sequences + self.first_sequence(micro_step) + np.arange(self.batch_size)


class Source(ABC):
    """The training batches of one rank, from a text, conversations or a task.

    global_batch  the sequences of a step, and this rank's
    """

    global_batch: GlobalBatch

    def stored(self, step: int, micro_step: int = 0) -> Batch:
        """A micro-batch, with its tokens as they are stored."""
        return self.stored_of(self.global_batch.numbers(step, micro_step))

    @abstractmethod
    def stored_of(self, sequences: np.ndarray) -> Batch:
        """Sequences by their numbers, which are counted over the run."""


class Batches(Source):
    """The training batches of one rank, from a text.

    tokens        1-D unsigned
    seq_len       tokens of a sequence, T
    global_batch  the sequences of a step, and this rank's
    seed          of the order
    documents     where each document begins, 1-D, for attention that separates them; None: it does not

    Raises DataError when the tokens do not fill one window.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        seq_len: int,
        global_batch: GlobalBatch,
        seed: int,
        documents: np.ndarray | None = None,
    ):
        self.documents = documents
        self.windows = _windows(tokens, seq_len, "training")
        self.seq_len, self.global_batch, self.seed = seq_len, global_batch, seed
        # The offset moves within the tokens of one window; a very short text has one window and no offset.
        self.n_windows = max(1, (len(tokens) - seq_len) // seq_len)
        self.n_offsets = min(seq_len, len(self.windows) - (self.n_windows - 1) * seq_len)
        self._epoch = lru_cache(maxsize=2)(self._draw_epoch)  # two, because a batch may be part of both

    def start(self, epoch: int, place: int) -> int:
        """The first token of the window at a place of an epoch's order."""
        offset, order = self._epoch(epoch)
        return offset + self.seq_len * int(order[place])

    def stored_of(self, sequences: np.ndarray) -> Batch:
        starts = np.array([self.start(*divmod(number, self.n_windows)) for number in sequences.tolist()])
        return windows_at(starts, self.windows, self.documents)

    def _draw_epoch(self, epoch: int) -> tuple[int, np.ndarray]:
        draws = random_draws(self.seed, epoch, self.n_windows + 1)
        return int(draws[0] % np.uint64(self.n_offsets)), np.argsort(draws[1:], kind="stable")


class MixedBatches(Source):
    """The training batches of one rank, from several texts: data.path=[a,b] data.weights=[3,1].

    The sequences of a run repeat a pattern of sum(weights) corpora, here a a b a, in which each corpus is spread
    evenly. Each corpus counts its own sequences, so which tokens a step has depends on the seed and the step alone.

    parts    of each text, with the same sequences in a step
    weights  of each text: sequences in a period of the pattern
    """

    def __init__(self, parts: Sequence[Batches], weights: Sequence[int]) -> None:
        self.parts, self.weights, self.global_batch = parts, weights, parts[0].global_batch
        self.pattern = pattern(weights)

    def stored_of(self, sequences: np.ndarray) -> Batch:
        rows = []
        for number in sequences.tolist():
            period, place = divmod(number, len(self.pattern))
            corpus = self.pattern[place]
            of_corpus = period * self.weights[corpus] + self.pattern[:place].count(corpus)
            rows.append(self.parts[corpus].stored_of(np.array([of_corpus])).tensors())
        return Batch(*map(torch.cat, zip(*rows, strict=True)))


def pattern(weights: Sequence[int]) -> list[int]:
    """The corpora of one period, by their numbers: the k-th sequence of a corpus stands at (k + 1/2) / weight."""
    places = [(Fraction(2 * k + 1, 2 * weight), n) for n, weight in enumerate(weights) for k in range(weight)]
    return [n for _, n in sorted(places)]


def random_draws(seed: int, epoch: int, count: int) -> np.ndarray:
    """Random integers for the order of an epoch: (count,) uint64."""
    # Philox's raw output is the same on every platform and in every version of numpy, which shuffle() is not.
    return np.random.Philox(np.random.SeedSequence((seed, epoch))).random_raw(count)


def document_starts(documents: np.ndarray | None, starts: np.ndarray, seq_len: int) -> np.ndarray | None:
    """For each token of windows that begin at `starts`, (B,): where in its window its document begins, (B, T) int32.

    documents  where each document of the split begins; None if attention does not separate them: the result is None too

    A document that began before the window begins at 0 in it.
    """
    if documents is None:
        return None
    rows = np.zeros((len(starts), seq_len), np.int32)
    for row, start in zip(rows, starts, strict=True):
        first, last = np.searchsorted(documents, (start, start + seq_len))
        begins = np.asarray(documents[first:last]) - start
        row[begins] = begins
        np.maximum.accumulate(row, out=row)
    return rows


def eval_batches(
    tokens: np.ndarray,
    seq_len: int,
    batch_size: int,
    count: int,
    span: int | None = None,
    documents: np.ndarray | None = None,
) -> list[Batch]:
    """At most `count` full batches of windows that never overlap, the same in every run.

    span       tokens of a piece of text, a multiple of seq_len: pieces are evenly spaced, and each is cut into windows
               side by side. Batches of equally many tokens then hold the same text at every seq_len. None: one window
    documents  as `Batches` has them

    On the CPU; a text of fewer than batch_size windows gives one smaller batch.
    Raises DataError when the tokens do not fill one window, or one piece.
    """
    windows = _windows(tokens, seq_len, "validation")
    span = span or seq_len
    if len(tokens) <= span:
        raise DataError(
            f"the validation split has {len(tokens)} tokens and a piece takes training.eval_span + 1 = {span + 1}; "
            "lower training.eval_span, give more text, or change data.val_fraction."
        )
    windows_in_piece = span // seq_len
    n = min(count * batch_size, (len(tokens) - 1) // span * windows_in_piece)
    n = n // batch_size * batch_size or n
    pieces = -(-n // windows_in_piece)
    first = np.arange(pieces) * (len(tokens) - span - 1) // max(pieces - 1, 1)
    starts = (first[:, None] + seq_len * np.arange(windows_in_piece)).ravel()[:n]
    of_batches = np.split(starts, range(batch_size, n, batch_size))
    return [windows_at(part, windows, documents).widened() for part in of_batches]


def windows_at(starts: np.ndarray, windows: np.ndarray, documents: np.ndarray | None) -> Batch:
    """The windows that begin at `starts`, (B,)."""
    seq_len = windows.shape[1] - 1
    return from_arrays(windows[starts, :-1], windows[starts, 1:], document_starts(documents, starts, seq_len))


def _windows(tokens: np.ndarray, seq_len: int, split: str) -> np.ndarray:
    """Every window of the tokens, overlapping ones included, as a view: (len(tokens) - seq_len, seq_len + 1). Raises
    DataError where the tokens of the split do not fill one."""
    if len(tokens) <= seq_len:
        raise DataError(
            f"the {split} split has {len(tokens)} tokens and a window takes seq_len + 1 = {seq_len + 1}; "
            "lower seq_len, give more text, raise data.max_tokens if it is set, or change data.val_fraction."
        )
    return sliding_window_view(tokens, seq_len + 1)
