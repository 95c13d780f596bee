"""What a model's attention can do, measured with every evaluation: accuracy on recall tasks, and loss by position.

`probes=[mqar,position_loss]` chooses by name. Each gives metrics with every evaluation and, after training, the details
that a figure needs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from data.tasks import IGNORED, TASKS, VALIDATION, VALIDATION_SEED, Task, check_length, drawn
from model.gpt import GPT
from model.options import Positions
from model.positions import position_tables
from recipe.errors import UserError

BEYOND = (1, 2, 4, 8)  # times the trained length
TOKENS = 1 << 14  # of a task, at each length
FEWEST = 64  # sequences of a task
AT_ONCE = 1 << 13  # tokens of a task
WINDOWS = 64  # of a text
BINS = 24  # of positions, as wide as the logarithm of the position


# Takes what is measured and how many steps it has; yields a function of how many more steps are done.
Watch = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


class Recall(ABC):
    """
    name     as in probes=[<name>]
    longest  no longer inputs are measured than this, in tokens; None: BEYOND alone limits them
    watch    shows the progress
    """

    name: str
    longest: int | None = None
    watch: Watch = staticmethod(lambda what, steps: nullcontext(lambda done: None))

    @abstractmethod
    def measure(self, model: GPT) -> dict[str, float]:
        """Metrics of a model in evaluation mode, by their names in metrics.jsonl."""

    @abstractmethod
    def details(self, model: GPT) -> tuple[dict[str, float], dict[str, Any]]:
        """After training: metrics at longer inputs, and what summary.json has under probes.<name>."""


def lengths_for(model: GPT, trained: int, longest: int | None = None) -> list[int]:
    """The trained length and, unless positions are learned, multiples of it up to `longest`."""
    if model.config.positions is Positions.learned:
        return [trained]
    return [trained, *(times * trained for times in BEYOND[1:] if longest is None or times * trained <= longest)]


@contextmanager
def stretched(model: GPT, seq_len: int) -> Iterator[None]:
    """Within the block, the model takes inputs of `seq_len` tokens, such as with the angles of their rotary positions.

    Learned positions have no weights beyond the trained length.
    """
    before, tables = model.seq_len, model.tables
    if seq_len > before:
        model.seq_len, model.tables = seq_len, position_tables(model.config, seq_len).to(model.wte.weight.device)
    try:
        yield
    finally:
        model.seq_len, model.tables = before, tables


class TaskRecall(Recall):
    """Accuracy on a task, by length and by the distance to the token that determines the answer.

    Sequences that no training draws, with the tokens of a task as the first of the model's vocabulary.
    """

    def __init__(self, task: Task, seq_len: int) -> None:
        """seq_len  the trained length"""
        self.name, self.task, self.seq_len = task.name, task, seq_len

    def measure(self, model: GPT) -> dict[str, float]:
        right, _ = self.answers(model, self.seq_len)
        return {f"probe/{self.name}": float(right.mean())}

    def details(self, model: GPT) -> tuple[dict[str, float], dict[str, Any]]:
        lengths, answers = lengths_for(model, self.seq_len, self.longest), []
        for T in lengths:
            with stretched(model, T):
                answers.append(self.answers(model, T))
        edges = [1 << n for n in range(lengths[-1].bit_length())]
        if any((distance == 0).any() for _, distance in answers):
            edges.insert(0, 0)  # 0: the input itself determines the answer, as in counting
        metrics, table, counts = {}, [], []
        for T, (right, distance) in zip(lengths, answers, strict=True):
            if self.seq_len < T:
                metrics[f"probe/{self.name}_x{T // self.seq_len}"] = float(right.mean())
            bins = np.digitize(distance, edges) - 1
            counts.append(np.bincount(bins, minlength=len(edges)))
            table.append(np.bincount(bins, right, minlength=len(edges)) / np.maximum(counts[-1], 1))
        cells = [
            [float(a) if n else None for a, n in zip(*rows, strict=True)] for rows in zip(table, counts, strict=True)
        ]
        return metrics, {"chance": self.task.chance, "lengths": lengths, "distances": edges, "accuracy": cells}

    def answers(self, model: GPT, T: int) -> tuple[np.ndarray, np.ndarray]:
        """Whether each answer is right, and its distance: (n,) each."""
        sequences = drawn(self.task, T, VALIDATION_SEED, VALIDATION, range(max(FEWEST, TOKENS // T)))
        rows, right, distance = max(1, AT_ONCE // T), [], []
        with self.watch(f"{self.name}: sequences of {T:,} tokens", len(sequences)) as advance:
            for first in range(0, len(sequences), rows):
                inputs, targets, distances = (np.stack(x) for x in zip(*sequences[first : first + rows], strict=True))
                asked = targets != IGNORED
                right.append(self.predicted(model, inputs, asked) == targets[asked])
                distance.append(distances[asked])
                advance(len(inputs))
        return np.concatenate(right), np.concatenate(distance)

    def predicted(self, model: GPT, inputs: np.ndarray, asked: np.ndarray) -> np.ndarray:
        """The most probable token of the task after each input that is `asked`."""
        device = model.wte.weight.device
        hidden = model.hidden(torch.from_numpy(inputs).to(device))[torch.from_numpy(asked).to(device)]
        return model.logits(hidden)[:, : self.task.vocab_size].argmax(-1).cpu().numpy()


class PositionLoss(Recall):
    """The loss by position in the window: how much a model gains from its context, also beyond the trained length.

    Over windows that are spread evenly over the validation text.
    """

    name = "position_loss"

    def __init__(self, tokens: np.ndarray, seq_len: int) -> None:
        """
        tokens   of the validation split, 1-D
        seq_len  the trained length
        """
        self.tokens, self.seq_len = tokens, seq_len

    def measure(self, model: GPT) -> dict[str, float]:
        return {"probe/in_context_score": in_context_score(self.losses(model, self.seq_len))}

    def details(self, model: GPT) -> tuple[dict[str, float], dict[str, Any]]:
        lengths = [T for T in lengths_for(model, self.seq_len, self.longest) if len(self.tokens) > T]
        longest = lengths[-1] if lengths else self.seq_len
        with stretched(model, longest):
            losses = self.losses(model, longest)
        edges = np.unique(np.geomspace(1, longest + 1, BINS + 1).round().astype(int)) - 1
        means = [float(losses[low:high].mean()) for low, high in pairwise(edges)]
        metrics = {
            f"probe/loss_beyond_x{T // self.seq_len}": float(losses[before:T].mean()) for before, T in pairwise(lengths)
        }
        return metrics, {"trained": self.seq_len, "positions": edges[:-1].tolist(), "loss": means}

    def losses(self, model: GPT, T: int) -> np.ndarray:
        """The mean loss at each position of windows of T tokens: (T,)."""
        device, total = model.wte.weight.device, torch.zeros(T, dtype=torch.float64)
        starts = np.linspace(0, len(self.tokens) - T - 1, WINDOWS).astype(int)
        with self.watch(f"{self.name}: windows of {T:,} tokens", len(starts)) as advance:
            for start in starts:
                window = torch.from_numpy(self.tokens[start : start + T + 1].astype(np.int64)).to(device)
                logits = model(window[None, :-1])[0].float()
                total += F.cross_entropy(logits, window[1:], reduction="none").double().cpu()
                advance(1)
        return (total / len(starts)).numpy()


def in_context_score(losses: np.ndarray) -> float:
    """The mean loss of the last twentieth of a window less the mean loss of the twentieth after its first tenth;
    negative where the model gains from its context.

    In Olsson et al. 2022, "In-context Learning and Induction Heads", it is the loss of the 500th token less the loss of
    the 50th.
    """
    T = len(losses)
    width, early = max(1, T // 20), T // 10
    return float(losses[T - width :].mean() - losses[early : early + width].mean())


# Measurements of a text by name: classes that take its tokens, 1-D, and the trained length.
OF_TEXT: dict[str, Callable[[np.ndarray, int], Recall]] = {PositionLoss.name: PositionLoss}


def unknown_recalls(names: Collection[str]) -> Iterator[str]:
    """A sentence for each name that nothing measured has."""
    known = (*TASKS, *OF_TEXT)
    yield from (f"probes={name} is not known; choose among {', '.join(known)}." for name in names if name not in known)


def build_recall(name: str, seq_len: int, vocab_size: int, data: str, text: Callable[[], np.ndarray]) -> Recall:
    """A measurement of a model.

    name        of TASKS or OF_TEXT
    seq_len     the trained length
    vocab_size  of the model's data
    data        their name
    text        gives the tokens of a text, 1-D, for those that measure a text

    Raises UserError or DataError for one that does not fit.
    """
    if name in OF_TEXT:
        if len(tokens := text()) <= seq_len:
            raise UserError(
                f"probes={name} needs a text of more than {seq_len:,} tokens, and this one has {len(tokens):,}; give a "
                "longer one."
            )
        return OF_TEXT[name](tokens, seq_len)
    task = TASKS[name]
    if task.vocab_size > vocab_size:
        raise UserError(
            f"probes={name} needs a vocabulary of {task.vocab_size} tokens, and that of data={data} has {vocab_size}; "
            "leave it out."
        )
    check_length(task, seq_len, "probes")
    return TaskRecall(task, seq_len)
