"""Tokenise a corpus once, into memory-mapped files that later runs open immediately.

The files are in <data.cache>/<corpus>-<tokenizer>-<recipe>/ (see store.py). They are built under a lock and under a
temporary name, so a sweep tokenises once and a killed run leaves nothing that looks finished. The next run continues
where an interrupted one stopped.
"""

import errno
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from rich.console import Console

from data import own_tokenizer
from data.corpora import CORPORA, ChatCorpus, Corpus
from data.errors import DataError
from data.files import Row
from data.mistakes import check_data
from data.options import DataConfig
from data.progress import progress
from data.store import (
    SPLITS,
    Position,
    PreparedData,
    TokenWriter,
    digest,
    find_damage,
    load_position,
    map_split,
    open_prepared,
    partial_folder,
    publish,
    repeated,
    save_position,
    token_dtype,
    write_manifest,
)
from data.tokenizers import (
    NAMES,
    Tokenised,
    Tokenizer,
    bpe_tokenizer,
    bytes_tokenizer,
    gpt2_tokenizer,
    load_tokenizer,
    save_tokenizer,
)

FORMAT = 2  # increase it when the same recipe gives other files, or cuts the text into other rows
BPE_TEXT = 1 << 28  # the most characters to learn a BPE from
SECONDS_BETWEEN_SAVES = 5.0  # seconds of work that an interrupted preparation loses at most


def prepare(config: DataConfig, announce_wait: bool = True) -> PreparedData:
    """The tokens of a corpus: opened if they are prepared and intact, else prepared.

    announce_wait   print a line on stderr when waiting for another process that prepares them
    Raises DataError for an unusable configuration, source or disk.
    """
    check_data(config)
    if config.mixture:
        parts = {text.path: prepare(text, announce_wait) for text in config.texts()}
        return replace(next(iter(parts.values())), parts=parts)
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    corpus = CORPORA[config.name](config)
    if announce_wait:
        for notice in corpus.notices():
            console.print(notice)
    recipe = _recipe(config, corpus)
    # Its name leaves out format and fingerprint: after a change of text or code, new files replace the old ones.
    lasting = {key: value for key, value in recipe.items() if key not in ("format", "source", "fingerprint")}
    source = {key: value for key, value in recipe["source"].items() if key != "fingerprint"}
    name = f"{config.name}-{Path(config.tokenizer).stem}-{digest([lasting, source])[:10]}"
    folder = Path(config.cache).expanduser() / name
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if find_damage(folder, recipe) is None:
            return open_prepared(folder)
        with _locked(folder, console, announce_wait):
            flaw = find_damage(folder, recipe)  # another process may have prepared it meanwhile
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
    """Everything that determines the content of the files."""
    recipe = {
        "format": FORMAT,
        "source": corpus.source(),
        "text_field": config.text_field,
        "tokenizer": config.tokenizer,
        "bpe_vocab_size": config.bpe_vocab_size if config.tokenizer == "bpe" else None,
        "max_tokens": config.max_tokens,
        "val_fraction": config.val_fraction,
    }
    if config.tokenizer not in NAMES:
        recipe["fingerprint"] = digest(own_tokenizer.read(Path(config.tokenizer)).content)
    return recipe


def _locked(folder: Path, console: Console, announce_wait: bool) -> AbstractContextManager[Any]:
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        if announce_wait:
            console.print(f"waiting for another process that prepares {folder}.")
        return lock.acquire()


def _build(folder: Path, config: DataConfig, corpus: Corpus, recipe: dict[str, Any], console: Console) -> None:
    partial = partial_folder(folder)
    try:
        position = load_position(partial, recipe)
        if position is None:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            position = Position()
            tokenizer = _make_tokenizer(config, corpus, console)
            save_tokenizer(tokenizer, partial)
            save_position(partial, recipe, position)
        else:
            tokenizer = load_tokenizer(partial)
            console.print(f"resuming the preparation of data={config.name} where it was interrupted.")
        _write_tokens(corpus, tokenizer, config, position, partial, recipe)
        content = {
            "recipe": recipe,
            "tokenizer": {"name": tokenizer.name, "vocab_size": tokenizer.n_vocab, "end_of_text": tokenizer.eot_token},
            "dtype": token_dtype(tokenizer).str,
            "splits": position.splits,
            "bytes": position.bytes,
            "notes": list(_notes(config, position, partial, token_dtype(tokenizer))),
        }
        write_manifest(partial, content)
        publish(folder)
    except OSError:  # free the space on a full disk
        shutil.rmtree(partial, ignore_errors=True)
        raise
    tokens = " and ".join(f"{count['tokens']:,} for {split}" for split, count in position.splits.items())
    console.print(f"prepared data={config.name} with data.tokenizer={config.tokenizer}: {tokens}, in {folder}")
    for note in content["notes"]:
        console.print(note)


