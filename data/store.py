"""Tokens on disk, memory-mapped: a folder that is either complete or absent.

train.bin  val.bin                  tokens, in the smallest unsigned type that holds the vocabulary
train.documents  val.documents      where each document begins, int64
train.answers  val.answers          only for conversations: 1 for each token of an answer, else 0, uint8
tokenizer.json                      see tokenizers.py
manifest.json                       how the files were made, with sizes and checksums

During preparation the folder has another name, and position.json instead of the manifest.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

import numpy as np

from data.atomic import sync, to_disk, write_atomically
from data.errors import DataError
from data.tokenizers import Tokenizer, load_tokenizer
from data.untrusted import read_json

SPLITS = ("train", "val")
MANIFEST = "manifest.json"
POSITION = "position.json"
OFFSET = np.dtype("<i8")  # the start of a document
CHUNK = 1 << 26  # bytes per checksum


@dataclass(frozen=True)
class TokenFile:
    """One split, memory-mapped.

    tokens     1-D unsigned
    documents  where each begins, 1-D int64
    answers    1 for each token of an answer, else 0, 1-D uint8; None where the text is not conversations
    """

    tokens: np.ndarray
    documents: np.ndarray
    answers: np.ndarray | None = None

    @property
    def stops(self) -> np.ndarray:
        """Where each document ends: between two stands the end of text."""
        return np.append(self.documents[1:] - 1, len(self.tokens))


@dataclass(frozen=True)
class PreparedData:
    """The tokens for training. `manifest["identity"]` is equal for equal tokens, wherever they were prepared.

    parts  of several corpora: the tokens of each, by its path; the other fields are the first one's
    """

    tokenizer: Tokenizer
    vocab_size: int
    train: TokenFile
    val: TokenFile
    manifest: dict[str, Any]
    folder: Path
    parts: dict[str, PreparedData] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        """Equal for equal tokens."""
        if self.parts:
            return digest([part.identity for part in self.parts.values()])
        return self.manifest["identity"]

    @property
    def notes(self) -> list[str]:
        """Sentences on what is amiss with the text."""
        of_parts = [f"{path}: {note}" for path, part in self.parts.items() for note in part.notes]
        across = "Documents in the training text of one corpus and the validation text of another are not counted."
        return [*of_parts, across] if self.parts else self.manifest["notes"]


class TokenWriter:
    """Appends to one split, with end-of-text between its documents.

    tokens, documents   how many are written
    """

    def __init__(
        self,
        stack: ExitStack,
        folder: Path,
        split: str,
        dtype: np.dtype,
        end_of_text: int,
        tokens: int = 0,
        documents: int = 0,
        marks: bool = False,
    ):
        """Continue after the first `tokens` and `documents` of an interrupted preparation.

        stack  closes the files
        marks  whether answers are marked
        """
        self.dtype, self.end_of_text = dtype, np.array([end_of_text], dtype)
        self.tokens, self.documents = tokens, documents
        self._files: dict[str, IO[bytes]] = {}
        for suffix, size in sizes(dtype, marks, tokens, documents).items():
            file = stack.enter_context((folder / f"{split}.{suffix}").open("ab", buffering=1 << 20))
            file.truncate(size)
            self._files[suffix] = file

    def write(self, tokens: np.ndarray, opens: bool, room: int, answers: np.ndarray | None = None) -> int:
        """Append a piece that `opens` or continues a document: at most `room` tokens. Returns how many.

        answers  1 for each token of an answer, else 0
        """
        before = self.tokens
        if opens and before:
            self._append(self.end_of_text[:room])
        tokens = tokens[: room - (self.tokens - before)]
        if opens and len(tokens):
            self._files["documents"].write(np.array([self.tokens], OFFSET).tobytes())
            self.documents += 1
        self._append(tokens, answers)
        return self.tokens - before

    def sync(self) -> dict[str, int]:
        """Flush everything to the disk; returns the counts."""
        for file in self._files.values():
            to_disk(file)
        return {"tokens": self.tokens, "documents": self.documents}

    def _append(self, tokens: np.ndarray, answers: np.ndarray | None = None) -> None:
        self._files["bin"].write(tokens.astype(self.dtype, copy=False).tobytes())
        if "answers" in self._files:
            self._files["answers"].write(bytes(len(tokens)) if answers is None else answers.tobytes())
        self.tokens += len(tokens)


@dataclass
class Position:
    """The state of a preparation; everything before it is on the disk.

    stream  index of the corpus's stream that is being tokenised
    rows    finished rows of that stream
    room    tokens that the stream may still fill; None before its first row
    empty   rows that were null or empty, and left out
    lost    characters that the tokens do not give back
    bytes   of the text of each split
    splits  counts written for each split: {"tokens": ..., "documents": ...}
    """

    stream: int = 0
    rows: int = 0
    room: int | None = None
    empty: int = 0
    lost: int = 0
    bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    splits: dict[str, dict[str, int]] = field(
        default_factory=lambda: {s: {"tokens": 0, "documents": 0} for s in SPLITS}
    )


def token_dtype(tokenizer: Tokenizer) -> np.dtype:
    """The smallest unsigned type that holds every token."""
    return np.dtype(np.min_scalar_type(tokenizer.n_vocab - 1)).newbyteorder("<")


def sizes(dtype: np.dtype, marks: bool, tokens: int, documents: int) -> dict[str, int]:
    """The bytes of a split's files, by their suffix."""
    of_text = {"bin": tokens * dtype.itemsize, "documents": documents * OFFSET.itemsize}
    return of_text | ({"answers": tokens} if marks else {})


