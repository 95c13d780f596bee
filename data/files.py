"""Local files to rows: .jsonl line by line, .parquet row by row, .bin by documents, plain text in pieces.

`datasets` would read plain text as one document in memory, or as lines, whose tokens differ from the whole text's. For
tables it does not say which line is wrong, reads dates as numbers, and fails for a file without rows.
"""

import codecs
import io
import json
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from data.errors import DataError, brief, first_few, unreadable
from data.tokenizers import gpt2_tokenizer
from data.untrusted import LINE, UntrustedError, has_half_characters, read_plain_pickle

Row = dict[str, Any]
TOKENS = "GPT-2's tokens"  # the field of a row that holds them beside its text
GPT2_END = 50_256
BLOCK = 1 << 22  # bytes of plain text read at a time
TABLES = (".jsonl", ".parquet", ".bin")
COMPRESSED = (".gz", ".zst")
KINDS: dict[type, str] = {
    list: "list", dict: "mapping", str: "string", int: "number", float: "number", bool: "truth value"
}  # fmt: skip
TEXT_SUFFIXES = (".txt", *TABLES)
ACCEPTED = ".txt, .jsonl (both also with .gz or .zst), .parquet, .bin"
SHARD = 20240520  # the first number of a shard of tokens as llm.c writes it
CHARACTERS = "meta.pkl"  # nanoGPT's names of the tokens in the .bin files beside it

# GPT-2's pattern always splits after a printable character and before a lone space or newline. A document cut there
# keeps its tokens. Both neighbours are ASCII, so no character is cut either.
_LAST_CUT = re.compile(rb".*[!-~](?=[ \n][!-~])", re.DOTALL)


@dataclass(frozen=True)
class Span:
    """A part of a file for one split: a range of bytes of plain text, or of rows of a table."""

    path: str
    split: str
    start: int = 0
    stop: int = sys.maxsize


def kind(path: Path) -> str:
    """The suffix that says how a file is read, without that of its compression."""
    inner = Path(path.stem).suffix
    return inner if path.suffix in COMPRESSED and inner in (".txt", ".jsonl") else path.suffix


@contextmanager
def opened(path: Path, start: int = 0) -> Iterator[IO[bytes]]:
    """The bytes of a file from `start` on, decompressed. Raises DataError for a file that the system cannot read."""
    with reading(path):
        if path.suffix not in COMPRESSED:
            with path.open("rb") as file:
                file.seek(start)
                yield file
            return
        import pyarrow

        with io.BufferedReader(pyarrow.input_stream(str(path))) as file:  # knows the compression by the name
            while start and (skipped := len(file.read(min(start, BLOCK)))):
                start -= skipped
            yield file


def text_size(path: Path) -> int:
    """The bytes of a file, decompressed."""
    if path.suffix not in COMPRESSED:
        return path.stat().st_size
    with opened(path) as file:
        return sum(map(len, iter(lambda: file.read(BLOCK), b"")))


def read_spans(spans: list[Span], text_field: str) -> Iterator[Row]:
    """The rows of the spans, one after the other."""
    for span in spans:
        path = Path(span.path)
        if kind(path) in TABLES:
            for row in islice(table_rows(path), span.start, span.stop):
                text = text_of(row, text_field, span.path)
                yield {"split": span.split, "text": text, "opens": True, TOKENS: row.get(TOKENS)}
        else:
            for i, text in enumerate(pieces(path, span.start, span.stop)):
                yield {"split": span.split, "text": text, "opens": i == 0}


def pieces(path: Path, start: int, stop: int, block_size: int = BLOCK) -> Iterator[str]:
    """The text of a range of bytes, in pieces that together have the same tokens as the whole."""
    piece, offset = b"", start
    with opened(path, start) as file:
        while block := file.read(min(block_size, stop - offset - len(piece))):
            piece += block
            if cut := _LAST_CUT.match(piece):
                yield _decode(piece[: cut.end()], path, offset)
                piece, offset = piece[cut.end() :], offset + cut.end()
    if piece:
        yield _decode(piece, path, offset)


def table_rows(path: Path) -> Iterator[Row]:
    """The rows of a file that is no plain text."""
    if path.suffix == ".bin":
        return token_rows(path)
    return parquet_rows(path) if path.suffix == ".parquet" else (row for _, row in numbered_rows(path))


def numbered_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """The objects in a file of lines, with the numbers of their lines."""
    with opened(path) as file:
        yield from rows_in(iter(lambda: file.readline(LINE + 1), b""), path)


