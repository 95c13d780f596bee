"""The text of a corpus, its split, and its failures."""

import gzip
import json
import os
import pickle
import re
import sysconfig
import tempfile
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pytest
import tiktoken

from data.corpora import CORPORA
from data.errors import DataError
from data.options import DataConfig, HubRows
from data.prepare import prepare
from tests.lines import write_lines

SHAKESPEARE = Path(__file__).parents[2] / "../shared/data/tinyshakespeare.txt"


def documents_of(config: DataConfig) -> dict[str, list[str]]:
    """The documents of each split, put together from the rows."""
    found: dict[str, list[str]] = {"train": [], "val": []}
    for stream in CORPORA[config.name](config).streams():
        for row in filter(lambda row: row["text"], stream.rows):
            if row["opens"]:
                found[row["split"]].append("")
            found[row["split"]][-1] += row["text"]
    return found


def of_text(path: Path, **options) -> DataConfig:
    return DataConfig("text", str(path), cache=str(path.parent / "cache"), **options)


def documents(path: Path, **options) -> dict[str, list[str]]:
    return documents_of(of_text(path, **options))


def notices(path: Path) -> list[str]:
    return CORPORA["text"](of_text(path)).notices()


def test_one_file_gives_its_last_tenth_to_validation(tmp_path):
    text = "".join(f"line {i} of the text\n" for i in range(1000))
    (tmp_path / "a.txt").write_text(text)
    cut = len(text) * 9 // 10
    assert documents(tmp_path / "a.txt") == {"train": [text[:cut]], "val": [text[cut:]]}
    assert documents(tmp_path) == documents(tmp_path / "a.txt")


def test_the_cut_of_a_file_spares_characters_and_line_ends(tmp_path):
    text = "漢字\r\n" * 101
    (tmp_path / "a.txt").write_bytes(text.encode())
    for fraction in (0.1, 0.25, 0.333, 0.5):
        found = documents(tmp_path, val_fraction=fraction)
        assert found["train"][0] + found["val"][0] == text
        assert len(found["val"][0]) / len(text) == pytest.approx(fraction, abs=0.01)


def test_many_files_hold_out_whole_files(tmp_path):
    texts = {}
    for i in range(60):
        path = tmp_path / f"{i % 7}" / f"{i}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"file {i} " * (10 + i))
        texts[path.read_text()] = path.relative_to(tmp_path).as_posix()
    found = documents(tmp_path)
    assert {*found["train"], *found["val"]} == set(texts)
    assert not {*found["train"]} & {*found["val"]}
    assert [texts[t] for t in found["train"]] == sorted(texts[t] for t in found["train"])
    held = sum(map(len, found["val"])) / sum(map(len, texts))
    assert 0.07 < held <= 0.1
    assert documents(tmp_path) == found


def test_a_file_more_or_less_leaves_most_others_in_their_split(tmp_path):
    for i in range(100):
        (tmp_path / f"{i}.txt").write_text(f"{i:04}" * 100)
    before = set(documents(tmp_path)["val"])
    (tmp_path / "100.txt").write_text("0100" * 100)
    assert len(before.intersection(documents(tmp_path)["val"])) >= len(before) - 1


@pytest.mark.parametrize(
    ("sizes", "held"),
    [
        ([100, 100], 100),  # none fits in a tenth
        ([100, 100, 100, 100, 100, 1], 100),  # one fits, but is next to nothing
        ([1000, 1], 1),  # half the text or more is never held out
        ([500, 300, 80, 20, 100], 100),
    ],
)
def test_few_files_hold_out_what_comes_nearest(tmp_path, sizes, held):
    for i, size in enumerate(sizes):
        (tmp_path / f"{i}.txt").write_text(f"{i}" * size)
    found = documents(tmp_path)
    assert sum(map(len, found["val"])) == held
    assert sum(map(len, found["train"])) == sum(sizes) - held


