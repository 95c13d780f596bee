"""Tokens on disk: a folder that is either whole and memory-mapped, or not there.

train.bin  val.bin                  tokens, of the smallest unsigned type that holds the vocabulary
train.documents  val.documents      where each document begins, int64
tokenizer.json                      see tokenizers.py
manifest.json                       what all this was made from, with sizes and checksums
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

import numpy as np
import tiktoken

from data.tokenizers import load_tokenizer

SPLITS = ("train", "val")
MANIFEST = "manifest.json"
CHUNK = 1 << 26  # bytes behind one checksum


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


class TokenWriter:
    """Writes one split, with end-of-text between its documents.

    count       tokens written
    documents   where each document begins
    """

    def __init__(self, folder: Path, split: str, dtype: np.dtype, end_of_text: int):
        self.path, self.dtype = folder / split, dtype
        self.end_of_text = np.array([end_of_text], dtype)
        self.documents: list[int] = []
        self.count = 0
        self._file = self.path.with_suffix(".bin").open("wb", buffering=1 << 20)

    def write(self, tokens: np.ndarray, opens: bool, room: int | None = None) -> int:
        """Appends a piece of a document, which it `opens` or continues: at most `room` tokens. Returns how many."""
        before = self.count
        if opens and before:
            self._append(self.end_of_text[:room])
        if room is not None:
            tokens = tokens[: room - (self.count - before)]
        if opens and len(tokens):
            self.documents.append(self.count)
        self._append(tokens)
        return self.count - before

    def close(self) -> dict[str, int]:
        """Brings everything to the disk; returns the counts."""
        with self._file as file:
            to_disk(file)
        with self.path.with_suffix(".documents").open("wb") as file:
            file.write(np.array(self.documents, "<i8").tobytes())
            to_disk(file)
        return {"tokens": self.count, "documents": len(self.documents)}

    def _append(self, tokens: np.ndarray) -> None:
        self._file.write(tokens.astype(self.dtype, copy=False).tobytes())
        self.count += len(tokens)


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A new folder to fill, which takes the place of `folder` once the block ends well, and vanishes otherwise.

    A killed process leaves it under its own name, for the next one to clear; callers hold a lock.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
        descriptor = os.open(folder.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Adds the sizes and checksums of the folder's files to the content, and writes it beside them."""
    files = {p.name: {"bytes": p.stat().st_size, "crc32": checksums(p)} for p in sorted(folder.iterdir())}
    manifest = {"identity": digest(files), **content, "files": files}
    with (folder / MANIFEST).open("w") as file:
        json.dump(manifest, file, indent=1)
        to_disk(file)


def find_flaw(folder: Path, recipe: dict[str, Any]) -> str | None:
    """Why the folder does not hold what the recipe gives; None if every byte is as its manifest says."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if manifest["recipe"] != recipe:
            return "the text or the format of the tokens has changed"
        for name, file in manifest["files"].items():
            path = folder / name
            if (size := path.stat().st_size) != file["bytes"]:
                return f"{path} has {size} bytes instead of {file['bytes']}"
            if checksums(path) != file["crc32"]:
                return f"{path} is corrupt"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{folder} is incomplete ({type(error).__name__})"
    return None


def open_prepared(folder: Path) -> PreparedData:
    """Maps a folder without a flaw into memory."""
    manifest = json.loads((folder / MANIFEST).read_text())
    tokenizer = load_tokenizer(folder)
    train, val = (
        TokenFile(
            np.memmap(folder / f"{split}.bin", np.dtype(manifest["dtype"]), mode="r"),
            np.memmap(folder / f"{split}.documents", np.dtype("<i8"), mode="r"),
        )
        for split in SPLITS
    )
    return PreparedData(tokenizer, tokenizer.n_vocab, train, val, manifest, folder)


def checksums(path: Path) -> list[int]:
    """CRC-32 of each CHUNK of the file, in parallel: zlib lets go of the interpreter's lock."""
    content = np.memmap(path, np.uint8, mode="r") if path.stat().st_size else np.empty(0, np.uint8)
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda i: zlib.crc32(content[i : i + CHUNK].data), range(0, len(content), CHUNK)))


def digest(content: Any) -> str:
    """SHA-256 of JSON content."""
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def to_disk(file: IO[Any]) -> None:
    """Returns when the file's content has reached the disk."""
    file.flush()
    os.fsync(file.fileno())
