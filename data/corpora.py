"""Where text comes from: a corpus is one or two streams of rows, each row bound for a split.

Rows come through `datasets.IterableDataset`, one by one, so that no corpus has to fit the memory:

    {"split": "train" | "val", "text": str, "opens": bool}      opens: this row begins a document

A corpus of one file gives its last part to validation; a corpus of many files holds out whole files; a stream,
whose length nobody knows, holds out documents spread evenly over it.
"""

from __future__ import annotations

import math
import os
import sys
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from data.errors import DataError, brief
from data.files import TABLES, TEXT_SUFFIXES, Row, Span, character_boundary, listed, read_spans, table_rows, text_of
from errors import UserError

if TYPE_CHECKING:
    from data.prepare import DataConfig


class Stream(NamedTuple):
    """Rows, and the share of `data.max_tokens` that they may fill."""

    rows: Iterable[Row]
    share: float


class Corpus(ABC):
    """A source of documents."""

    size: int | None = None  # bytes of text, where that is known beforehand
    empty: tuple[Path, ...] = ()  # files without text, which are left out

    @abstractmethod
    def source(self) -> dict[str, Any]:
        """What the text is, as JSON: as long as this is equal, so is the text."""

    @abstractmethod
    def streams(self) -> list[Stream]:
        """The rows, in an order that never changes."""


class FileCorpus(Corpus):
    """Local files below a folder, in the order of their names."""

    def __init__(self, config: DataConfig, root: Path, files: list[Path]):
        self.config, self.root = config, root
        stats = {self._name(file): (file, file.stat()) for file in files}
        self.files = {stats[name][0]: stats[name][1].st_size for name in sorted(stats) if stats[name][1].st_size}
        self.empty = tuple(file for file, stat in stats.values() if not stat.st_size)
        self.size = self.total = sum(self.files.values())
        if not self.files:
            raise DataError(f"{listed(files)}: nothing but empty files; name others with data.path=...")
        listing = [(name, stats[name][1].st_size, stats[name][1].st_mtime_ns) for name in sorted(stats)]
        self.fingerprint = sha256(repr(listing).encode()).hexdigest()

    def source(self) -> dict[str, Any]:
        files = self.files if len(self.files) == 1 else [self.root]
        return {"corpus": self.config.name, "path": str(*files), "fingerprint": self.fingerprint}

    def streams(self) -> list[Stream]:
        spans = self._cut_one() if len(self.files) == 1 else self._hold_out_some()
        shares = {"train": 1 - self.config.val_fraction, "val": self.config.val_fraction}
        return [
            Stream(
                _dataset(read_spans, spans=[s for s in spans if s.split == split], text_field=self.config.text_field),
                share,
            )
            for split, share in shares.items()
        ]

    def held_out(self) -> set[Path]:
        """The files of the validation split: in the order of their names' hashes until `val_fraction` is filled."""
        room = self.config.val_fraction * self.total
        order = sorted(self.files, key=lambda file: sha256(self._name(file).encode()).digest())
        for largest in (room / 8, room):  # many files rather than few, so that no single one decides the loss
            held: set[Path] = set()
            filled = 0
            for file in order:
                if self.files[file] <= min(largest, room - filled):
                    held.add(file)
                    filled += self.files[file]
            if filled >= room / 2:
                return held
        near = [file for file in order if room / 2 < self.files[file] <= self.total / 2]
        if near or not held:
            held = {min(near or order, key=self.files.__getitem__)}
        return held

    def _hold_out_some(self) -> list[Span]:
        held = self.held_out()
        return [Span(str(file), "val" if file in held else "train", 0, sys.maxsize) for file in self.files]

    def _cut_one(self) -> list[Span]:
        [file] = self.files
        if file.suffix in TABLES:
            cut = _train_part(sum(1 for _ in table_rows(file)), self.config.val_fraction)
        else:
            cut = character_boundary(file, _train_part(self.total, self.config.val_fraction))
        return [Span(str(file), "train", 0, cut), Span(str(file), "val", cut, sys.maxsize)]

    def _name(self, file: Path) -> str:
        return file.relative_to(self.root).as_posix()


