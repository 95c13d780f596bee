"""Tokenise a corpus once, into memory-mapped files that every later run opens at once.

They lie in <data.cache>/<corpus>-<tokenizer>-<recipe>/ (see store.py), built under a lock and under another name,
so that a sweep tokenises once and a killed run leaves nothing that looks finished.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from data.corpora import CORPORA, HUB_CORPORA, Corpus, Stream
from data.errors import DataError
from data.files import Row, listed
from data.store import SPLITS, PreparedData, TokenWriter, digest, find_flaw, open_prepared, replacing, write_manifest
from data.tokenizers import TokenizerName, bpe_tokenizer, bytes_tokenizer, encoder, gpt2_tokenizer, save_tokenizer

FORMAT = 1  # raise it when the same recipe would give other files
BPE_TEXT = 1 << 28  # characters that a BPE is learned from, at most

# The corpora that read an option, where not all do.
READERS = {
    "path": ("text",),
    "text_field": ("text", *HUB_CORPORA),
    "hub": HUB_CORPORA,
    "hub_revision": HUB_CORPORA,
    "hub_subset": HUB_CORPORA,
    "hub_split": HUB_CORPORA,
}


@dataclass
class DataConfig:
    """What a user chooses under `data.*`.

    name            a corpus in the registry (data/corpora.py)
    path            a file or folder of .txt, .jsonl, .parquet (data=text)
    tokenizer       what text is cut into
    bpe_vocab_size  tokens that tokenizer=bpe learns, end-of-text included
    max_tokens      tokens to prepare, training and validation together; null for all
    val_fraction    of the text that is held out for validation
    cache           folder of the prepared tokens
    hub             name of a data set on the Hugging Face hub; its revision, subset and split ("train+test" joins two)
    text_field      the field of .jsonl, .parquet and hub rows that holds the text
    """

    name: str = "stdlib"
    path: str | None = None
    tokenizer: TokenizerName = TokenizerName.bytes
    bpe_vocab_size: int = 4096
    max_tokens: int | None = None
    val_fraction: float = 0.1
    cache: str = ".cache/tokens"
    hub: str | None = None
    hub_revision: str | None = None
    hub_subset: str | None = None
    hub_split: str = "train"
    text_field: str = "text"


def check_data(config: DataConfig) -> None:
    """Refuses what no corpus or tokenizer takes, before any text is read. Raises DataError."""
    if config.name not in CORPORA:
        raise DataError(f"data.name={config.name} is not a corpus; choose data={' or '.join(CORPORA)}.")
    for option in fields(config):
        value, readers = getattr(config, option.name), READERS.get(option.name, tuple(CORPORA))
        if value != option.default and config.name not in readers:
            raise DataError(
                f"data.{option.name}={value} has no effect with data={config.name}; "
                f"leave it out or choose data={' or '.join(readers)}."
            )
    if not 0 < config.val_fraction < 1:
        raise DataError(f"data.val_fraction={config.val_fraction:g} must lie between 0 and 1, for instance 0.1.")
    if config.max_tokens is not None and config.max_tokens < 1:
        raise DataError(f"data.max_tokens={config.max_tokens} must be positive, or null for the whole corpus.")
    if config.bpe_vocab_size < 257:
        raise DataError(f"data.bpe_vocab_size={config.bpe_vocab_size} must be 257 or more: 256 bytes and end-of-text.")


def prepare(config: DataConfig, progress: bool = True) -> PreparedData:
    """The tokens of a corpus: opened where they lie prepared and sound, prepared where not.

    progress    show a progress bar and notices on stderr
    Raises DataError for a configuration, a source or a disk that cannot serve.
    """
    check_data(config)
    console = Console(stderr=True, quiet=not progress, soft_wrap=True, highlight=False)
    corpus = CORPORA[config.name](config)
    recipe = _recipe(config, corpus)
    folder = Path(config.cache).expanduser() / _folder_name(config, recipe)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if find_flaw(folder, recipe) is None:
            return open_prepared(folder)
        with _locked(folder, console):
            flaw = find_flaw(folder, recipe)  # another process may have prepared it meanwhile
            if flaw is not None:
                if folder.exists():
                    console.print(f"preparing {folder} again: {flaw}.")
                _build(folder, config, corpus, recipe, console)
            return open_prepared(folder)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = "the disk is full" if full else f"{type(error).__name__}: {error}"
        raise DataError(
            f"could not write tokens to data.cache={config.cache} ({reason}); "
            "make room, name another folder with data.cache=..., or take less with data.max_tokens=..."
        ) from error


def _recipe(config: DataConfig, corpus: Corpus) -> dict[str, Any]:
    """All that decides what the files contain."""
    return {
        "format": FORMAT,
        "source": corpus.source(),
        "text_field": config.text_field,
        "tokenizer": config.tokenizer.value,
        "bpe_vocab_size": config.bpe_vocab_size if config.tokenizer is TokenizerName.bpe else None,
        "max_tokens": config.max_tokens,
        "val_fraction": config.val_fraction,
    }


def _folder_name(config: DataConfig, recipe: dict[str, Any]) -> str:
    # Without format and fingerprint: text or code that changed is prepared again in the place of the old.
    lasting = {key: value for key, value in recipe.items() if key not in ("format", "source")}
    source = {key: value for key, value in recipe["source"].items() if key != "fingerprint"}
    return f"{config.name}-{config.tokenizer.value}-{digest([lasting, source])[:10]}"


def _locked(folder: Path, console: Console) -> AbstractContextManager[Any]:
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        console.print(f"waiting for another process that prepares {folder}.")
        return lock.acquire()


def _build(folder: Path, config: DataConfig, corpus: Corpus, recipe: dict[str, Any], console: Console) -> None:
    if corpus.empty:
        console.print(f"left out, because they are empty: {listed(corpus.empty)}.")
    with replacing(folder) as partial:
        tokenizer = _make_tokenizer(config, corpus, console)
        save_tokenizer(tokenizer, partial)
        dtype = np.dtype(np.min_scalar_type(tokenizer.n_vocab - 1)).newbyteorder("<")
        writers = {split: TokenWriter(partial, split, dtype, tokenizer.eot_token) for split in SPLITS}
        with _progress(console, corpus, config) as bar:
            for stream in corpus.streams():
                _tokenise(stream, tokenizer, writers, config.max_tokens, bar)
        counts = {split: writer.close() for split, writer in writers.items()}
        for split, count in counts.items():
            if not count["tokens"]:
                raise DataError(
                    f"data={config.name} leaves nothing for the {split} split at data.val_fraction="
                    f"{config.val_fraction:g} and data.max_tokens={config.max_tokens}; change one or give more text."
                )
        content = {
            "recipe": recipe,
            "tokenizer": {"name": tokenizer.name, "vocab_size": tokenizer.n_vocab, "end_of_text": tokenizer.eot_token},
            "dtype": dtype.str,
            "splits": counts,
        }
        write_manifest(partial, content)
    tokens = " and ".join(f"{counts[split]['tokens']:,} for {split}" for split in SPLITS)
    console.print(f"prepared data={config.name} with data.tokenizer={config.tokenizer.value}: {tokens}, in {folder}")


def _make_tokenizer(config: DataConfig, corpus: Corpus, console: Console) -> tiktoken.Encoding:
    if config.tokenizer is TokenizerName.bytes:
        return bytes_tokenizer()
    if config.tokenizer is TokenizerName.gpt2:
        return gpt2_tokenizer()
    with console.status(f"learning {config.bpe_vocab_size:,} tokens from data={config.name}"):
        return bpe_tokenizer(_training_text(corpus), config.bpe_vocab_size)


def _training_text(corpus: Corpus) -> Iterator[str]:
    length = 0
    for row in (row for stream in corpus.streams() for row in stream.rows):
        if row["split"] == "train":
            yield row["text"]
            length += len(row["text"])
        if length >= BPE_TEXT:
            return


def _tokenise(
    stream: Stream,
    tokenizer: tiktoken.Encoding,
    writers: dict[str, TokenWriter],
    max_tokens: int | None,
    bar: Progress,
) -> None:
    """Writes a stream's rows to their splits until its share of `max_tokens` is filled."""
    room = None if max_tokens is None else int(max_tokens * stream.share)
    for row, tokens in _in_threads(tokenizer, stream.rows):
        written = writers[row["split"]].write(tokens, row["opens"], room)
        done = sum(writer.count for writer in writers.values())
        advance = len(row["text"]) if max_tokens is None else written
        bar.update(bar.task_ids[0], advance=advance, description=f"{done / 1e6:.1f}M tokens")
        if room is not None:
            room -= written
            if room == 0:
                break


def _in_threads(tokenizer: tiktoken.Encoding, rows: Iterable[Row]) -> Iterator[tuple[Row, np.ndarray]]:
    """Each row with its tokens, in order; tokenising runs ahead in as many threads as there are cores."""
    threads = os.cpu_count() or 1
    waiting: deque[tuple[Row, Future[np.ndarray]]] = deque()
    encode = encoder(tokenizer)
    pool = ThreadPoolExecutor(threads)
    try:
        for row in rows:
            waiting.append((row, pool.submit(encode, row["text"])))
            if len(waiting) > 4 * threads:
                first, tokens = waiting.popleft()
                yield first, tokens.result()
        for first, tokens in waiting:
            yield first, tokens.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _progress(console: Console, corpus: Corpus, config: DataConfig) -> Progress:
    """A bar over the characters of the text or, where these are unknown or limited, over the tokens asked for."""
    columns = (SpinnerColumn(), TextColumn(f"data={config.name}"), BarColumn(), TextColumn("{task.description}"))
    bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal)
    bar.add_task("", total=config.max_tokens or corpus.size)
    return bar
