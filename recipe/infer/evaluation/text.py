"""The loss of a model on a text, and its bits per byte."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from data.batches import document_starts
from data.files import Row
from data.prepare import prepare
from data.progress import progress
from recipe.infer.evaluation.scorer import LanguageModel, padded
from recipe.infer.evaluation.tasks import exponential
from recipe.infer.trained import Trained
from recipe.run.config import ConfigError
from recipe.training.checkpoint import read_manifest


@dataclass(frozen=True)
class Text:
    """Documents in one row of tokens, an end of text between them.

    tokens     1-D integers
    documents  where each begins, 1-D
    size       bytes of their text, as it was before the tokenizer
    """

    tokens: np.ndarray
    documents: np.ndarray
    size: int


def tokenised(rows: Iterable[Row], model: LanguageModel, most: int | None = None) -> Text:
    """The first `most` tokens of a corpus; None: all. Raises ConfigError where there are fewer than two."""
    pieces = []
    starts = []
    total = size = 0
    for row in rows:
        if not row["text"]:
            continue
        size += len(row["text"].encode())
        tokens = model.encode(row["text"])
        if row["opens"]:
            if total:
                pieces.append(np.array([model.end_of_text]))
                total += 1
            starts.append(total)
        pieces.append(tokens)
        total += len(tokens)
        if most is not None and total >= most:
            break
    if min(total, most or total) < 2:
        limit = "" if most is None else f" with data.max_tokens={most}"
        raise ConfigError(
            f"The text{limit} has fewer than two tokens, so there is nothing to predict; give more of it."
        )
    documents = np.array([start for start in starts if start < (most or total)])
    joined = np.concatenate(pieces)[:most]
    return Text(joined, documents, size if len(joined) == total else model.size(joined.tolist()))


def validation_text(trained: Trained) -> Text:
    """The validation split that the run was measured on. Raises ConfigError where its text has changed."""
    if trained.config.data.mixture:
        raise ConfigError(
            "The run mixed several texts, and its metrics.jsonl has the loss of each; name one with data=text "
            "data.path=..."
        )
    data = prepare(trained.config.data)
    if data.manifest["identity"] != read_manifest(trained.checkpoint).metadata["data"]:
        raise ConfigError(
            f"The text of data={trained.config.data.name} has changed since the run; name a text with data=text "
            "data.path=..."
        )
    if data.val.answers is not None:
        raise ConfigError(
            "The run was trained on conversations, and its summary.json has the loss of their answers; name a text "
            "with data=text data.path=..."
        )
    return Text(data.val.tokens, data.val.documents, data.manifest["bytes"]["val"])


def measure(model: LanguageModel, text: Text, seq_len: int, batch: int, separate: bool) -> dict[str, float]:
    """{"loss": nats per token, "perplexity", "bits_per_byte", "tokens", "bytes"} over all tokens but the first.

    seq_len   tokens of the windows, side by side, that the text is cut into: the context of their last token
    batch     windows of one forward pass
    separate  whether documents that share a window are hidden from each other
    """
    count = len(text.tokens) - 1
    seq_len = min(seq_len, count)  # a longer window would be empty behind the text
    nats = 0.0
    starts = range(0, count, seq_len)
    with progress("windows", len(starts)) as advance:
        for chosen in (starts[n : n + batch] for n in range(0, len(starts), batch)):
            windows = [text.tokens[start : start + seq_len + 1].tolist() for start in chosen]
            inputs, targets = padded([(window, len(window) - 1) for window in windows])
            bounds = document_starts(text.documents, np.array(chosen), inputs.shape[1]) if separate else None
            logs, _ = model.scores(inputs, targets, None if bounds is None else torch.from_numpy(bounds))
            nats -= float(logs.double().sum())
            advance(len(chosen))
    loss, size = nats / count, text.size - model.size(text.tokens[:1].tolist())
    return {
        "loss": loss,
        "perplexity": exponential(loss),
        "bits_per_byte": nats / size / math.log(2) if size else math.nan,
        "tokens": count,
        "bytes": size,
    }
