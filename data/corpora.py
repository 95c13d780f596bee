"""Where text comes from: a corpus is one or two streams of rows, each row bound for a split.

Every corpus is read through `datasets.IterableDataset`, row by row, so that none has to fit the memory:

    {"split": "train" | "val", "text": str, "opens": bool}      opens: this row begins a document

A corpus of one file gives its last part to validation; a corpus of many files holds out whole files; a
streamed corpus, whose length nobody knows, holds out every so many-th document.
"""

from __future__ import annotations

import glob
import math
import os
import re
import sys
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from errors import UserError

if TYPE_CHECKING:
    from data.prepare import DataConfig

Row = dict[str, Any]
BLOCK = 1 << 22  # bytes of a text file read at a time
ROWS_SUFFIXES = (".jsonl", ".parquet")
TEXT_SUFFIXES = (".txt", *ROWS_SUFFIXES)

# After a printable character and before a lone space or newline, GPT-2's pattern always ends a piece, so that
# a document cut there has the same tokens as the whole. Both neighbours being ASCII, no character is cut either.
_LAST_CUT = re.compile(rb".*[!-~](?=[ \n][!-~])", re.DOTALL)


class DataError(UserError):
    """Data that cannot be found, read, tokenised or cut into windows."""


class Stream(NamedTuple):
    """Rows, and the part of `data.max_tokens` they may fill."""

    rows: Iterable[Row]
    share: float


class Corpus(ABC):
    """A source of documents."""

    bytes: int | None = None  # of text, where it is known beforehand

    @abstractmethod
    def source(self) -> dict[str, Any]:
        """What the text is, as JSON: two equal descriptions promise equal text."""

    @abstractmethod
    def streams(self) -> list[Stream]:
        """The rows, in an order that never changes, and each split's documents in one stream only."""


@dataclass(frozen=True)
class Span:
    """A part of a file: bytes of text, rows of .jsonl and .parquet."""

    path: str
    split: str
    start: int
    stop: int


class FileCorpus(Corpus):
    """Local files, in the order of their names."""

    def __init__(self, name: str, root: Path, files: list[Path], val_fraction: float, text_field: str):
        self.name, self.root, self.val_fraction, self.text_field = name, root, val_fraction, text_field
        stats = {file: file.stat() for file in sorted(files, key=lambda f: f.relative_to(root).as_posix())}
        self.files = {file: stat.st_size for file, stat in stats.items() if stat.st_size}
        self.empty = [file for file, stat in stats.items() if not stat.st_size]
        self.bytes = sum(self.files.values())
        if not self.files:
            raise DataError(f"{_names(self.empty)} of data={name} holds no text: name files that do with data.path=...")
        listing = [(f.relative_to(root).as_posix(), stat.st_size, stat.st_mtime_ns) for f, stat in stats.items()]
        self.digest = sha256(repr(listing).encode()).hexdigest()

    def source(self) -> dict[str, Any]:
        return {"corpus": self.name, "path": str(self.root), "files": len(self.files), "digest": self.digest}

    def streams(self) -> list[Stream]:
        spans = self._cut_file() if len(self.files) == 1 else self._hold_out_files()
        shares = {"train": 1 - self.val_fraction, "val": self.val_fraction}
        return [
            Stream(
                _dataset(_read_spans, spans=[s for s in spans if s.split == split], text_field=self.text_field), share
            )
            for split, share in shares.items()
        ]

    def held_out(self) -> set[Path]:
        """The files of the validation split, chosen by the hash of their names until `val_fraction` is filled."""
        room = self.val_fraction * sum(self.files.values())
        largest = sum(self.files.values()) / 2
        held: set[Path] = set()
        filled = 0
        for file in sorted(self.files, key=lambda f: sha256(f.relative_to(self.root).as_posix().encode()).digest()):
            if filled + self.files[file] <= room:
                held.add(file)
                filled += self.files[file]
        if filled < room / 2:  # a few large files: the smallest that comes near
            near = [f for f, size in self.files.items() if room / 2 < size <= largest]
            held = {min(near, key=self.files.__getitem__)} if near else held
        return held or {min(self.files, key=self.files.__getitem__)}

    def _hold_out_files(self) -> list[Span]:
        held = self.held_out()
        return [Span(str(f), "val" if f in held else "train", 0, sys.maxsize) for f in self.files]

    def _cut_file(self) -> list[Span]:
        [(file, size)] = self.files.items()
        if file.suffix in ROWS_SUFFIXES:
            size = sum(1 for _ in _rows_of(file))
            cut = _train_part(size, self.val_fraction)
            if not 0 < cut < size:
                raise DataError(
                    f"{file} has {size} rows, too few for a validation split of {self.val_fraction:g} of them: "
                    "give more rows or change data.val_fraction"
                )
        else:
            cut = _train_part(size, self.val_fraction)
            with file.open("rb") as f:
                f.seek(cut)
                while (byte := f.read(1)) and 0x80 <= byte[0] < 0xC0:  # inside a UTF-8 character
                    cut += 1
        return [Span(str(file), "train", 0, cut), Span(str(file), "val", cut, sys.maxsize)]


