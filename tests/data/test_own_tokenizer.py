"""A tokenizer from a file: the tokens of the library that made it, from preparation to sampling."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers

from data.errors import DataError
from data.mistakes import data_mistakes
from data.options import DataConfig
from data.own_tokenizer import OwnTokenizer
from data.prepare import prepare
from data.tokenizers import encoder, load_tokenizer, save_tokenizer
from recipe.infer.evaluation.text import tokenised
from recipe.infer.generation.text import Text

TEXT = "déjà vu 木 🦜, and the end of a text; the rest of the text is the end of it. " * 40


def unigram() -> tokenizers.Tokenizer:
    """A tokenizer like those of Llama 2 and T5: pieces with leading spaces, bytes for characters without a piece."""
    model = tokenizers.Tokenizer(tokenizers.models.Unigram())
    model.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    model.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.ByteFallback(), tokenizers.decoders.Metaspace()])
    special = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = tokenizers.trainers.UnigramTrainer(vocab_size=330, special_tokens=special, unk_token="<unk>")
    model.train_from_iterator([TEXT.replace("木", "").replace("🦜", "")], trainer)
    content = json.loads(model.to_str())
    content["model"]["byte_fallback"] = True
    content["added_tokens"] = content["added_tokens"][:2]
    content["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    return tokenizers.Tokenizer.from_str(json.dumps(content))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "tokenizer.json"
    unigram().save(str(path))
    return path


@pytest.fixture
def tokenizer(file):
    return OwnTokenizer("own", file.read_text())


@pytest.fixture
def config(file, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return DataConfig("text", str(tmp_path / "text.txt"), str(file), cache=str(tmp_path / "cache"))


def test_prepared_tokens_are_the_librarys_and_come_back_as_the_text(config, file, tmp_path):
    data = prepare(config)
    model = tokenizers.Tokenizer.from_file(str(file))
    model.no_truncation()
    cut = int(len(TEXT.encode()) * 0.9)
    held_out = TEXT.encode()[cut:].decode(errors="ignore")
    assert data.val.tokens.tolist() == model.encode(held_out, add_special_tokens=False).ids
    assert (data.vocab_size, data.tokenizer.eot_token) == (model.get_vocab_size(), model.token_to_id("</s>"))
    assert data.tokenizer.decode(data.train.tokens.tolist()) == TEXT.encode()[:cut].decode(errors="ignore")
    save_tokenizer(data.tokenizer, tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.encode_ordinary(TEXT) == data.tokenizer.encode_ordinary(TEXT)
    assert len(again.encode_ordinary(TEXT)) > 1000


def test_another_tokenizer_in_the_same_file_prepares_again(config, file, tmp_path):
    before = prepare(config)
    changed = json.loads(file.read_text())
    changed["model"]["vocab"] = changed["model"]["vocab"][:-5]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(changed))
    config.tokenizer = str(path)
    first = prepare(config)
    path.write_text(file.read_text())
    second = prepare(config)
    assert (first.folder, second.vocab_size) == (second.folder, before.vocab_size)
    np.testing.assert_array_equal(second.train.tokens, before.train.tokens)


def test_text_appears_as_tokens_come_and_characters_of_several_stay_whole(tokenizer):
    tokens = tokenizer.encode_ordinary("vu 木 🦜")
    stream = Text(tokenizer)
    pieces = [stream.add(token) for token in tokens]
    assert "".join(pieces) + stream.rest() == "vu 木 🦜"
    assert "" in pieces  # while the bytes of a character were incomplete
    assert not any("�" in piece for piece in pieces)
    cut = Text(tokenizer)
    shown, rest = "".join(map(cut.add, tokens[:-1])), cut.rest()
    assert (shown + rest).startswith("vu 木 ")
    assert "�" in rest
    text = Text(tokenizer)
    assert "".join(map(text.add, [*tokens, tokenizer.eot_token])) == "vu 木 🦜"
    assert text.ended


def test_a_continuation_keeps_the_blank_before_its_first_word(tokenizer):
    """As in the text of all tokens together; the first word alone would have none."""
    prompt, added = tokenizer.encode_ordinary("the end"), tokenizer.encode_ordinary("of a 木")
    text = Text(tokenizer, prompt=prompt)
    assert "".join(map(text.add, added)) + text.rest() == " of a 木"
    text = Text(tokenizer, prompt=tokenizer.encode_ordinary("the end \ufffd"))
    assert "".join(map(text.add, added)) + text.rest() == " of a 木"


def test_text_goes_on_after_bytes_that_are_no_characters(tokenizer):
    """A model may generate any tokens, and the library's stream of text raises an error at such bytes."""
    for tokens in np.random.default_rng(0).integers(tokenizer.n_vocab, size=(20, 60)).tolist():
        stream, tokens = Text(tokenizer), [token for token in tokens if token != tokenizer.eot_token]
        text = "".join(map(stream.add, [*tokens, *tokenizer.encode_ordinary("the 木 of a text")]))
        assert text.endswith(" the 木 of a text")
        assert stream.rest() == ""


def test_a_tokenizer_without_an_end_of_text_gets_one():
    tokenizer = OwnTokenizer("own", tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, "?")).to_str())
    assert (tokenizer.eot_token, tokenizer.n_vocab, tokenizer.encode_ordinary("a")) == (2, 3, [0])
    assert tokenizer.encode_ordinary("<|endoftext|>") == [1]  # text that looks like it is text


def test_a_file_that_is_no_tokenizer_is_refused_in_one_sentence(config, tmp_path):
    (tmp_path / "other.json").write_text('{"a": 1}')
    for name, sentence in {
        "gtp2": "data.tokenizer=gtp2 is not known; choose one of bytes, gpt2, bpe, or name a tokenizer.json.",
        "no/such.json": "data.tokenizer=no/such.json cannot be read (No such file or directory)",
        str(tmp_path / "text.txt"): "text.txt cannot be read (it is not JSON); name a tokenizer.json.",
        str(tmp_path / "other.json"): "other.json is not a tokenizer in the format of Hugging Face's tokenizers",
    }.items():
        config.tokenizer = name
        (said,) = data_mistakes(config)
        assert sentence in said
        with pytest.raises(DataError):
            prepare(config)


@pytest.mark.parametrize("unknown", ["?", None])
def test_characters_without_a_token_are_counted_and_bits_per_byte_divide_by_the_files_bytes(here, unknown):
    """Letters that the vocabulary lacks become the unknown token, or vanish."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "?": 2}, [], unk_token=unknown))
    model.save("tokenizer.json")
    text = "ab ba xyz ab é" * 20
    Path("text.txt").write_text(text)
    data = prepare(DataConfig("text", "text.txt", "tokenizer.json", cache="cache"))
    (note,) = data.notes
    assert f"loses {sum(text.count(c) for c in 'xyzé')} characters of the text" in note
    assert sum(data.manifest["bytes"].values()) == Path("text.txt").stat().st_size
    trained: Any = SimpleNamespace(encode=encoder(data.tokenizer), end_of_text=data.tokenizer.eot_token)
    assert tokenised([{"text": text, "opens": True}], trained).size == len(text.encode())


def test_bytes_that_stand_for_a_character_lose_nothing(config):
    assert prepare(config).notes == []
