"""Tokens become text in whole characters, up to the end of text."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from data.tokenizers import bytes_tokenizer
from recipe.generation.text import Text

TOKENIZER = bytes_tokenizer()


def pieces(tokens: Iterable[int], stop: str | None = None) -> list[str]:
    text, found = Text(TOKENIZER, stop), []
    for token in tokens:
        found.append(text.add(token))
        if text.ended:
            return found
    return [*found, text.rest()]


def test_characters_of_several_tokens_are_never_split():
    text = "déjà vu — 木 🦜"
    found = pieces(text.encode())
    assert "".join(found) == text
    assert all("�" not in piece for piece in found)
    assert "".join(pieces("木".encode()[:2])) == "�"


def test_the_text_ends_before_its_end_token():
    assert "".join(pieces((104, 105, TOKENIZER.eot_token, 104))) == "hi"


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
    shown = [expected.startswith("".join(found[:n])) for n in range(len(found))]
    assert all(shown)


def test_text_that_cannot_belong_to_the_stop_text_is_shown_at_once():
    assert pieces(b"ab\nc", "\n\n") == ["a", "b", "", "\nc", ""]