@pytest.mark.parametrize(
    ("names", "train", "val"),
    [
        (["train.txt", "validation.txt", "test.txt", "notes.txt"], {"train.txt"}, {"validation.txt"}),
        (["train.txt", "test.txt"], {"train.txt"}, {"test.txt"}),
        (["web_train_01.txt", "web_train_02.txt", "web_val_00.txt"], {"web_train_01.txt", "web_train_02.txt"},
         {"web_val_00.txt"}),
        (["validation.txt", "corpus.txt", "more.txt", "test.txt"], {"corpus.txt", "more.txt"}, {"validation.txt"}),
        (["dev/1.txt", "train/1.txt", "train/test-2.txt"], {"train/1.txt"}, {"dev/1.txt"}),
    ],
)  # fmt: skip
def test_file_names_that_say_what_they_are_decide(tmp_path, names, train, val):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    found = documents(tmp_path)
    assert (set(found["train"]), set(found["val"])) == (train, val)
    told = " ".join(notices(tmp_path))
    assert f"held out for validation: {', '.join(val)}, " in told
    assert all(name in told for name in set(names) - train - val)


def test_names_that_say_one_split_alone_do_not_decide(tmp_path):
    for n in range(20):
        (tmp_path / f"train-{n:05}-of-00020.txt").write_text(f"{n:03}" * 100)
    assert len(documents(tmp_path)["val"]) == 2


def test_stdlib_is_the_source_text_of_this_python():
    found = documents_of(DataConfig(val_fraction=0.1))
    root = Path(sysconfig.get_path("stdlib"))
    texts = set(found["train"] + found["val"])
    assert {(root / file).read_bytes().decode() for file in ("argparse.py", "json/decoder.py")} <= texts
    assert Path(pytest.__file__).read_text() not in texts
    assert sum(map(len, set(found["train"]) & set(found["val"]))) < 1000  # some tiny modules are there twice
    assert 0.08 < sum(map(len, found["val"])) / sum(map(len, texts)) < 0.12
    assert max(map(len, found["val"])) < sum(map(len, found["val"])) / 4


def test_rows_are_documents(tmp_path):
    folder = tmp_path / "brackets [1] and spaces"  # which `datasets` would take for a pattern
    folder.mkdir()
    texts = [f"document {i}" for i in range(50)]
    file = write_lines(folder / "a.jsonl", [{"text": text, "n": 1} for text in [*texts, "", None]])
    assert documents(file) == {"train": texts[:46], "val": texts[46:]}
    datasets.Dataset.from_dict({"body": texts}).to_parquet(folder / "b.parquet")
    found = documents(folder / "b.parquet", text_field="body", val_fraction=0.5)
    assert found == {"train": texts[:25], "val": texts[25:]}


def test_kinds_of_files_mix_in_a_folder(tmp_path):
    (tmp_path / "a.txt").write_text("plain")
    write_lines(tmp_path / "b.jsonl", [{"text": "row 1"}, {"text": "row 2"}])
    (tmp_path / "c.md").write_text("neither")
    (tmp_path / ".hidden.txt").write_text("nor this")
    found = documents(tmp_path)
    assert sorted(found["train"] + found["val"]) == ["plain", "row 1", "row 2"]


def test_a_stream_holds_out_documents_spread_evenly(tmp_path):
    texts = [f"document {i}" for i in range(1000)]
    write_lines(tmp_path / "train.jsonl", [{"text": text} for text in texts])
    found = documents_of(DataConfig(name="fineweb_edu", hub=str(tmp_path), val_fraction=0.05))
    assert found["val"] == texts[::20]
    assert found["train"] == [t for i, t in enumerate(texts) if i % 20]


@pytest.mark.skipif(not SHAKESPEARE.exists(), reason="tiny Shakespeare is not at hand")
def test_shakespeare_is_cut_as_nanogpt_cuts_it(tmp_path):
    text = SHAKESPEARE.read_text()
    for split, start, stop in (("train", 0, 1003854), ("validation", 1003854, 1059624), ("test", 1059624, None)):
        write_lines(tmp_path / f"{split}.jsonl", [{"text": text[start:stop]}])  # the splits of the data set on the hub
    config = DataConfig(name="shakespeare", hub=str(tmp_path), hub_rows=HubRows(split="train+validation+test"))
    found = documents_of(config)
    assert found == {"train": [text[: int(len(text) * 0.9)]], "val": [text[int(len(text) * 0.9) :]]}
    assert [len(found["train"][0]), len(found["val"][0])] == [1003854, 111540]