class HubCorpus(Corpus):
    """A data set of the Hugging Face hub, streamed."""

    def __init__(self, config: DataConfig):
        if config.hub is None:
            raise DataError(f"data={config.name} needs the name of a data set; set data.hub=<owner>/<name>.")
        self.config = config

    def source(self) -> dict[str, Any]:
        c = self.config
        names = {"hub": c.hub, "revision": c.hub_revision, "subset": c.hub_subset, "split": c.hub_split}
        return {"corpus": c.name, **names}

    def streams(self) -> list[Stream]:
        return [Stream(_dataset(self._spread), 1.0)]

    def texts(self) -> Iterator[str]:
        """The text of every row that has some."""
        c = self.config
        try:
            for row in _hub_rows(str(c.hub), c.hub_subset, c.hub_split, c.hub_revision):
                if text := text_of(row, c.text_field, str(c.hub)):
                    yield text
        except UserError:
            raise
        except Exception as error:  # of whatever kind: the hub's libraries raise some dozens
            raise DataError(
                f"could not stream {c.hub} from the Hugging Face hub ({brief(error)}); check the network and the names "
                "under data.hub, or train on text at hand with data=stdlib or data=text data.path=<file or folder>."
            ) from error

    def _spread(self) -> Iterator[Row]:
        fraction = self.config.val_fraction
        for i, text in enumerate(self.texts()):
            held = math.ceil((i + 1) * fraction) > math.ceil(i * fraction)  # the first, and evenly from there
            yield {"split": "val" if held else "train", "text": text, "opens": True}


class JoinedHubCorpus(HubCorpus):
    """A small data set of the hub whose rows are the parts of one text, and whose last part is for validation."""

    def streams(self) -> list[Stream]:
        text, fraction = "".join(self.texts()), self.config.val_fraction
        cut = _train_part(len(text), fraction)
        return [
            Stream([{"split": "train", "text": text[:cut], "opens": True}], 1 - fraction),
            Stream([{"split": "val", "text": text[cut:], "opens": True}], fraction),
        ]


def stdlib(config: DataConfig) -> Corpus:
    """The source text of the running Python's standard library, without its tests and what is installed in it."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = set(subfolders) - left_out
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    files = [file for file in files if file.stat().st_size]  # empty __init__.py are nothing to report
    if not files:
        raise DataError(f"this Python has no source text in {root}; use data=text data.path=<file or folder>.")
    return FileCorpus(config, root, files)


def text(config: DataConfig) -> Corpus:
    """Local .txt, .jsonl and .parquet: one file, or all in and below a folder but for the hidden ones."""
    accepted = ", ".join(TEXT_SUFFIXES)
    if config.path is None:
        raise DataError("data=text needs to know where the text is; set data.path=<file or folder>.")
    path = Path(config.path).expanduser().resolve()
    if not path.exists():
        raise DataError(f"data.path={config.path} does not exist; set it to a file ({accepted}) or a folder of them.")
    if path.is_file():
        if path.suffix not in TEXT_SUFFIXES:
            raise DataError(f"data.path={config.path} must end in one of {accepted}; rename or convert the file.")
        return FileCorpus(config, path.parent, [path])
    files = [f for f in path.rglob("*") if f.suffix in TEXT_SUFFIXES and f.is_file()]
    files = [f for f in files if not any(part.startswith(".") for part in f.relative_to(path).parts)]
    if not files:
        raise DataError(f"data.path={config.path} holds no file that ends in one of {accepted}; set another folder.")
    return FileCorpus(config, path, files)


CORPORA: dict[str, Callable[[DataConfig], Corpus]] = {
    "stdlib": stdlib,
    "text": text,
    "shakespeare": JoinedHubCorpus,
    "openwebtext": HubCorpus,
    "fineweb_edu": HubCorpus,
}
HUB_CORPORA = ("shakespeare", "openwebtext", "fineweb_edu")


def _dataset(generator: Callable[..., Iterator[Row]], **arguments: Any) -> Iterable[Row]:
    from datasets import IterableDataset  # takes a second to import, which a run with prepared tokens saves

    return IterableDataset.from_generator(generator, gen_kwargs=arguments or None)


def _hub_rows(hub: str, subset: str | None, splits: str, revision: str | None) -> Iterator[Row]:
    import datasets
    from huggingface_hub import HfApi

    def load(revision: str | None) -> list[datasets.IterableDataset]:
        names = splits.split("+")
        return [datasets.load_dataset(hub, subset, split=s, revision=revision, streaming=True) for s in names]

    HfApi().dataset_info(hub, revision=revision, timeout=20)  # without network, load_dataset retries for half a minute
    try:
        parts = load(revision)
    except RuntimeError as error:
        if "scripts are no longer supported" not in str(error):
            raise
        parts = load("refs/convert/parquet")  # what the hub itself makes of a data set that is a loading script
    for part in parts:
        yield from part


def _train_part(size: int, val_fraction: float) -> int:
    return int(size * (1 - val_fraction))
