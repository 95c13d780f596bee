"""What a run reads: the training batches of this rank, and the windows for the validation loss."""

from __future__ import annotations

from dataclasses import dataclass, field

from data.batches import Batch, Batches, GlobalBatch, MixedBatches, Source, eval_batches
from data.options import DataConfig, Documents
from data.packing import ChatBatches, PackedRows, chat_windows
from data.store import PreparedData
from data.tasks import TaskBatches, TaskData, validation_batches

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
