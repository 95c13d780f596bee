"""Tokenise a corpus once, into memory-mapped files that every later run opens at once.

    <data.cache>/<corpus>-<tokenizer>-<recipe>/
        train.bin  val.bin                  tokens, of the smallest unsigned type that holds the vocabulary
        train.documents  val.documents      where each document begins, int64
        tokenizer.json                      see tokenizers.py
        manifest.json                       what all this was made from, with sizes and checksums; written last

The folder is built under another name and renamed when it is whole, under a lock, so that a sweep tokenises
once and a killed run leaves nothing that looks finished. End-of-text stands between two documents.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from data.corpora import CORPORA, Corpus, DataError, Row, Stream
from data.tokenizers import (
    TokenizerName,
    bpe_tokenizer,
    bytes_tokenizer,
    encoder,
    gpt2_tokenizer,
    load_tokenizer,
    save_tokenizer,
)

FORMAT = 1  # raise it when the same recipe would give other files
SPLITS = ("train", "val")
CHUNK = 1 << 26  # bytes behind one checksum
BPE_TEXT = 1 << 28  # characters that a BPE is learned from, at most


@dataclass
class DataConfig:
    """What a user chooses under `data.*`.

    name            a corpus in the registry (data/corpora.py)
    path            a file or folder of .txt, .jsonl, .parquet (data=text only)
    tokenizer       what text is cut into
    bpe_vocab_size  tokens that tokenizer=bpe learns, end-of-text included
    max_tokens      tokens to prepare, train and validation together; null for all
    val_fraction    of the text that is held out for validation
    cache           folder of the prepared tokens
    hub             name of a data set on the Hugging Face hub, with its revision, subset and split
                    ("train+test" joins two)
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

    def check(self) -> None:
        """Raises DataError for values that no corpus or tokenizer takes."""
        if self.name not in CORPORA:
            raise DataError(f"data.name={self.name} is not a corpus: choose one of {', '.join(CORPORA)} with data=...")
        if not 0 < self.val_fraction < 1:
            raise DataError(f"data.val_fraction={self.val_fraction:g} has to lie between 0 and 1, for instance 0.1")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise DataError(f"data.max_tokens={self.max_tokens} has to be positive, or null for the whole corpus")
        if self.bpe_vocab_size < 257:
            raise DataError(
                f"data.bpe_vocab_size={self.bpe_vocab_size} has to be 257 or more: 256 bytes and end-of-text"
            )
        if self.path is not None and self.name != "text":
            raise DataError(f"data.path={self.path} is read by data=text only: set data=text, or drop data.path")
        if self.hub is not None and self.name in ("stdlib", "text"):
            raise DataError(f"data.hub={self.hub} is not read by data={self.name}: drop it, or set data=fineweb_edu")


@dataclass(frozen=True)
class TokenFile:
    """One split: its tokens, 1-D unsigned, and where its documents begin, 1-D int64; both memory-mapped."""

    tokens: np.ndarray
    documents: np.ndarray


@dataclass(frozen=True)
class PreparedData:
    """What training reads. `manifest["identity"]` is equal for equal tokens, wherever they were prepared."""

    tokenizer: tiktoken.Encoding
    vocab_size: int
    train: TokenFile
    val: TokenFile
    manifest: dict[str, Any]
    folder: Path


def prepare(config: DataConfig, progress: bool = True) -> PreparedData:
    """The tokens of a corpus: opened where they are prepared and sound, prepared where not.

    progress    show a progress bar and notices on stderr
    Raises DataError for a configuration, a source or a disk that cannot serve.
    """
    config.check()
    console = Console(stderr=True, quiet=not progress, soft_wrap=True, highlight=False)
    corpus = CORPORA[config.name](config)
    recipe = _recipe(config, corpus)
    folder = Path(config.cache).expanduser() / _folder_name(config, recipe)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if _flaw(folder, recipe) is None:
            return _open(folder)
        with _locked(folder, console):
            flaw = _flaw(folder, recipe)  # another process may have prepared it meanwhile
            if flaw is not None:
                if folder.exists():
                    console.print(f"{flaw}: preparing {folder} again")
                _build(folder, config, corpus, recipe, console)
            return _open(folder)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = "the disk is full" if full else f"{type(error).__name__}: {error}"
        raise DataError(
            f"could not write the tokens to data.cache={config.cache} ({reason}): "
            "make room there, name another folder with data.cache=..., or take less with data.max_tokens=..."
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
    # Without the files' digest: a source that changed is prepared again in its place.
    source = {key: value for key, value in recipe["source"].items() if key not in ("files", "digest")}
    return f"{config.name}-{config.tokenizer.value}-{_hash({**recipe, 'source': source})[:10]}"


def _hash(content: Any) -> str:
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _locked(folder: Path, console: Console) -> AbstractContextManager[Any]:
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        console.print(f"waiting for another process that prepares {folder}")
        return lock.acquire()


def _flaw(folder: Path, recipe: dict[str, Any]) -> str | None:
    """Why the folder can't be used; None if every byte is as the manifest says."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        if manifest["recipe"] != recipe:
            return "the source or the format of the tokens has changed"
        for name, file in manifest["files"].items():
            path = folder / name
            if (size := path.stat().st_size) != file["bytes"]:
                return f"{path} has {size} bytes instead of {file['bytes']}"
            if _checksums(path) != file["crc32"]:
                return f"{path} is corrupt"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{folder} is incomplete ({type(error).__name__})"
    return None


def _checksums(path: Path) -> list[int]:
    """CRC-32 of each CHUNK of the file, computed in parallel: zlib lets go of the interpreter's lock."""
    if not path.stat().st_size:
        return []
    content = np.memmap(path, np.uint8, mode="r")
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda i: zlib.crc32(content[i : i + CHUNK].data), range(0, len(content), CHUNK)))


