"""Prepared tokens: their contents, that they are prepared once, and that a file is complete or absent."""

import errno
import io
import json
import os
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

from data.errors import DataError
from data.options import DataConfig
from data.prepare import prepare
from data.store import PreparedData
from data.tokenizers import load_tokenizer
from tests.lines import write_lines
from tests.programs import started


@pytest.fixture
def corpus(tmp_path):
    """Twelve files of differing length, in a folder."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(12):
        (folder / f"{i:02}.txt").write_text(f"This is document {i}, naïve and short.\n" * (i + 3))
    return folder


@pytest.fixture
def config(corpus, tmp_path):
    return DataConfig(name="text", path=str(corpus), cache=str(tmp_path / "cache"))


def contents(folder: str | Path) -> set[str]:
    return {path.name for path in Path(folder).iterdir() if not path.name.endswith(".lock")}


def test_documents_are_their_bytes_with_end_of_text_between(config, corpus):
    data = prepare(config)
    files = {path.read_bytes() for path in corpus.iterdir()}
    found = []
    for split in (data.train, data.val):
        documents = np.split(split.tokens, split.documents[1:])
        assert all(document[-1] == 256 for document in documents[:-1])
        assert 256 not in documents[-1]
        found += [bytes(document[document < 256].astype(np.uint8)) for document in documents]
    assert len(found) == 12
    assert set(found) == files
    assert data.vocab_size == 257
    assert data.train.tokens.dtype == np.uint16


def test_bpe_is_learned_from_the_training_split_alone(config, corpus):
    config.tokenizer, config.bpe_vocab_size = "bpe", 300
    data = prepare(config)
    for split in (data.train, data.val):
        for text in data.tokenizer.decode(split.tokens.tolist()).split("<|endoftext|>"):
            assert text.encode() in {path.read_bytes() for path in corpus.iterdir()}
    before = data.tokenizer.decode_bytes(range(256, data.vocab_size - 1))
    for document in data.tokenizer.decode(data.val.tokens.tolist()).split("<|endoftext|>"):
        [path] = [path for path in corpus.iterdir() if path.read_text() == document]
        path.write_bytes(bytes(byte ^ 1 if byte > 32 and byte < 128 else byte for byte in path.read_bytes()))
    again = prepare(config)
    assert again.tokenizer.decode_bytes(range(256, again.vocab_size - 1)) == before


def test_prepared_tokens_are_opened_without_reading_text(config, corpus, capsys):
    first = prepare(config)
    assert "prepared data=text with data.tokenizer=bytes" in capsys.readouterr().err
    for path in corpus.iterdir():  # another text, with the same size and time of change
        written = path.stat().st_mtime_ns
        path.write_bytes(b"x" * path.stat().st_size)
        os.utime(path, ns=(written, written))
    again = prepare(config)
    assert again.manifest == first.manifest
    assert np.array_equal(again.train.tokens, first.train.tokens)
    assert load_tokenizer(again.folder).n_vocab == 257
    assert capsys.readouterr().err.startswith("held out for validation: ")


def test_each_recipe_of_preparation_has_a_separate_folder(config):
    changes: list[dict] = [{}, {"val_fraction": 0.3}, {"max_tokens": 1000}, {"tokenizer": "bpe"}]
    assert len({prepare(replace(config, **change)).folder for change in changes}) == 4


def test_the_identity_follows_the_tokens_and_not_the_place(config, corpus, tmp_path):
    identity = prepare(config).manifest["identity"]
    moved = corpus.rename(tmp_path / "elsewhere")
    config.path, config.cache = str(moved), str(tmp_path / "another cache")
    assert prepare(config).manifest["identity"] == identity
    (moved / "05.txt").write_text("other text")
    assert prepare(config).manifest["identity"] != identity


def test_changed_text_is_prepared_again(config, corpus, capsys):
    before = prepare(config)
    (corpus / "03.txt").write_text("Something else.")
    after = prepare(config)
    assert after.folder == before.folder
    assert (
        b"Something else."
        in after.train.tokens.astype(np.uint8).tobytes() + after.val.tokens.astype(np.uint8).tobytes()
    )
    assert "again: the text or the format of the tokens has changed." in capsys.readouterr().err
    assert len(contents(config.cache)) == 1


@pytest.mark.parametrize("name", ["train.bin", "val.bin", "train.documents", "tokenizer.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_damage_is_noticed_and_repaired(config, name, damage, capsys):
    sound = prepare(config)
    path = sound.folder / name
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle] ^= 0x80
    if damage == "flip":
        path.write_bytes(content)
    elif damage == "truncate":
        path.write_bytes(content[:middle])
    else:
        path.unlink()
    assert prepare(config).manifest == sound.manifest
    assert path.read_bytes() != content
    flaws = f"is corrupt|has {middle} bytes instead of {len(content)}|cannot be read \\(No such file or directory\\)"
    said = f"preparing {re.escape(f'{sound.folder} again: {path}')} ({flaws})\\.\n"
    assert re.search(said, capsys.readouterr().err)


def test_the_second_process_waits_and_prints_that_it_waits(config):
    folder = prepare(config).folder
    (folder / "manifest.json").unlink()
    output = io.StringIO()
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    with redirect_stderr(output), ThreadPoolExecutor() as pool:
        with lock:
            second = pool.submit(prepare, config)
            while "waiting for another process that prepares" not in output.getvalue():
                assert not second.done()
                time.sleep(0.01)
            assert not second.done()
        assert second.result(timeout=60).folder == folder


def files_of(data: PreparedData) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in data.folder.iterdir()}


@pytest.mark.parametrize("max_tokens", [None, 1400])
def test_a_stream_that_broke_off_goes_on_where_it_stopped(config, tmp_path, monkeypatch, capsys, max_tokens):
    broken_at: list[int] = []

    ahead = 4 * (os.cpu_count() or 1)  # rows that are read before the first is written

    def rows(*names):
        for i in range(ahead + 24):
            if i in broken_at:
                broken_at.remove(i)
                raise ConnectionError("the network is gone")
            yield {"text": f"document {i} of the stream, {'and more ' * (i % 7)}"}

    monkeypatch.setattr("data.corpora._hub_rows", rows)
    monkeypatch.setattr(sys.modules["data.prepare"], "SECONDS_BETWEEN_SAVES", 0.0)
    config = DataConfig("fineweb_edu", max_tokens=max_tokens, hub="owner/name", cache=str(tmp_path / "first"))
    uninterrupted = files_of(prepare(config))
    config.cache = str(tmp_path / "broken")
    for done in (5, 18):
        broken_at.append(ahead + done)
        with pytest.raises(DataError, match="could not stream owner/name"):
            prepare(config)
    assert files_of(prepare(config)) == uninterrupted
    assert "resuming the preparation of data=fineweb_edu where it was interrupted." in capsys.readouterr().err


@pytest.mark.usefixtures("forked")
def test_a_killed_preparation_goes_on_where_it_stopped(config, tmp_path, capsys):
    config.tokenizer, config.bpe_vocab_size = "bpe", 280
    uninterrupted = files_of(prepare(config))
    config.cache = str(tmp_path / "again")
    program = f"""