class HubCorpus(Corpus):
    """A data set of the Hugging Face hub, streamed; documents spread evenly over it are the validation split."""

    def __init__(self, config: DataConfig):
        if config.hub is None:
            raise DataError(f"data={config.name} needs the name of a data set on the hub: set data.hub=<owner>/<name>")
        self.config = config

    def source(self) -> dict[str, Any]:
        c = self.config
        fields = {"hub": c.hub, "revision": c.hub_revision, "subset": c.hub_subset, "split": c.hub_split}
        return {"corpus": c.name, **fields}

    def streams(self) -> list[Stream]:
        return [Stream(_dataset(self._spread), 1.0)]

    def _spread(self) -> Iterator[Row]:
        f = self.config.val_fraction
        for i, text in enumerate(self._texts()):
            yield {
                "split": "val" if math.ceil((i + 1) * f) > math.ceil(i * f) else "train",
                "text": text,
                "opens": True,
            }

    def _texts(self) -> Iterator[str]:
        c = self.config
        try:
            for row in _load_from_hub(str(c.hub), c.hub_subset, c.hub_split, c.hub_revision):
                if text := _text_of(row, c.text_field, str(c.hub)):
                    yield text
        except UserError:
            raise
        except Exception as error:  # of whatever kind: the hub's libraries raise some dozens
            raise DataError(
                f"could not stream {c.hub} from the Hugging Face hub ({brief(error)}): check the network and the names "
                "under data.hub, or train on text at hand with data=stdlib or data=text data.path=<file or folder>"
            ) from error


class JoinedHubCorpus(HubCorpus):
    """A small data set of the hub whose rows are the parts of one text; its last part is the validation split."""

    def streams(self) -> list[Stream]:
        text = "".join(self._texts())
        cut = _train_part(len(text), self.config.val_fraction)
        return [
            Stream([{"split": "train", "text": text[:cut], "opens": True}], 1 - self.config.val_fraction),
            Stream([{"split": "val", "text": text[cut:], "opens": True}], self.config.val_fraction),
        ]


def stdlib(config: DataConfig) -> Corpus:
    """The source text of the running Python's standard library, without its tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = set(subfolders) - left_out
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if not files:
        raise DataError(f"this Python has no source text in {root}: use data=text data.path=<file or folder>")
    return FileCorpus(config.name, root, files, config.val_fraction, config.text_field)


def text(config: DataConfig) -> Corpus:
    """Local .txt, .jsonl and .parquet: one file, or all those in a folder and below it."""
    if config.path is None:
        raise DataError("data=text needs to know where the text is: set data.path=<file or folder>")
    path = Path(config.path).expanduser().resolve()
    if not path.exists():
        raise DataError(f"data.path={config.path} does not exist: name a file or a folder of {_list(TEXT_SUFFIXES)}")
    if path.is_file():
        if path.suffix not in TEXT_SUFFIXES:
            raise DataError(f"data.path={config.path} has to end in {_list(TEXT_SUFFIXES)}: rename or convert the file")
        return FileCorpus(config.name, path.parent, [path], config.val_fraction, config.text_field)
    files = [f for f in path.rglob("*") if f.suffix in TEXT_SUFFIXES and f.is_file()]
    files = [f for f in files if not any(part.startswith(".") for part in f.relative_to(path).parts)]
    if not files:
        raise DataError(f"data.path={config.path} holds no {_list(TEXT_SUFFIXES)} file: name a folder that does")
    return FileCorpus(config.name, path, files, config.val_fraction, config.text_field)


CORPORA = {
    "stdlib": stdlib,
    "text": text,
    "shakespeare": JoinedHubCorpus,
    "openwebtext": HubCorpus,
    "fineweb_edu": HubCorpus,
}


def _dataset(generator: Any, **arguments: Any) -> Iterable[Row]:
    """The generator's rows as a `datasets.IterableDataset`."""
    from datasets import IterableDataset  # takes a second to import, and a warm start reads no text

    return IterableDataset.from_generator(generator, gen_kwargs=arguments or None)