def _open(folder: Path) -> PreparedData:
    manifest = json.loads((folder / "manifest.json").read_text())
    tokenizer = load_tokenizer(folder)
    train, val = (
        TokenFile(
            np.memmap(folder / f"{split}.bin", np.dtype(manifest["dtype"]), mode="r"),
            np.memmap(folder / f"{split}.documents", np.int64, mode="r"),
        )
        for split in SPLITS
    )
    return PreparedData(tokenizer, tokenizer.n_vocab, train, val, manifest, folder)


def _build(folder: Path, config: DataConfig, corpus: Corpus, recipe: dict[str, Any], console: Console) -> None:
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
    partial.mkdir()
    try:
        tokenizer = _make_tokenizer(config, corpus, console)
        save_tokenizer(tokenizer, partial)
        dtype = np.dtype(np.min_scalar_type(tokenizer.n_vocab - 1)).newbyteorder("<")
        writers = {split: _Writer(partial, split, dtype, tokenizer.eot_token) for split in SPLITS}
        with _progress(console, corpus, config) as bar:
            for stream in corpus.streams():
                _tokenise(stream, tokenizer, writers, config.max_tokens, bar)
        counts = {split: writer.close() for split, writer in writers.items()}
        for split, count in counts.items():
            if not count["tokens"]:
                raise DataError(
                    f"the {split} split of data={config.name} is empty at data.val_fraction={config.val_fraction:g} and "
                    f"data.max_tokens={config.max_tokens}: change one of them or give more text"
                )
        paths = sorted(partial.iterdir())
        files = {path.name: {"bytes": path.stat().st_size, "crc32": _checksums(path)} for path in paths}
        manifest = {
            "identity": _hash([dtype.str, files]),
            "recipe": recipe,
            "tokenizer": {"name": tokenizer.name, "vocab_size": tokenizer.n_vocab, "end_of_text": tokenizer.eot_token},
            "dtype": dtype.str,
            "splits": counts,
            "files": files,
        }
        with (partial / "manifest.json").open("w") as file:
            json.dump(manifest, file, indent=1)
            _to_disk(file)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
        _sync_folder(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _make_tokenizer(config: DataConfig, corpus: Corpus, console: Console) -> tiktoken.Encoding:
    if config.tokenizer is TokenizerName.bytes:
        return bytes_tokenizer()
    if config.tokenizer is TokenizerName.gpt2:
        return gpt2_tokenizer()
    with console.status(f"learning {config.bpe_vocab_size} tokens from data={config.name}"):
        return bpe_tokenizer(_training_text(corpus), config.bpe_vocab_size)


def _training_text(corpus: Corpus) -> Iterator[str]:
    length = 0
    for row in (row for stream in corpus.streams() for row in stream.rows):
        if row["split"] == "train":
            yield row["text"]
            length += len(row["text"])
        if length >= BPE_TEXT:
            return


class _Writer:
    """Writes the tokens of one split, with end-of-text between its documents."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype, end_of_text: int):
        self.file = (folder / f"{split}.bin").open("wb", buffering=1 << 20)
        self.documents_path = folder / f"{split}.documents"
        self.dtype, self.end_of_text = dtype, np.array([end_of_text], dtype)
        self.documents: list[int] = []
        self.count = 0

    def write(self, tokens: np.ndarray, opens: bool, room: int | None) -> int:
        """Appends at most `room` tokens; returns how many."""
        before = self.count
        if opens and self.count:
            self._append(self.end_of_text[:room])
        left = None if room is None else room - (self.count - before)
        if opens and left != 0:
            self.documents.append(self.count)
        self._append(tokens[:left])
        return self.count - before

    def _append(self, tokens: np.ndarray) -> None:
        self.file.write(tokens.astype(self.dtype, copy=False).tobytes())
        self.count += len(tokens)

    def close(self) -> dict[str, int]:
        with self.file as file:
            _to_disk(file)
        with self.documents_path.open("wb") as file:
            file.write(np.array(self.documents, "<i8").tobytes())
            _to_disk(file)
        return {"tokens": self.count, "documents": len(self.documents)}


def _tokenise(
    stream: Stream,
    tokenizer: tiktoken.Encoding,
    writers: dict[str, _Writer],
    max_tokens: int | None,
    bar: Progress,
) -> None:
    """Writes a stream's rows to their splits until its share of `max_tokens` is filled."""
    room = None if max_tokens is None else int(max_tokens * stream.share)
    for row, tokens in _in_threads(tokenizer, stream.rows):
        written = writers[row["split"]].write(tokens, row["opens"], room)
        done = sum(writer.count for writer in writers.values())
        bar.update(
            bar.task_ids[0],
            advance=written if max_tokens else len(row["text"]),
            description=f"{done / 1e6:.1f}M tokens",
        )
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
    """A bar over the bytes of the text or, where these are unknown or limited, over the tokens asked for."""
    columns = (SpinnerColumn(), TextColumn(f"data={config.name}"), BarColumn(), TextColumn("{task.description}"))
    bar = Progress(*columns, TimeElapsedColumn(), console=console)
    bar.add_task("", total=config.max_tokens or corpus.bytes)
    return bar


def _to_disk(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
