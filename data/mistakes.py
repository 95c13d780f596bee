"""Checks of the data options that need no text."""

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from data.corpora import CHAT, CORPORA, HUB_CORPORA
from data.errors import DataError
from data.options import DataConfig, Documents
from data.own_tokenizer import read
from data.tasks import TASKS
from data.tokenizers import NAMES

SOURCES = (*CORPORA, *TASKS)  # what data.name can be
# The corpora that read an option, for options that not all corpora read.
READERS = {
    "path": ("text", "chat"),
    "weights": ("text",),
    "max_tokens": tuple(name for name in CORPORA if name != CHAT),
    "text_field": ("text", *HUB_CORPORA),
    "hub": HUB_CORPORA,
    "hub_rows": HUB_CORPORA,
    "name": SOURCES,
    "cache": SOURCES,  # for a sweep over texts and tasks
}


def check_data(config: DataConfig) -> None:
    """Raise DataError for options that no corpus or tokenizer accepts, before any text is read."""
    for sentence in data_mistakes(config):
        raise DataError(sentence)


def data_mistakes(config: DataConfig) -> Iterator[str]:
    """A sentence for each option that no corpus or tokenizer accepts, with what to change."""
    if config.name not in SOURCES:
        yield f"data.name={config.name} is not a corpus; choose data={' or '.join(SOURCES)}."
        return
    for option in fields(config):
        value, readers = getattr(config, option.name), READERS.get(option.name, tuple(CORPORA))
        if value != getattr(DataConfig(), option.name) and config.name not in readers:
            yield (
                f"data.{option.name}={value} has no effect with data={config.name}; "
                f"leave it out or choose data={' or '.join(readers)}."
            )
    yield from mixture_mistakes(config)
    if config.tokenizer not in NAMES:
        try:
            read(Path(config.tokenizer))
        except DataError as error:
            unknown = (
                f"data.tokenizer={config.tokenizer} is not known; choose one of {', '.join(NAMES)}, or name a "
                "tokenizer.json."
            )
            yield str(error) if Path(config.tokenizer).suffix else unknown
    if config.name == CHAT and config.tokenizer in NAMES:
        yield (
            f"data=chat needs a tokenizer with a chat template, and data.tokenizer={config.tokenizer} has none; set "
            "init_from=<folder>, or data.tokenizer=<folder>/tokenizer.json."
        )
    if config.name == CHAT and config.documents is Documents.ignore:
        yield (
            "data=chat puts several conversations into a sequence, which must not see each other; leave "
            "data.documents=ignore out."
        )
    if not 0 < config.val_fraction < 1:
        yield f"data.val_fraction={config.val_fraction:g} must lie between 0 and 1, for instance 0.1."
    if config.max_tokens is not None and config.max_tokens < 1:
        yield f"data.max_tokens={config.max_tokens} must be positive, or null for the whole corpus."
    if config.bpe_vocab_size < 257:
        yield f"data.bpe_vocab_size={config.bpe_vocab_size} must be 257 or more: 256 bytes and end-of-text."


def mixture_mistakes(config: DataConfig) -> Iterator[str]:
    """A sentence for each mistake in several paths and their weights."""
    paths, weights = config.path, config.weights
    if not isinstance(paths, list):
        if weights is not None:
            yield f"data.weights={weights} has no effect on one text; name several, such as data.path=[a,b]."
        return
    if config.name != "text" or len(set(paths)) < max(2, len(paths)):
        yield f"data.path={paths} must be two or more different texts, with data=text; name one, or others."
    if weights is not None and (len(weights) != len(paths) or min(weights) < 1):
        yield f"data.weights={weights} must have a whole number above 0 for each of data.path={paths}."
    if config.tokenizer == "bpe":
        yield "data.tokenizer=bpe learns its tokens from one text; with several, use bytes, gpt2 or a tokenizer.json."