def rows_in(lines: Iterable[bytes], path: Path, option: str = "data.path") -> Iterator[tuple[int, Row]]:
    """The object in each line that is not empty, with the line's number, from 1. Raises DataError.

    path    of the lines' file, which `option` names
    """
    for number, line in enumerate(lines, start=1):
        if len(line) > LINE:
            raise DataError(f"{path} has more than {LINE >> 20} MiB in line {number}; cut it into several texts.")
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        try:
            row = json.loads(line.decode("utf-8")) if line.strip() else None
        except (ValueError, RecursionError) as error:
            flaw = "not UTF-8" if isinstance(error, UnicodeDecodeError) else "not JSON"
        else:
            if row is None:
                continue
            if b"\\ud" in line.lower() and has_half_characters(row):
                flaw = "text with half a character, such as \\ud800"
            elif isinstance(row, dict):
                yield number, row
                continue
            else:
                flaw = f'a {KINDS.get(type(row), "value")} and not an object such as {{"text": ...}}'
        raise DataError(f"could not read {path} (line {number} is {flaw}); repair it or set another {option}.")


def parquet_rows(path: Path) -> Iterator[Row]:
    """The rows of a .parquet file."""
    import pyarrow.parquet  # takes a fifth of a second to import, and only reading rows needs it

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"could not read {path} ({brief(error)}); repair it or set another data.path.") from error


def token_rows(path: Path) -> Iterator[Row]:
    """The documents in a file of 16-bit tokens: a shard of llm.c's, or nanoGPT's train.bin. They are GPT-2's tokens
    with an end of text between documents or, beside a meta.pkl, characters of one document.
    """
    with reading(path):
        content = np.memmap(path, "<u2", "r") if path.stat().st_size % 2 == 0 else np.empty(0, np.uint16)
        header = content[:512].view("<i4") if len(content) >= 512 else np.zeros(3, np.int32)
        is_shard = header[0] == SHARD
        tokens = content[512:] if is_shard else content
        names = path.with_name(CHARACTERS)
        if names.exists() and not is_shard:
            yield {"text": "".join(map(_characters(names).__getitem__, tokens.tolist()))}
            return
    if not len(tokens) or tokens.max() > GPT2_END or (is_shard and (header[1] != 1 or header[2] != len(tokens))):
        raise DataError(
            f"{path} holds no 16-bit tokens of GPT-2, whole and as llm.c or nanoGPT write them; set data.path to text."
        )
    gpt2, start = gpt2_tokenizer(), 0
    for block in range(0, len(tokens) + 1, BLOCK):
        ends = np.flatnonzero(tokens[block : block + BLOCK] == GPT2_END) + block
        for end in [*ends.tolist(), *([len(tokens)] if block + BLOCK > len(tokens) else [])]:
            if end > start:
                document = np.array(tokens[start:end])
                yield {"text": gpt2.decode(document.tolist()), TOKENS: document}
            start = end + 1


def _characters(path: Path) -> dict[int, str]:
    try:
        characters = read_plain_pickle(path)["itos"]
        if all(isinstance(character, str) for character in characters.values()):
            return characters
        reason = "its itos is no mapping to characters"
    except (UntrustedError, KeyError, TypeError, AttributeError) as error:
        reason = f"it {error}" if isinstance(error, UntrustedError) else "it has no itos"
    raise DataError(f"{path} names no characters ({reason}); train on the text itself.")


def text_of(row: Row, field: str, where: str) -> str:
    """The text in a row's field, empty for null."""
    if field not in row:
        raise DataError(
            f"{where} has no field {field!r} but {first_few(list(row))}; choose one with data.text_field=..."
        )
    text = row[field]
    if text is not None and not isinstance(text, str):
        raise DataError(
            f"{where} holds a {KINDS.get(type(text), 'value')} in {field!r}; choose a field of text with "
            "data.text_field=..."
        )
    return text or ""


def character_boundary(path: Path, offset: int) -> int:
    """The first byte at or after `offset` that begins a UTF-8 character, or the file's end."""
    with opened(path, offset) as file:
        while (byte := file.read(1)) and 0x80 <= byte[0] < 0xC0:
            offset += 1
    return offset


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise DataError for a file that the system cannot read."""
    try:
        yield
    except OSError as error:
        raise unreadable(path, error) from error


def _decode(piece: bytes, path: Path, offset: int) -> str:
    if (zero := piece.find(0)) >= 0:
        raise DataError(
            f"{path} is binary (byte {offset + zero} is zero), or text that is not UTF-8; remove it, convert it, or "
            "set another data.path."
        )
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 (byte {offset + error.start} is 0x{piece[error.start]:02x}); "
            "convert it, for instance with iconv, or set another data.path."
        ) from None
