"""Tokens to text, as they come and up to the text's end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from data.tokenizers import TextStream, Tokenizer, ends_of
from model.gpt import GPT
from recipe.infer.generation.engine import Engine, Request
from recipe.infer.generation.sampling import Sampling


class Text:
    """The text of a sequence's tokens, in pieces.

    It ends before a token that ends a text and before the text `stop`; `ended` is then true. A character may span
    several tokens: it appears with its last byte. Text that may be the beginning of `stop` is held back until it is
    not.
    """

    def __init__(self, tokenizer: Tokenizer, stop: str | None = None, prompt: Sequence[int] = ()) -> None:
        """prompt  tokens of the text that is continued"""
        self.ends, self.stop = ends_of(tokenizer), stop or ""
        self.decoder = TextStream(tokenizer, prompt)
        self.held = ""  # text that `add` has not returned yet
        self.ended = False

    def add(self, token: int) -> str:
        """The text that is certain after this token."""
        if token in self.ends:
            self.ended = True
            return self.rest()
        self.held += self.decoder.add(token)
        return self.give_out(len(self.held) - self.beginning_of_stop())

    def rest(self) -> str:
        """The text that remains when no more tokens come."""
        self.held += self.decoder.rest()
        return self.give_out(len(self.held))

    def give_out(self, end: int) -> str:
        """The held text up to `end`, or up to `stop`, which ends it all."""
        if self.stop and self.stop in self.held:
            self.ended, end = True, self.held.index(self.stop)
        piece, self.held = self.held[:end], "" if self.ended else self.held[end:]
        return piece

    def beginning_of_stop(self) -> int:
        """The length of the longest beginning of `stop` at the end of the held text."""
        longest = min(len(self.stop) - 1, len(self.held))
        return next((n for n in range(longest, 0, -1) if self.stop.startswith(self.held[-n:])), 0)


def stream(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str,
    tokens: int,
    sampling: Sampling,
    stop: str | None = None,
    dtype: torch.dtype = torch.float32,
    compile: bool = False,
) -> Iterator[str]:
    """The continuation of a prompt by at most `tokens`, in pieces. An empty prompt begins a text.

    stop            text that ends the continuation, and is not part of it
    dtype, compile  as for Engine

    Raises GenerationError, before the first piece is asked for.
    """
    before = tokenizer.encode_ordinary(prompt)
    request = Request(before or [tokenizer.eot_token], tokens)
    return pieces(Engine(model, [request], sampling, dtype=dtype, compile=compile), Text(tokenizer, stop, before))


def pieces(engine: Engine, text: Text) -> Iterator[str]:
    """The text of an engine's only request."""
    for request, token in engine.run():
        yield text.add(token)
        request.finished |= text.ended
    if not text.ended:
        yield text.rest()
