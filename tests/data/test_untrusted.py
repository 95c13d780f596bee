"""Files that a stranger made are read as data, within bounded time and memory, or refused with the reason."""

import json
import os
import threading
import time

import pytest

from data import untrusted
from data.errors import DataError
from data.tokenizers import bpe_tokenizer, load_tokenizer, save_tokenizer
from data.untrusted import UntrustedError, read_end, read_json, read_text, read_yaml

# Nine lines that stand for 10 ** 9 values.
ALIASES = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("read", "content", "reason"),
    [
        (read_yaml, ALIASES, "has an alias"),
        (read_yaml, "[" * 900, "is nested deeper than 64"),
        (read_yaml, "[" * 100_000, "is nested deeper than 64|is not YAML"),  # libyaml 0.2.6 refuses more than 1000
        (read_yaml, "seed: 1" + " " * untrusted.SETTINGS, r"is larger than 0\.25 MiB"),
        (read_yaml, "seed: !!python/object/apply:os.getpid []", "is not YAML"),
        (read_yaml, "seed: 0x" + "f" * 17, "has an integer of more than 64 bits"),
        (read_yaml, "a: b: c", "is not YAML"),
        (read_json, "[" * 65 + "]" * 65, "is nested deeper than 64"),
        (read_json, "[" * 1_000_000, "is not JSON"),
        (read_json, '{"step": ' + "9" * 400 + "}", "has an integer of more than 64 bits"),
        (read_json, '{"step": ' + "9" * 5000 + "}", "is not JSON"),
        (read_json, "\ufeff{}", "is not JSON"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value))[:20],
)
def test_content_that_would_take_much_time_or_memory_is_refused(read, content, reason, tmp_path):
    path = tmp_path / "file"
    path.write_text(content)
    begin = time.perf_counter()
    with pytest.raises(UntrustedError, match=reason):
        read(path)
    assert time.perf_counter() - begin < 5


def test_a_file_larger_than_its_limit_is_not_read(tmp_path):
    with (tmp_path / "sparse.json").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(UntrustedError, match="is larger than 64 MiB"):
        read_json(tmp_path / "sparse.json")
    assert read_end(tmp_path / "sparse.json", 5) == "\0" * 5


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: os.symlink("/dev/zero", path)])
def test_a_path_that_is_no_regular_file_is_refused_at_once(make, tmp_path):
    make(tmp_path / "summary.json")
    for read in (read_json, read_yaml, read_end):
        with pytest.raises((UntrustedError, OSError)):
            read(tmp_path / "summary.json")


def test_a_pipe_is_read_to_its_end_where_one_is_expected(tmp_path):
    os.mkfifo(tmp_path / "prompts")
    writer = threading.Thread(target=(tmp_path / "prompts").write_text, args=("a\nb\n",))
    writer.start()
    assert read_text(tmp_path / "prompts", pipe=True) == "a\nb\n"
    writer.join()


def test_values_that_the_recipe_writes_can_be_read(tmp_path):
    value = {"config": {"optimizer": {"betas": [0.9, 0.95], "eps": 1e-8}}, "message": "déjà", "seed": 2**64 - 1}
    (tmp_path / "value").write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
    assert read_json(tmp_path / "value") == value


@pytest.mark.parametrize(
    "change",
    [
        {"pattern": r"(x+x+)+y"},
        {"tokens": ["YQ=="]},
        {"tokens": None},
        {"name": None, "own": 3},
        {"own": "{}"},
    ],
    ids=str,
)
def test_a_tokenizer_that_train_does_not_write_is_refused(change, tmp_path):
    save_tokenizer(bpe_tokenizer(["a b a b"], 260), tmp_path)
    assert load_tokenizer(tmp_path).decode(load_tokenizer(tmp_path).encode_ordinary("abc")) == "abc"
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DataError, match=r"tokenizer\.json holds no tokenizer|is not a tokenizer in the format"):
        load_tokenizer(tmp_path)
