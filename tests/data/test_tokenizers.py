"""Tokenizers against bytes, against tiktoken's GPT-2, and against the library that trained the BPE."""

import argparse
import inspect
import json
import random
from pathlib import Path

import numpy as np
import pytest
import tiktoken

from data.errors import DataError
from data.files import pieces
from data.tokenizers import (
    as_encoding,
    bytes_tokenizer,
    encoder,
    gpt2_tokenizer,
    load_tokenizer,
    save_tokenizer,
    train_bpe,
)

SHARED = Path(__file__).parents[2] / "../shared/data"
ODD_TEXTS = [
    "",
    " ",
    "\n\n\n",
    "a" * 100,
    "-" * 37 + "=" * 41 + "#" * 5,
    "tabs\t\tand  spaces   \n    def f(self):\r\n\r\n        return 'it''s'  \n",
    "I'll we've they're DON'T 12345 3.14e-10",
    "naïve façade — “quotes” … ∑ 漢字 かな 한글 🙂🏳️‍🌈 e\u0301 \u00a0\u3000x",
    "<|endoftext|> in the text is text",
    "nul \x00 and control \x01\x1c\x85",
]


@pytest.fixture(scope="module")
def learned():
    return train_bpe([inspect.getsource(argparse)], 700)


@pytest.fixture
def gpt2(monkeypatch):
    if not (SHARED / "tiktoken_cache").exists():
        pytest.skip("no cached GPT-2 tokens at hand")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(SHARED / "tiktoken_cache"))
    return gpt2_tokenizer()


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_bytes_are_the_tokens(text):
    tokenizer = bytes_tokenizer()
    assert tokenizer.encode_ordinary(text) == list(text.encode())
    assert encoder(tokenizer)(text).tolist() == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert (tokenizer.n_vocab, tokenizer.eot_token) == (257, 256)


def test_bpe_in_tiktoken_is_the_bpe_that_was_learned_on_real_and_on_random_text(learned):
    tokenizer = as_encoding(learned)
    draw = random.Random(0)
    texts = ODD_TEXTS + [inspect.getsource(module) for module in (inspect, json, random)]
    texts += ["".join(draw.choices("ab -_=.\n\t'sé", k=300)) for _ in range(200)]
    for text in texts:
        tokens = tokenizer.encode_ordinary(text)
        assert tokens == learned.encode(text, add_special_tokens=False).ids
        assert encoder(tokenizer)(text).tolist() == tokens
        assert tokenizer.decode(tokens) == text


def test_pieces_of_a_file_have_the_tokens_of_the_whole(learned, tmp_path):
    tokenizer = as_encoding(learned)
    text = inspect.getsource(argparse) + "".join(ODD_TEXTS[:-1]) + inspect.getsource(inspect) + "x" * 5000
    (tmp_path / "file.txt").write_bytes(text.encode())
    parts = list(pieces(tmp_path / "file.txt", 0, 10**9, block_size=997))
    assert "".join(parts) == text
    assert len(parts) > 100
    assert np.concatenate([encoder(tokenizer)(part) for part in parts]).tolist() == tokenizer.encode_ordinary(text)


@pytest.mark.parametrize("name", ["bytes", "bpe", "gpt2"])
def test_a_saved_tokenizer_comes_back_without_network(name, learned, tmp_path, request):
    make = {
        "bytes": bytes_tokenizer,
        "bpe": lambda: as_encoding(learned),
        "gpt2": lambda: request.getfixturevalue("gpt2"),
    }
    tokenizer = make[name]()
    save_tokenizer(tokenizer, tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert (loaded.name, loaded.n_vocab, loaded.eot_token) == (name, tokenizer.n_vocab, tokenizer.eot_token)
    assert isinstance(loaded, tiktoken.Encoding)
    assert loaded._mergeable_ranks == tokenizer._mergeable_ranks
    for text in ODD_TEXTS:
        assert loaded.encode_ordinary(text) == tokenizer.encode_ordinary(text) == encoder(loaded)(text).tolist()


def test_a_folder_without_tokenizer_is_named(tmp_path):
    with pytest.raises(DataError, match=str(tmp_path)):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"name": "bytes"')
    with pytest.raises(DataError, match=r"tokenizer\.json holds no tokenizer"):
        load_tokenizer(tmp_path)


def test_gpt2_without_a_network_is_refused_with_a_remedy(monkeypatch, tmp_path):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")  # nothing listens there
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})
    with pytest.raises(DataError, match=r"TIKTOKEN_CACHE_DIR.*data\.tokenizer=bytes"):
        gpt2_tokenizer()


def test_text_that_tiktoken_gives_up_on_is_named(gpt2):
    with pytest.raises(DataError, match=r"data\.tokenizer=gpt2 cannot encode.*data\.tokenizer=bytes"):
        encoder(gpt2)("\n" * 2_000_000 + "x")