def test_without_a_network_a_sentence_names_a_remedy(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"could not stream owner/name .*data=stdlib or data=text data\.path="):
        documents_of(DataConfig(name="fineweb_edu", hub="owner/name"))


def test_a_loading_script_is_replaced_by_the_hubs_conversion(monkeypatch):
    def load(hub, subset, *, split, revision, streaming):
        if revision != "refs/convert/parquet":
            raise RuntimeError("Dataset scripts are no longer supported, but found name.py")
        return [{"text": split}]

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *args, **options: None)
    monkeypatch.setattr("datasets.load_dataset", load)
    found = documents_of(DataConfig(name="openwebtext", hub="owner/name", hub_rows=HubRows(split="train+test")))
    assert found == {"train": ["test"], "val": ["train"]}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", r"a\.txt: nothing but empty files"),
        (b"GIF89a\x00\x01", r"a\.txt is binary \(byte 6 is zero\)"),
        ("naïve".encode("latin-1"), r"a\.txt is not UTF-8 \(byte 2 is 0xef\)"),
        ("text".encode("utf-16"), r"a\.txt is binary \(byte 3 is zero\), or text that is not UTF-8"),
        (gzip.compress(b"text" * 100, mtime=0), r"a\.txt is (binary|not UTF-8) \(byte \d"),
        (b"some words " * 500_000 + b"\xff" + b" some words" * 1000, "byte 5500000 is 0xff"),  # in the second block
    ],
    ids=lambda value: str(value)[:20],
)
def test_unreadable_text_is_named(tmp_path, content, sentence):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DataError, match=sentence):
        documents(tmp_path)


