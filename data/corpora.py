"""The corpora by name: local files, conversations, and data sets of the hub.

A corpus is one or two streams of rows, and each row belongs to a split. Rows are read one by one, so no corpus has to
fit into memory:

    {"split": "train" | "val", "text": str, "opens": bool}      opens: this row begins a document

A corpus of one file gives its last part to validation. A corpus of many files holds out whole files. A stream
of unknown length holds out documents spread evenly over it.
"""

import math
import os
import re
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import cache, cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from data.chat import chat_encoder, read_conversations, read_template
from data.errors import DataError, brief, first_few, unreadable
from data.files import (
    ACCEPTED,
    CHARACTERS,
    TABLES,
    TEXT_SUFFIXES,
    TOKENS,
    Row,
    Span,
    character_boundary,
    kind,
    read_spans,
    table_rows,
    text_of,
    text_size,
)
from data.options import DataConfig, HubRows
from data.own_tokenizer import OwnTokenizer
from data.tokenizers import Tokenised, Tokenizer, encoder

SPLIT_NAMES = {
    "train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val",
    "test": "test",
}  # fmt: skip


class Stream(NamedTuple):
    """Rows, and the share of `data.max_tokens` that they can fill at most."""

    rows: Iterable[Row]
    share: float


class Corpus(ABC):
    """A source of documents."""

    size: int | None = None  # bytes of text, if known in advance

    @abstractmethod
    def source(self) -> dict[str, Any]:
        """JSON that identifies the text: equal JSON means equal text."""

    @abstractmethod
    def streams(self) -> list[Stream]:
        """The rows, in an order that never changes."""

    @abstractmethod
    def rows(self) -> Iterator[Row]:
        """All rows in their order, whatever their split."""

    def encoder(self, tokenizer: Tokenizer) -> Callable[[Row], Tokenised]:
        """row -> its tokens; threads can call it in parallel."""
        encode = encoder(tokenizer)

        def tokenised(row: Row) -> Tokenised:
            tokens = row.get(TOKENS) if tokenizer.name == "gpt2" else None
            tokens = encode(row["text"]) if tokens is None else tokens
            lost = tokenizer.lost(tokens.tolist(), row["text"]) if isinstance(tokenizer, OwnTokenizer) else 0
            return tokens, None, lost

        return tokenised

    def notices(self) -> list[str]:
        """Sentences about anything unexpected in how this text is used."""
        return []


def train_part(size: int, val_fraction: float) -> int:
    """The part of `size` characters, bytes or rows that is for training: the first ones."""
    return int(size * (1 - val_fraction))


