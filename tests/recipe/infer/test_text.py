"""Tokens become text in whole characters, up to the end of text."""

import json
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers

from data.chat import ChatTemplate, end_at_answers
from data.own_tokenizer import OwnTokenizer
from data.tokenizers import bytes_tokenizer, ends_of
from model.options import GPTConfig
from recipe.infer.generation.text import Text
from recipe.infer.huggingface.starting import Start

TOKENIZER = bytes_tokenizer()


def pieces(tokens: Iterable[int], stop: str | None = None) -> list[str]:
    text, found = Text(TOKENIZER, [stop or ""]), []
    for token in tokens:
        found.append(text.add(token))
        if text.ended:
            return found
    return [*found, text.rest()]


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one\n\ntwo", "\n\n", "one"),
        ("ababac", "abac", "ab"),
        ("a\nb\n", "\n\n", "a\nb\n"),
        ("木木木", "木木", ""),
        ("never", "else", "never"),
    ],
)
def test_the_text_ends_before_the_stop_text_of_which_nothing_is_shown(text, stop, expected):
    found = pieces(text.encode(), stop)
    assert "".join(found) == expected
    assert all(expected.startswith("".join(found[:n])) for n in range(len(found)))


def test_text_that_cannot_belong_to_the_stop_text_is_shown_at_once():
    assert pieces(b"ab\nc", "\n\n") == ["a", "b", "", "\nc", ""]


def own_tokenizer() -> tokenizers.Tokenizer:
    """Its end of text is 2; the end of an answer is 1."""
    words = {"a": 0, "<|im_end|>": 1, "<|end_of_text|>": 2}
    return tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))


def test_a_text_ends_where_an_answer_of_the_runs_conversations_does(tmp_path):
    tokenizer = OwnTokenizer("words", own_tokenizer().to_str())
    end_at_answers(tokenizer, tmp_path)
    assert ends_of(tokenizer) == {2}  # of a run without conversations
    ChatTemplate("", {"eos_token": "<|im_end|>"}).save(tmp_path)
    end_at_answers(tokenizer, tmp_path)
    for end in (1, 2):
        text = Text(tokenizer)
        assert text.add(0) + text.add(end) == "a"
        assert text.ended


@pytest.mark.parametrize(
    ("given", "ends"), [({"eos_token_id": [1, 0]}, {0, 1, 2}), ({"eos_token_id": None}, {2}), ([], {2})]
)
def test_a_text_ends_where_transformers_ends_one_of_the_folders_model(given, ends, tmp_path):
    own_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    settings: Any = SimpleNamespace(model=GPTConfig(vocab_size=3))
    tokenizer = Start(tmp_path, settings, str(tmp_path / "tokenizer.json")).load_tokenizer()
    assert isinstance(tokenizer, OwnTokenizer)
    assert ends_of(tokenizer) == ends