import importlib, os, signal
from data.options import DataConfig

module = importlib.import_module("data.prepare")  # the package's own `prepare` is the function
saves, save_position = [], module.save_position

def save_and_die(*arguments):
    save_position(*arguments)
    saves.append(1)
    if len(saves) == 6:
        os.kill(os.getpid(), signal.SIGKILL)

module.save_position, module.SECONDS_BETWEEN_SAVES = save_and_die, 0.0
module.prepare(DataConfig("text", {config.path!r}, "bpe", 280, cache={config.cache!r}))
"""
    assert started("-c", program).returncode == -signal.SIGKILL
    [name] = contents(config.cache)
    assert name.startswith(".")
    left = Path(config.cache, name)
    assert not (left / "manifest.json").exists()
    assert json.loads((left / "position.json").read_text())["rows"] == 5
    learned = (left / "tokenizer.json").stat().st_mtime_ns
    capsys.readouterr()
    again = prepare(config)
    assert files_of(again) == uninterrupted
    assert (again.folder / "tokenizer.json").stat().st_mtime_ns == learned
    assert "resuming the preparation of data=text where it was interrupted." in capsys.readouterr().err
    assert contents(config.cache) == {again.folder.name}


@pytest.mark.parametrize("damage", ["recipe", "short file", "no tokenizer"])
def test_an_interrupted_preparation_is_not_used_if_it_is_incomplete(config, corpus, damage):
    uninterrupted = files_of(prepare(config))
    folder = prepare(config).folder
    partial = folder.with_name(f".{folder.name}.partial")
    folder.rename(partial)
    manifest = json.loads((partial / "manifest.json").read_text())
    position = {name: manifest[name] for name in ("recipe", "splits")} | {"stream": 1, "rows": 1, "room": None}
    (partial / "position.json").write_text(json.dumps(position | ({"recipe": {}} if damage == "recipe" else {})))
    if damage == "short file":
        (partial / "val.bin").write_bytes(b"")
    if damage == "no tokenizer":
        (partial / "tokenizer.json").unlink()
    assert files_of(prepare(config)) == uninterrupted


def test_a_vocabulary_smaller_than_asked_for_is_reported(config, capsys):
    config.tokenizer = "bpe"
    data = prepare(config)
    assert data.vocab_size < 4096
    notice = f"data=text gives {data.vocab_size:,} tokens only, fewer than data.bpe_vocab_size=4096"
    assert notice in " ".join(capsys.readouterr().err.split())
    config.bpe_vocab_size = 280
    assert prepare(config).vocab_size == 280
    assert "tokens only" not in capsys.readouterr().err


@pytest.mark.parametrize("number", range(5))
def test_a_full_disk_ends_in_a_sentence_and_leaves_what_was_there(config, corpus, monkeypatch, number):
    before = prepare(config)
    tokens = np.array(before.train.tokens)
    (corpus / "00.txt").write_text("More text.")
    written: list[str] = []

    def write_to_disk(file):
        written.append(file.name)
        if len(written) > number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("data.store.to_disk", write_to_disk)
    with pytest.raises(DataError, match=r"\(the disk is full\); make room, .*data\.cache=.*data\.max_tokens="):
        prepare(config)
    assert contents(config.cache) == {before.folder.name}
    assert json.loads((before.folder / "manifest.json").read_text()) == before.manifest
    assert np.array_equal(before.train.tokens, tokens)
    monkeypatch.undo()
    after = prepare(config)
    assert "More text." in after.tokenizer.decode([*after.train.tokens.tolist(), *after.val.tokens.tolist()])


def test_a_cache_that_cannot_be_written_is_named(config, tmp_path):
    (tmp_path / "file").write_text("")
    config.cache = str(tmp_path / "file" / "cache")
    with pytest.raises(DataError, match=r"could not write tokens to data\.cache=.*file/cache \(NotADirectoryError"):
        prepare(config)


@pytest.mark.parametrize("max_tokens", [10, 500, 1001])
def test_max_tokens_bounds_both_splits_together(config, max_tokens):
    everything = prepare(config)
    config.max_tokens = max_tokens
    data = prepare(config)
    sizes = len(data.train.tokens), len(data.val.tokens)
    assert max_tokens - 2 <= sum(sizes) <= max_tokens
    assert sizes[1] == pytest.approx(max_tokens / 10, abs=1)
    assert np.array_equal(data.train.tokens, everything.train.tokens[: sizes[0]])
    assert np.array_equal(data.val.tokens, everything.val.tokens[: sizes[1]])
    assert data.train.documents.max() < sizes[0]


def test_max_tokens_ends_a_stream(config, monkeypatch):
    read = []

    def rows(*names):
        for i in range(100_000):
            read.append(i)
            yield {"text": "ten bytes."}

    monkeypatch.setattr("data.corpora._hub_rows", rows)
    data = prepare(DataConfig(name="fineweb_edu", hub="owner/name", cache=config.cache, max_tokens=1000))
    assert len(data.train.tokens) + len(data.val.tokens) == 1000
    assert len(data.val.tokens) == pytest.approx(100, abs=15)
    assert len(read) < 1000


def test_a_split_without_text_is_named(config):
    config.max_tokens = 3
    with pytest.raises(
        DataError,
        match=r"nothing for the val split: .* data\.val_fraction=0\.1 and data\.max_tokens=3 leave too little",
    ):
        prepare(config)
    assert contents(config.cache) == set()


def test_repeated_documents_and_empty_rows_are_counted(config, tmp_path, capsys):
    folder = tmp_path / "named"
    folder.mkdir()
    train = [f"document {i}" for i in range(50)] + [None, ""]
    val = [f"document {i}" for i in range(45, 55)] + ["document 46", "DOCUMENT 1", None]
    for split, texts in (("train", train), ("val", val)):
        write_lines(folder / f"{split}.jsonl", [{"text": text} for text in texts])
    config.path = str(folder)
    data = prepare(config)
    both = sum(text in train for text in val if text)
    assert data.notes == [
        f"{both} of 12 validation documents also stand in training.",
        "3 rows of data=text are null or empty, and were left out.",
    ]
    told = " ".join(capsys.readouterr().err.split())
    assert all(note in told for note in data.notes)
    assert prepare(config).notes == data.notes
    assert data.manifest["bytes"] == {"train": sum(len(t or "") for t in train), "val": sum(len(t or "") for t in val)}