def _read_spans(spans: list[Span], text_field: str) -> Iterator[Row]:
    for span in spans:
        path = Path(span.path)
        if path.suffix in ROWS_SUFFIXES:
            for row in islice(_rows_of(path), span.start, span.stop):
                if text := _text_of(row, text_field, span.path):
                    yield {"split": span.split, "text": text, "opens": True}
        else:
            for i, text in enumerate(_pieces_of(path, span.start, span.stop)):
                yield {"split": span.split, "text": text, "opens": i == 0}


def _pieces_of(path: Path, start: int, stop: int) -> Iterator[str]:
    """The text of a file from byte to byte, in pieces that have the same tokens apart as together."""
    piece, offset = b"", start
    try:
        with path.open("rb") as file:
            file.seek(start)
            while block := file.read(min(BLOCK, stop - offset - len(piece))):
                piece += block
                if cut := _LAST_CUT.match(piece):
                    yield _decode(piece[: cut.end()], path, offset)
                    piece, offset = piece[cut.end() :], offset + cut.end()
    except OSError as error:
        raise DataError(
            f"could not read {path} ({brief(error)}): make it readable or name another data.path"
        ) from error
    if piece:
        yield _decode(piece, path, offset)


def _decode(piece: bytes, path: Path, offset: int) -> str:
    if (zero := piece.find(0)) >= 0:
        raise DataError(f"{path} is binary (a zero at byte {offset + zero}): take it away or name another data.path")
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 (0x{piece[error.start]:02x} at byte {offset + error.start}): "
            "convert it, for instance with iconv, or name another data.path"
        ) from None


def _rows_of(path: Path) -> Iterator[Row]:
    import datasets

    kind = {".jsonl": "json", ".parquet": "parquet"}[path.suffix]
    try:
        # Escaped, because `datasets` takes the brackets of a file name for a pattern.
        yield from datasets.load_dataset(kind, data_files=glob.escape(str(path)), split="train", streaming=True)
    except Exception as error:
        raise DataError(
            f"could not read {path} as {path.suffix} ({brief(error)}): repair it or name another data.path"
        ) from error


def _text_of(row: Row, field: str, where: str) -> str:
    if field not in row:
        raise DataError(f"{where} has no field {field!r} but {_list(row)}: choose one with data.text_field=...")
    text = row[field]
    if text is not None and not isinstance(text, str):
        raise DataError(
            f"{where} holds a {type(text).__name__} in {field!r} where text belongs: set data.text_field=..."
        )
    return text or ""


def _load_from_hub(hub: str, subset: str | None, split: str, revision: str | None) -> Iterator[Row]:
    import datasets
    from huggingface_hub import HfApi

    HfApi().dataset_info(
        hub, revision=revision, timeout=20
    )  # fails at once where load_dataset retries for half a minute
    try:
        parts = [
            datasets.load_dataset(hub, subset, split=s, revision=revision, streaming=True) for s in split.split("+")
        ]
    except RuntimeError as error:
        if "scripts are no longer supported" not in str(error):
            raise
        # Kept as a loading script; the hub's own conversion of it can be read.
        converted = "refs/convert/parquet"
        parts = [
            datasets.load_dataset(hub, subset, split=s, revision=converted, streaming=True) for s in split.split("+")
        ]
    for part in parts:
        yield from part


def _train_part(size: int, val_fraction: float) -> int:
    return int(size * (1 - val_fraction))


def brief(error: BaseException) -> str:
    """An exception of another library in a few words."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__


def _list(names: Iterable[str]) -> str:
    return ", ".join(names)


def _names(files: list[Path]) -> str:
    return _list([f.name for f in files[:5]] + (["..."] if len(files) > 5 else []))
