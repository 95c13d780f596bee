"""Tasks in a .jsonl file: multiple choice and perplexity, with the formulas and the metrics' names of lm-eval.

    {"question": "The capital of France is", "choices": ["Rome", "Paris"], "answer": 1}
    {"text": "Any text."}

All lines of a file are of one kind. Each choice follows the question after a space; `answer` counts from 0.
"""

import math
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.files import rows_in
from recipe.infer.evaluation.scorer import Scorer
from recipe.infer.generation.text import read_lines
from recipe.run.config import ConfigError

CHOICE, TEXT = {"question", "choices", "answer"}, {"text"}


def run_file(path: Path, scorer: Scorer, limit: int | None) -> dict[str, float]:
    """The metrics of the file's task over its first `limit` lines; None: all. Raises ConfigError for a wrong file."""
    lines = read(path)[:limit]
    return (multiple_choice if "choices" in lines[0] else perplexity)(lines, scorer)


def multiple_choice(lines: Sequence[dict[str, Any]], scorer: Scorer) -> dict[str, float]:
    """acc: share of questions whose right choice is the likeliest; acc_norm: by log-likelihood per character."""
    pairs = [(line["question"], f" {choice}") for line in lines for choice in line["choices"]]
    scores = iter(scorer.loglikelihood(pairs))
    right, right_norm = [], []
    for line in lines:
        logs = [next(scores)[0] for _ in line["choices"]]
        by_length = [log / len(choice) for log, choice in zip(logs, line["choices"], strict=True)]
        right.append(float(logs.index(max(logs)) == line["answer"]))
        right_norm.append(float(by_length.index(max(by_length)) == line["answer"]))
    metrics = {"acc": right, "acc_norm": right_norm}
    means = {name: statistics.fmean(values) for name, values in metrics.items()}
    errors = {
        f"{name}_stderr": statistics.stdev(values) / math.sqrt(len(lines)) if len(lines) > 1 else 0.0
        for name, values in metrics.items()
    }
    return means | errors | {"n": len(lines)}


def perplexity(lines: Sequence[dict[str, Any]], scorer: Scorer) -> dict[str, float]:
    """Perplexities per word and per byte, and bits per byte, over all texts together."""
    texts = [line["text"] for line in lines]
    nats = -sum(scorer.loglikelihood_rolling(texts))
    words, size = sum(len(re.split(r"\s+", text)) for text in texts), sum(len(text.encode()) for text in texts)
    return {
        "word_perplexity": exponential(nats / words),
        "byte_perplexity": exponential(nats / size),
        "bits_per_byte": nats / size / math.log(2),
        "n": len(lines),
    }


def exponential(x: float) -> float:
    """e^x; infinity beyond the largest double, such as for a text without spaces, which is one long word."""
    return math.exp(x) if x < math.log(sys.float_info.max) else math.inf


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a task's file. Raises UserError or DataError for the first that does not fit."""
    lines: list[dict[str, Any]] = []
    for number, line in rows_in(map(str.encode, read_lines(path, "tasks")), path, "tasks"):
        if flaw := mistake(line, lines[0] if lines else line):
            raise ConfigError(
                f'tasks={path}: line {number} {flaw}; write {{"question": ..., "choices": [...], "answer": 0}} or '
                '{"text": ...} in every line.'
            )
        lines.append(line)
    if not lines:
        raise ConfigError(f"tasks={path} is empty; give it at least one line.")
    return lines


def mistake(line: dict[str, Any], first: dict[str, Any]) -> str | None:
    """The mistake in a line of a file whose first line is `first`; None without one."""
    if not (line.keys() >= CHOICE or line.keys() >= TEXT):
        return "holds no task"
    if ("choices" in line) != ("choices" in first):
        return "is of another kind than the first"
    if "choices" not in line:
        return None if isinstance(line["text"], str) and line["text"] else "has no text"
    choices, answer = line["choices"], line["answer"]
    if not isinstance(line["question"], str):
        return "has a question that is not text"
    if not (isinstance(choices, list) and choices and all(isinstance(c, str) and c for c in choices)):
        return "has choices that are not a list of texts"
    if not (type(answer) is int and 0 <= answer < len(choices)):
        return f"has answer={answer!r}, which is none of its {len(choices)} choices"
    return None