class FileCorpus(Corpus):
    """Local files below a folder, in the order of their names."""

    def __init__(self, config: DataConfig, root: Path, files: list[Path], others: Sequence[Path] = ()):
        """others  files of other types in the same folder, which are left out"""
        self.config, self.root, self.others = config, root, others
        stats = sorted((self._name(file), file, file.stat()) for file in files)
        self.files = {file: stat.st_size for _, file, stat in stats if stat.st_size}
        self.empty = [file for _, file, stat in stats if not stat.st_size]
        self.size: int = sum(self.files.values())
        if not self.files:
            raise DataError(f"{first_few(files)}: nothing but empty files; name others with data.path=...")
        listing = [(name, stat.st_size, stat.st_mtime_ns) for name, _, stat in stats]
        self.fingerprint = sha256(repr([*listing, *self._named.items()]).encode()).hexdigest()

    def source(self) -> dict[str, Any]:
        files = self.files if len(self.files) == 1 else [self.root]
        return {"corpus": self.config.name, "path": str(*files), "fingerprint": self.fingerprint}

    def streams(self) -> list[Stream]:
        several = [Span(str(file), split) for file, split in self.splits.items() if split]
        spans = self._cut_one() if len(self.files) == 1 else several
        shares = {"train": 1 - self.config.val_fraction, "val": self.config.val_fraction}
        return [
            Stream(read_spans([s for s in spans if s.split == split], self.config.text_field), share)
            for split, share in shares.items()
        ]

    def rows(self) -> Iterator[Row]:
        return read_spans([Span(str(file), "train") for file in self.files], self.config.text_field)

    def notices(self) -> list[str]:
        left_out: dict[str, Sequence[object]] = {
            f"they do not end in one of {ACCEPTED}": [*map(self._name, self.others)],
            "they are empty": self.empty,
            "the names of others say their split": [self._name(f) for f in self.files if self.splits[f] is None],
        }
        sentences = [f"left out, because {why}: {first_few(names)}." for why, names in left_out.items() if names]
        if len(self.files) > 1 and self.config.name == "text":
            val_files = [file for file in self.files if self.splits[file] == "val"]
            share = sum(map(self.files.__getitem__, val_files)) / self.size
            names = first_few([*map(self._name, val_files)])
            sentences.append(f"held out for validation: {names}, {share:.0%} of the text; one file alone would be cut.")
        return sentences

    @cached_property
    def splits(self) -> dict[Path, str | None]:
        """The split of each of several files, by their names where these say it; None: it is left out."""
        if self._named:
            return {file: self._named.get(named_split(self._name(file))) for file in self.files}
        val_files = self.held_out()
        return {file: "val" if file in val_files else "train" for file in self.files}

    @cached_property
    def _named(self) -> dict[str | None, str]:
        """The splits that the names of a text's files stand for: all files without a name for validation train where no
        name says train. Empty unless there are both."""
        found = {named_split(self._name(file)) for file in self.files} if self.config.name == "text" else set()
        held_out = "val" if "val" in found else "test"
        training = None if held_out == "val" and "train" not in found else "train"
        return {training: "train", held_out: "val"} if {training, held_out} <= found else {}

    def held_out(self) -> set[Path]:
        """The files of the validation split: in the order of their names' hashes until `val_fraction` is filled."""
        room = self.config.val_fraction * self.size
        order = sorted(self.files, key=lambda file: sha256(self._name(file).encode()).digest())
        for largest in (room / 8, room):  # many files rather than few, so that no single file decides the loss
            val_files: set[Path] = set()
            filled = 0
            for file in order:
                if self.files[file] <= min(largest, room - filled):
                    val_files.add(file)
                    filled += self.files[file]
            if filled >= room / 2:
                return val_files
        near = [file for file in order if room / 2 < self.files[file] <= self.size / 2]
        if near or not val_files:
            val_files = {min(near or order, key=self.files.__getitem__)}
        return val_files

    def _cut_one(self) -> list[Span]:
        [file] = self.files
        if kind(file) in TABLES:
            cut = train_part(sum(1 for _ in table_rows(file)), self.config.val_fraction)
        else:
            cut = character_boundary(file, train_part(text_size(file), self.config.val_fraction))
        return [Span(str(file), "train", 0, cut), Span(str(file), "val", cut)]

    def _name(self, file: Path) -> str:
        return "/".join(file.parts[len(self.root.parts) :])  # ten times as fast as relative_to, for a library of files


def named_split(name: str) -> str | None:
    """The split that the path of a file says: train, val or test."""
    words = [SPLIT_NAMES[word] for word in re.split("[^a-z]+", name.lower()) if word in SPLIT_NAMES]
    return words[-1] if words else None


class ChatCorpus(FileCorpus):
    """One file of conversations, as the tokenizer's chat template writes them."""

    def __init__(self, config: DataConfig, file: Path) -> None:
        super().__init__(config, file.parent, [file])
        self.template = read_template(config.tokenizer)

    def source(self) -> dict[str, Any]:
        return super().source() | {"template": asdict(self.template)}

    def streams(self) -> list[Stream]:
        return [Stream(read_conversations(span, self.template), 1.0) for span in self._cut_one()]

    def encoder(self, tokenizer: Tokenizer) -> Callable[[Row], Tokenised]:
        assert isinstance(tokenizer, OwnTokenizer)
        return chat_encoder(tokenizer)