@pytest.fixture
def reader():
    """A folder in which file permissions apply to root too, which becomes another user meanwhile."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        root = os.geteuid() == 0
        if root:
            os.chown(name, 65534, -1)
            os.seteuid(65534)
        try:
            yield Path(name)
        finally:
            if root:
                os.seteuid(0)


def test_files_and_folders_that_may_not_be_read_are_named_with_that_cause(reader):
    folder, file = reader / "closed", reader / "closed.txt"
    (reader / "open.txt").write_text("text " * 100)
    folder.mkdir()
    (folder / "a.txt").write_text("text")
    file.write_text("text")
    file.chmod(0)

    def assert_refused(sentence, *paths):
        for path in paths:
            with pytest.raises(DataError, match=sentence):
                documents(reader / path)

    assert_refused(r"closed\.txt cannot be read \(Permission denied\); make it readable", "closed.txt", ".")
    file.unlink()
    folder.chmod(0)
    sentence = r"closed(/a\.txt)? cannot be read \(Permission denied\); make it readable"
    assert_refused(sentence, "closed", "closed/a.txt", ".")
    folder.chmod(0o755)
    (reader / "loop.txt").symlink_to("loop.txt")
    assert_refused(r"loop\.txt cannot be read \(Too many levels of symbolic links\)", "loop.txt")


def test_a_path_may_begin_with_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("text " * 100)
    assert documents_of(DataConfig("text", "~/a.txt")) == documents(tmp_path / "a.txt")


def test_what_is_held_out_and_empty_files_get_a_notice(tmp_path):
    for i, size in enumerate([100] * 20 + [0]):
        (tmp_path / f"{i}.txt").write_text("x" * size)
    empty, held_out = notices(tmp_path)
    assert re.fullmatch(r"left out, because they are empty: .*/20\.txt\.", empty)
    assert re.match(r"held out for validation: \d+\.txt, \d+\.txt, 10% of the text", held_out)
    assert notices(tmp_path / "0.txt") == []


def test_files_that_are_no_text_are_named_on_every_run_that_leaves_them_out(tmp_path, capsys):
    (tmp_path / "text").mkdir()
    for name in ("a.txt", "b.md", ".hidden", *(f"{n}.png" for n in range(5))):
        (tmp_path / "text" / name).write_text("some words " * 20)
    config = of_text(tmp_path / "text")
    for _ in range(2):
        prepare(config)
        told = " ".join(capsys.readouterr().err.split())
        assert (
            "left out, because they do not end in one of .txt, .jsonl (both also with .gz or .zst), .parquet, .bin: "
            "0.png, 1.png, 2.png, 3.png and" in told
        )
        assert ".hidden" not in told
    prepare(config, announce_wait=False)  # another rank
    assert "left out" not in capsys.readouterr().err
    (tmp_path / "text" / "a.txt").unlink()
    with pytest.raises(
        DataError, match=r"holds no file that ends in .* but .*0\.png, .*; set another folder, or rename"
    ):
        CORPORA["text"](config)


def test_dates_and_a_byte_order_mark_are_text_as_any_other(tmp_path):
    texts = ["2020-01-01", "2021-02-02 and more", None, "é"]
    written = "\n\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts)
    (tmp_path / "a.jsonl").write_text(written, encoding="utf-8-sig")
    found = documents(tmp_path / "a.jsonl", val_fraction=0.5)
    assert found == {"train": ["2020-01-01", "2021-02-02 and more"], "val": ["é"]}


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.with_suffix(".jsonl").write_text("\n\n"),
        lambda path: path.with_suffix(".jsonl").write_text('{"text": null}\n{"text": ""}\n'),
        lambda path: datasets.Dataset.from_dict({"text": []}).to_parquet(path.with_suffix(".parquet")),
    ],
    ids=["blank lines", "empty texts", "no rows"],
)
def test_a_text_of_nothing_is_called_so(make, tmp_path):
    (tmp_path / "text").mkdir()
    make(tmp_path / "text" / "a")
    with pytest.raises(
        DataError, match=r"leaves nothing for the train split: .*text has no rows, their field 'text' is empty, or"
    ):
        prepare(of_text(tmp_path / "text"))


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ('{"text": "a"}\n{"text": \n', r"could not read .*a\.jsonl \(line 2 is not JSON\)"),
        ('{"text": "a"}\n{"text": "\\uD800"}\n', r"could not read .*a\.jsonl \(line 2 is text with half a character"),
        ('[{"text": "a"}]\n', r"\(line 1 is a list and not an object such as {\"text\": \.\.\.}\); repair it"),
        ("\n[1, 2]\n", r"\(line 2 is a list and not an object"),
        ('{"body": "a", "title": "b"}\n' * 9, r"no field 'text' but body, title; choose one with data\.text_field"),
        ('{"text": 17}\n' * 9, r"holds a number in 'text'"),
    ],
)
def test_unreadable_rows_are_named(tmp_path, lines, sentence):
    (tmp_path / "a.jsonl").write_text(lines)
    with pytest.raises(DataError, match=sentence):
        documents(tmp_path)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"name": "wikipedia"}, r"data\.name=wikipedia is not a corpus; choose data=stdlib or"),
        ({"val_fraction": 0.0}, r"data\.val_fraction=0 must lie between 0 and 1"),
        ({"val_fraction": 1.0}, r"data\.val_fraction=1 must lie between 0 and 1"),
        ({"max_tokens": 0}, r"data\.max_tokens=0 must be positive"),
        ({"bpe_vocab_size": 256}, r"data\.bpe_vocab_size=256 must be 257 or more"),
        ({"path": "x"}, r"data\.path=x has no effect with data=stdlib; leave it out or choose data=text"),
        ({"name": "text", "path": "x", "hub": "a/b"}, r"data\.hub=a/b has no effect with data=text"),
        ({"name": "text"}, r"set data\.path="),
        ({"name": "text", "path": "/nowhere/at/all"}, r"data\.path=/nowhere/at/all does not exist"),
        ({"name": "text", "path": __file__}, r"must end in one of \.txt, \.jsonl \("),
        ({"name": "text", "path": str(Path(__file__).parent)}, r"holds no file that ends in one of \.txt"),
        ({"name": "openwebtext"}, r"set data\.hub="),
    ],
)
def test_data_options_that_cannot_work_are_refused(options, sentence):
    with pytest.raises(DataError, match=sentence):
        prepare(DataConfig(**options))


def shard(tokens: list[int]) -> bytes:
    """As llm.c writes it."""
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, len(tokens)
    return header.tobytes() + np.array(tokens, np.uint16).tobytes()


def write_compressed(path: Path, content: bytes) -> None:
    with pyarrow.CompressedOutputStream(str(path), {".gz": "gzip", ".zst": "zstd"}[path.suffix]) as file:
        file.write(content)


def write_text(folder: Path, name: str, texts: list[str]) -> None:
    """The same documents in a file of any kind; each in a file of its own where a file holds one."""
    path = folder / name
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    gpt2 = tiktoken.get_encoding("gpt2")
    if name.endswith(".parquet"):
        datasets.Dataset.from_dict({"text": texts}).to_parquet(path)
    elif name.endswith(".jsonl"):
        path.write_bytes(lines)
    elif ".jsonl." in name:
        write_compressed(path, lines)
    elif name.endswith("_shard.bin"):  # llm.c's begin each document with an end of text
        path.write_bytes(shard([token for text in texts for token in (50256, *gpt2.encode_ordinary(text))]))
    elif name.endswith(".bin"):  # nanoGPT's end each so
        tokens = [token for text in texts for token in (*gpt2.encode_ordinary(text), 50256)]
        path.write_bytes(np.array(tokens, np.uint16).tobytes())
    else:
        for i, text in enumerate(texts):
            numbered = folder / f"{name.partition('.')[0]}-{i}.{name.partition('.')[2]}"
            numbered.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())


@pytest.mark.skipif(not os.environ.get("TIKTOKEN_CACHE_DIR"), reason="no cached GPT-2 tokens at hand")
@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2"])
def test_the_same_text_gives_the_same_bits_from_every_kind_of_file(tmp_path, tokenizer):
    texts = {"train": ["naïve 漢字 documents\n", "a second, " * 50], "val": ["held out", "and this\n\n"]}
    identities = {}
    for name in (".jsonl", ".txt", ".txt.gz", ".jsonl.gz", ".jsonl.zst", ".parquet", "_shard.bin", ".bin"):
        folder = tmp_path / name[1:]
        folder.mkdir()
        for split, of_split in texts.items():
            write_text(folder, f"{split}{name}", of_split)
        identities[name] = prepare(of_text(folder, tokenizer=tokenizer)).identity
    assert set(identities.values()) == {identities[".jsonl"]}, identities


@pytest.mark.parametrize("suffix", ["txt.gz", "txt.zst"])
def test_one_compressed_file_is_cut_as_the_file_itself(tmp_path, suffix):
    text = "漢字 and a line\n" * 200_000  # several blocks
    (tmp_path / "a.txt").write_text(text)
    path = tmp_path / f"b.{suffix}"
    write_compressed(path, text.encode())
    assert documents(path) == documents(tmp_path / "a.txt")
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DataError, match=rf"b\.{suffix} cannot be read"):
        documents(path)


def test_nanogpts_characters_are_read_by_its_names_of_them_and_nothing_else_of_a_pickle_is(tmp_path):
    text = {"train": "to be, or not to be\n" * 5, "val": "that is the question"}
    characters = sorted(set("".join(text.values())))
    for split, content in text.items():
        np.array([characters.index(c) for c in content], np.uint16).tofile(tmp_path / f"{split}.bin")
    names = {"vocab_size": len(characters), "itos": dict(enumerate(characters))}
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(names))
    assert documents(tmp_path) == {split: [content] for split, content in text.items()}
    assert not any("meta.pkl" in notice for notice in notices(tmp_path))
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(names | {"itos": Path("x")}))
    with pytest.raises(DataError, match=r"meta\.pkl names no characters \(it names pathlib"):
        documents(tmp_path)


@pytest.mark.parametrize("content", [b"", b"abc", np.array([60_000], np.uint16).tobytes(), shard([1, 2, 3])[:-2]])
def test_bytes_that_are_no_tokens_of_gpt2_are_refused(tmp_path, content):
    for split in ("train", "val"):
        (tmp_path / f"{split}.bin").write_bytes(content)
    with pytest.raises(DataError, match=r"holds no 16-bit tokens of GPT-2|nothing but empty files"):
        documents(tmp_path)
