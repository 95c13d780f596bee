"""Tokens on disk: a folder that is either whole and memory-mapped, or not there.

train.bin  val.bin                  tokens, of the smallest unsigned type that holds the vocabulary
train.documents  val.documents      where each document begins, int64
tokenizer.json                      see tokenizers.py
manifest.json                       what all this was made from, with sizes and checksums

While it is prepared it has another name, and position.json in place of the manifest.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

import numpy as np
import tiktoken

from data.errors import DataError
from data.tokenizers import load_tokenizer
from files import sync, write_atomically

SPLITS = ("train", "val")
MANIFEST = "manifest.json"
POSITION = "position.json"
OFFSET = np.dtype("<i8")  # of a document's beginning
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
    """Appends to one split, with end-of-text between its documents.

    tokens, documents   how many are written
    """

    def __init__(
        self, folder: Path, split: str, dtype: np.dtype, end_of_text: int, tokens: int = 0, documents: int = 0
    ):
        """Goes on after the first `tokens` and `documents` of what an interrupted preparation has written."""
        self.dtype, self.end_of_text = dtype, np.array([end_of_text], dtype)
        self.tokens, self.documents = tokens, documents
        self._tokens = (folder / f"{split}.bin").open("ab", buffering=1 << 20)
        self._documents = (folder / f"{split}.documents").open("ab")
        self._tokens.truncate(tokens * dtype.itemsize)
        self._documents.truncate(documents * OFFSET.itemsize)

    def write(self, tokens: np.ndarray, opens: bool, room: int | None = None) -> int:
        """Appends a piece of a document, which it `opens` or continues: at most `room` tokens. Returns how many."""
        before = self.tokens
        if opens and before:
            self._append(self.end_of_text[:room])
        if room is not None:
            tokens = tokens[: room - (self.tokens - before)]
        if opens and len(tokens):
            self._documents.write(np.array([self.tokens], OFFSET).tobytes())
            self.documents += 1
        self._append(tokens)
        return self.tokens - before

    def sync(self) -> dict[str, int]:
        """Brings everything to the disk; returns the counts."""
        to_disk(self._tokens)
        to_disk(self._documents)
        return {"tokens": self.tokens, "documents": self.documents}

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, *_: object) -> None:
        with self._tokens, self._documents:  # both are closed, even if the first has no room for its last block
            pass

    def _append(self, tokens: np.ndarray) -> None:
        self._tokens.write(tokens.astype(self.dtype, copy=False).tobytes())
        self.tokens += len(tokens)


@dataclass
class Position:
    """How far a preparation is; everything before it lies on the disk.

    stream  index of the corpus's stream that is being tokenised
    rows    of that stream that are done
    room    tokens that the stream may still fill; None without a limit, or before its first row
    done    of what the progress counts
    splits  what each split's TokenWriter has written: {"tokens": ..., "documents": ...}
    """

    stream: int = 0
    rows: int = 0
    room: int | None = None
    done: int = 0
    splits: dict[str, dict[str, int]] = field(
        default_factory=lambda: {s: {"tokens": 0, "documents": 0} for s in SPLITS}
    )


def token_dtype(tokenizer: tiktoken.Encoding) -> np.dtype:
    """The smallest unsigned type that holds every token."""
    return np.dtype(np.min_scalar_type(tokenizer.n_vocab - 1)).newbyteorder("<")


def partial_folder(folder: Path) -> Path:
    """Where `folder` is prepared, before it gets its name."""
    return folder.with_name(f".{folder.name}.partial")


def save_position(partial: Path, recipe: dict[str, Any], position: Position) -> None:
    """Notes how far the preparation in `partial` is, so that it goes on from there if it is interrupted."""
    write_atomically(partial / POSITION, json.dumps({"recipe": recipe, **asdict(position)}))


def load_position(partial: Path, recipe: dict[str, Any]) -> Position | None:
    """Where a preparation by this recipe was interrupted; None where none was, or where its files are not whole."""
    try:
        content = json.loads((partial / POSITION).read_text())
        if content.pop("recipe") != recipe:
            return None
        position = Position(**content)
        sizes = {"bin": token_dtype(load_tokenizer(partial)).itemsize, "documents": OFFSET.itemsize}
        for split, counts in position.splits.items():
            for suffix, count in (("bin", counts["tokens"]), ("documents", counts["documents"])):
                if count and (partial / f"{split}.{suffix}").stat().st_size < count * sizes[suffix]:
                    return None
    except (OSError, ValueError, KeyError, TypeError, DataError):
        return None
    return position


def publish(folder: Path) -> None:
    """Gives what was prepared in `partial_folder` its name, in the place of what had it."""
    if folder.exists():
        shutil.rmtree(folder)
    partial_folder(folder).rename(folder)
    (folder / POSITION).unlink()
    sync(folder.parent)


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Adds the sizes and checksums of the folder's files to the content, and writes it beside them."""
    paths = [path for path in sorted(folder.iterdir()) if path.name != POSITION]
    files = {path.name: {"bytes": path.stat().st_size, "crc32": checksums(path)} for path in paths}
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
            np.memmap(folder / f"{split}.documents", OFFSET, mode="r"),
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