def stdlib(config: DataConfig) -> Corpus:
    """The source of the running Python's standard library, without its tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    files = _stdlib_files(root)
    if not files:
        raise DataError(f"this Python has no source text in {root}; use data=text data.path=<file or folder>.")
    return FileCorpus(config, root, files)


@cache  # every job of a sweep calls this
def _stdlib_files(root: Path) -> list[Path]:
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    files = _files_below(root, lambda name: name in left_out)
    # Empty __init__.py files are normal.
    return [file for file in files if file.suffix == ".py" and file.stat().st_size]


def text(config: DataConfig) -> Corpus:
    """Local text: one file, or all files below a folder except hidden ones."""
    path = _existing(config, f"a file ({ACCEPTED}) or a folder of them")
    if path.is_file():
        if kind(path) not in TEXT_SUFFIXES:
            raise DataError(f"data.path={config.path} must end in one of {ACCEPTED}; rename or convert the file.")
        return FileCorpus(config, path.parent, [path])
    everything = _files_below(path, lambda name: name.startswith("."))
    files = [file for file in everything if kind(file) in TEXT_SUFFIXES]
    others = sorted(file for file in set(everything) - set(files) if file.name != CHARACTERS)
    if not files:
        raise DataError(
            f"data.path={config.path} holds no file that ends in one of {ACCEPTED}"
            f"{f' but {first_few(others)}' if others else ''}; set another folder, or rename or convert the files."
        )
    return FileCorpus(config, path, files, others)


def chat(config: DataConfig) -> Corpus:
    """A .jsonl file of conversations."""
    path = _existing(config, "a .jsonl file of conversations")
    if not path.is_file() or path.suffix != ".jsonl":
        raise DataError(f"data.path={config.path} is no .jsonl file; name one with a conversation in each line.")
    return ChatCorpus(config, path)


def _existing(config: DataConfig, kind: str) -> Path:
    """The file or folder at data.path. Raises DataError where there is nothing."""
    if config.path is None:
        raise DataError(f"data={config.name} needs a text; set data.path=... to {kind}.")
    path = Path(config.path).expanduser()
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"data.path={path} does not exist; set it to {kind}.") from None
    except OSError as error:
        raise unreadable(path, error) from error
    return path.resolve()


class HubCorpus(Corpus):
    """A data set of the Hugging Face hub, or a folder that one was downloaded to, streamed."""

    def __init__(self, config: DataConfig):
        if config.hub is None:
            raise DataError(f"data={config.name} needs the name of a data set; set data.hub=<owner>/<name>.")
        self.config = config

    def source(self) -> dict[str, Any]:
        return {"corpus": self.config.name, "hub": self.config.hub, **asdict(self.config.hub_rows)}

    def streams(self) -> list[Stream]:
        return [Stream(self.rows(), 1.0)]

    def rows(self) -> Iterator[Row]:
        fraction = self.config.val_fraction
        number = 0
        for text in self.texts():
            # The first, and evenly from there.
            is_val = math.ceil((number + 1) * fraction) > math.ceil(number * fraction)
            yield {"split": "val" if is_val else "train", "text": text, "opens": True}
            number += bool(text)

    def texts(self) -> Iterator[str]:
        """The text of every row, empty for null."""
        c = self.config
        try:
            for row in _hub_rows(str(c.hub), c.hub_rows):
                yield text_of(row, c.text_field, str(c.hub))
        except DataError:
            raise
        except Exception as error:  # any kind: the hub's libraries raise dozens of different ones
            raise DataError(
                f"could not stream {c.hub} from the Hugging Face hub ({brief(error)}); check the network and the names "
                "under data.hub, or train on local text with data=stdlib or data=text data.path=<file or folder>."
            ) from error


class JoinedHubCorpus(HubCorpus):
    """A small data set of the hub whose rows are parts of one text. Validation takes the last part."""

    def streams(self) -> list[Stream]:
        [row], fraction = self.rows(), self.config.val_fraction
        cut = train_part(len(row["text"]), fraction)
        return [
            Stream([row | {"text": row["text"][:cut]}], 1 - fraction),
            Stream([row | {"text": row["text"][cut:], "split": "val"}], fraction),
        ]

    def rows(self) -> Iterator[Row]:
        yield {"split": "train", "text": "".join(self.texts()), "opens": True}


def _hub_rows(hub: str, rows: HubRows) -> Iterator[Row]:
    import datasets
    from huggingface_hub import HfApi

    def load(revision: str | None) -> list[datasets.IterableDataset]:
        names = rows.split.split("+")
        return [datasets.load_dataset(hub, rows.subset, split=s, revision=revision, streaming=True) for s in names]

    if not Path(hub).is_dir():  # without network, load_dataset retries for half a minute
        HfApi().dataset_info(hub, revision=rows.revision, timeout=20)
    try:
        parts = load(rows.revision)
    except RuntimeError as error:
        if "scripts are no longer supported" not in str(error):
            raise
        parts = load("refs/convert/parquet")  # the hub converts data sets that consist of a loading script
    for part in parts:
        yield from part


CHAT = "chat"
CORPORA: dict[str, Callable[[DataConfig], Corpus]] = {
    "stdlib": stdlib,
    "text": text,
    CHAT: chat,
    "shakespeare": JoinedHubCorpus,
    "openwebtext": HubCorpus,
    "fineweb_edu": HubCorpus,
}
HUB_CORPORA = ("shakespeare", "openwebtext", "fineweb_edu")


def _files_below(root: Path, left_out: Callable[[str], bool]) -> list[Path]:
    """The files below a folder, except those `left_out`. Raises DataError."""

    def refuse(error: OSError) -> None:
        raise unreadable(Path(error.filename), error) from error

    files: list[Path] = []
    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = [name for name in subfolders if not left_out(name)]
        files += [Path(folder, name) for name in names if not left_out(name)]
    return [file for file in files if file.is_file()]