def partial_folder(folder: Path) -> Path:
    """The temporary folder in which `folder` is prepared."""
    return folder.with_name(f".{folder.name}.partial")


def save_position(partial: Path, recipe: dict[str, Any], position: Position) -> None:
    """Save the state of the preparation in `partial`, so that an interrupted one continues from there."""
    write_atomically(partial / POSITION, json.dumps({"recipe": recipe, **asdict(position)}))


def load_position(partial: Path, recipe: dict[str, Any]) -> Position | None:
    """The point where a preparation with this recipe was interrupted; None without one, or with incomplete files."""
    try:
        content = read_json(partial / POSITION)
        if content.pop("recipe") != recipe:
            return None
        position = Position(**content)
        dtype = token_dtype(load_tokenizer(partial))
        for split, counts in position.splits.items():
            for suffix, size in sizes(dtype, (partial / f"{split}.answers").exists(), **counts).items():
                if size and (partial / f"{split}.{suffix}").stat().st_size < size:
                    return None
    except (OSError, ValueError, KeyError, TypeError, DataError):
        return None
    return position


def publish(folder: Path) -> None:
    """Rename the prepared `partial_folder` to `folder`, replacing an older one."""
    if folder.exists():
        shutil.rmtree(folder)
    partial_folder(folder).rename(folder)
    (folder / POSITION).unlink()
    sync(folder.parent)


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Write the content with the sizes and checksums of the folder's files as its manifest."""
    paths = [path for path in sorted(folder.iterdir()) if path.name != POSITION]
    files = {path.name: {"bytes": path.stat().st_size, "crc32": checksums(path)} for path in paths}
    manifest = {"identity": digest(files), **content, "files": files}
    with (folder / MANIFEST).open("w") as file:
        json.dump(manifest, file, indent=1)
        to_disk(file)


def find_damage(folder: Path, recipe: dict[str, Any]) -> str | None:
    """Why the folder does not match the recipe; None if it does and every byte matches its manifest."""
    try:
        manifest = read_json(folder / MANIFEST)
        if manifest["recipe"] != recipe:
            return "the text or the format of the tokens has changed"
        for name, file in manifest["files"].items():
            path = folder / name
            if (size := path.stat().st_size) != file["bytes"]:
                return f"{path} has {size} bytes instead of {file['bytes']}"
            if checksums(path) != file["crc32"]:
                return f"{path} is corrupt"
    except OSError as error:
        return f"{error.filename or folder} cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{folder / MANIFEST} is corrupt"
    return None


def map_split(folder: Path, split: str, dtype: np.dtype) -> TokenFile:
    """Map a split into memory."""
    return TokenFile(
        np.memmap(folder / f"{split}.bin", dtype, mode="r"),
        np.memmap(folder / f"{split}.documents", OFFSET, mode="r"),
        np.memmap(marks, np.uint8, mode="r") if (marks := folder / f"{split}.answers").exists() else None,
    )


def repeated(train: TokenFile, val: TokenFile) -> int:
    """The documents of the validation split that also stand in training."""

    def digests(split: TokenFile, lengths: np.ndarray) -> Iterator[bytes]:
        stops = split.stops
        for i in np.flatnonzero(np.isin(stops - split.documents, lengths)):
            yield sha256(split.tokens[split.documents[i] : stops[i]].tobytes()).digest()

    lengths = val.stops - val.documents
    in_training = set(digests(train, lengths))
    return sum(document in in_training for document in digests(val, lengths))


def open_prepared(folder: Path) -> PreparedData:
    """Map an intact folder into memory."""
    manifest = read_json(folder / MANIFEST)
    tokenizer = load_tokenizer(folder)
    train, val = (map_split(folder, split, np.dtype(manifest["dtype"])) for split in SPLITS)
    return PreparedData(tokenizer, tokenizer.n_vocab, train, val, manifest, folder)


def checksums(path: Path) -> list[int]:
    """CRC-32 of each CHUNK of the file, in parallel: zlib releases the interpreter lock."""
    content = np.memmap(path, np.uint8, mode="r") if path.stat().st_size else np.empty(0, np.uint8)
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda i: zlib.crc32(content[i : i + CHUNK].data), range(0, len(content), CHUNK)))


def digest(content: Any) -> str:
    """SHA-256 of JSON content."""
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