def _notes(config: DataConfig, position: Position, folder: Path, dtype: np.dtype) -> Iterator[str]:
    train, val = (map_split(folder, split, dtype) for split in SPLITS)
    if count := repeated(train, val):
        yield f"{count:,} of {len(val.documents):,} validation documents also stand in training."
    if position.empty:
        yield f"{position.empty:,} rows of data={config.name} are null or empty, and were left out."
    if position.lost:
        yield (
            f"data.tokenizer={config.tokenizer} loses {position.lost:,} characters of the text, which tokens do not "
            "give back; choose one that writes rare characters as bytes, or data.tokenizer=bpe."
        )


def _write_tokens(
    corpus: Corpus,
    tokenizer: Tokenizer,
    config: DataConfig,
    position: Position,
    partial: Path,
    recipe: dict[str, Any],
) -> None:
    """Write every row after `position` to its split, until each stream's share of `max_tokens` is filled, and save the
    position every few seconds. Raises DataError if a split is empty.
    """
    dtype, marks, limit = token_dtype(tokenizer), isinstance(corpus, ChatCorpus), config.max_tokens
    with ExitStack() as stack:
        writers = {
            split: TokenWriter(stack, partial, split, dtype, tokenizer.eot_token, **counts, marks=marks)
            for split, counts in position.splits.items()
        }
        # Progress counts the bytes of the text, or the requested tokens if the bytes are unknown or limited.
        before = position.bytes.values() if limit is None else (writer.tokens for writer in writers.values())
        advance = stack.enter_context(progress(f"preparing data={config.name}", limit or corpus.size, sum(before)))
        saved = time.monotonic()

        def save() -> None:
            position.splits = {split: writer.sync() for split, writer in writers.items()}
            save_position(partial, recipe, position)

        for number, stream in list(enumerate(corpus.streams()))[position.stream :]:
            if number > position.stream:
                position.stream, position.rows, position.room = number, 0, None
            if position.room is None:
                position.room = sys.maxsize if limit is None else int(limit * stream.share)
            if position.room == 0:
                continue
            rows = islice(stream.rows, position.rows, None)
            for row, (tokens, answers, lost) in _in_threads(corpus, tokenizer, rows):
                split, text = row["split"], row["text"]
                position.rows += 1
                if not text:
                    position.empty += 1
                    continue
                written = writers[split].write(tokens, row["opens"], position.room, answers)
                position.lost, position.room = position.lost + lost, position.room - written
                complete = written >= len(tokens)
                size = len(text.encode() if complete else tokenizer.decode_bytes(tokens[:written].tolist()))
                position.bytes[split] += size
                done = f"{sum(writer.tokens for writer in writers.values()) / 1e6:.1f}M tokens"
                advance(size if limit is None else written, done)
                if time.monotonic() - saved >= SECONDS_BETWEEN_SAVES:
                    save()
                    saved = time.monotonic()
                if position.room == 0:
                    break
        save()
    for split, count in position.splits.items():
        if not count["tokens"]:
            shutil.rmtree(partial)
            raise DataError(
                f"data={config.name} leaves nothing for the {split} split: {config.path or config.hub or 'it'} has no "
                f"rows, their field {config.text_field!r} is empty, or data.val_fraction={config.val_fraction:g} and "
                f"data.max_tokens={config.max_tokens} leave too little; change one or give more text."
            )


def _make_tokenizer(config: DataConfig, corpus: Corpus, console: Console) -> Tokenizer:
    if config.tokenizer == "bytes":
        return bytes_tokenizer()
    if config.tokenizer == "gpt2":
        return gpt2_tokenizer()
    if config.tokenizer != "bpe":
        return own_tokenizer.read(Path(config.tokenizer))
    learning = f"learning {config.bpe_vocab_size:,} tokens from data={config.name}"
    if not console.is_terminal:
        console.print(learning)
    with console.status(learning):
        tokenizer = bpe_tokenizer(_training_text(corpus), config.bpe_vocab_size)
    if tokenizer.n_vocab < config.bpe_vocab_size:
        console.print(
            f"data={config.name} gives {tokenizer.n_vocab:,} tokens only, fewer than data.bpe_vocab_size="
            f"{config.bpe_vocab_size}: every pair of them that occurs is merged already."
        )
    return tokenizer


def _training_text(corpus: Corpus) -> Iterator[str]:
    length = 0
    for row in (row for stream in corpus.streams() for row in stream.rows):
        if row["split"] == "train":
            yield row["text"]
            length += len(row["text"])
        if length >= BPE_TEXT:
            return


def _in_threads(corpus: Corpus, tokenizer: Tokenizer, rows: Iterable[Row]) -> Iterator[tuple[Row, Tokenised]]:
    """Each row with its tokens, in order, tokenised ahead by one thread per core."""
    threads = os.cpu_count() or 1
    waiting: deque[tuple[Row, Future[Tokenised]]] = deque()
    encode = corpus.encoder(tokenizer)
    pool = ThreadPoolExecutor(threads)
    try:
        for row in rows:
            waiting.append((row, pool.submit(encode, row)))
            if len(waiting) > 4 * threads:
                first, tokens = waiting.popleft()
                yield first, tokens.result()
        for first, tokens in waiting:
            yield first, tokens.result()
    finally:
        pool.shutdown(cancel_futures=True)
