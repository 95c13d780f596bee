"""Accuracy on a task, by length and by the distance to the token that determines the answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from data.tasks.batches import VALIDATION, VALIDATION_SEED, drawn
from data.tasks.task import IGNORED, Task
from model.gpt import GPT
from recipe.training.recall.probe import Probe, lengths_for, stretched

TOKENS = 1 << 14  # at each length
FEWEST = 64  # sequences
AT_ONCE = 1 << 13  # tokens


class TaskProbe(Probe):
    """Sequences that no training draws, with the tokens of a task as the first of the model's vocabulary."""

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
        logits = model.logits(hidden)[:, : self.task.vocab_size]
        return logits.argmax(-1).cpu().numpy()
