"""Text to batches: corpora, tokenizers, prepared tokens, and the batch as a function of the step."""

from data.batches import Batch, Batches, Prefetcher, eval_batches, piece_lengths
from data.check import check_data
from data.config import DataConfig, Documents
from data.errors import DataError
from data.prepare import prepare
from data.store import PreparedData, TokenFile
from data.tokenizers import Tokenizer, load_tokenizer, save_tokenizer

__all__ = [
    "Batch",
    "Batches",
    "DataConfig",
    "DataError",
    "Documents",
    "Prefetcher",
    "PreparedData",
    "TokenFile",
    "Tokenizer",
    "check_data",
    "eval_batches",
    "load_tokenizer",
    "piece_lengths",
    "prepare",
    "save_tokenizer",
]
