"""Prompts from a file, and their continuations to another."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from data.tokenizers import Tokenizer
from recipe.files import to_json
from recipe.generation.engine import Engine
from recipe.generation.errors import GenerationError
from recipe.generation.text import Text


@dataclass(frozen=True)
class Continuation:
    """A prompt's text: what was added to prompt number `index`, in how many tokens, and after how many seconds."""

    index: int
    prompt: str
    text: str
    tokens: int
    seconds: float

    def as_json(self) -> str:
        """One line."""
        return to_json(vars(self))


def read_prompts(path: Path) -> list[str]:
    """A prompt from each line of a file; of a .jsonl file, the "prompt" of each line.

    Raises GenerationError where the file cannot be read or is empty, and for a line without a prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise GenerationError(
            f"prompts={path} cannot be read ({reason}); name a file with one prompt per line."
        ) from error
    if lines == [""]:
        raise GenerationError(f"prompts={path} is empty; give it at least one prompt.")
    is_json = path.suffix == ".jsonl"
    prompts = []
    for number, line in enumerate(lines, 1):
        prompt = prompt_of_json(line) if is_json else line
        if not prompt:
            wanted = 'a JSON object with a "prompt"' if is_json else "a prompt"
            raise GenerationError(f"Line {number} of prompts={path} is not {wanted}; write one there, or take it out.")
        prompts.append(prompt)
    return prompts


def prompt_of_json(line: str) -> str | None:
    """The prompt of a line of JSON, if there is one."""
    try:
        content = json.loads(line)
        prompt = content.get("prompt") if isinstance(content, dict) else None
        return prompt if isinstance(prompt, str) and prompt.encode() else None
    except ValueError:  # also of half a character, such as \ud800, which no file can hold
        return None


def continuations(
    engine: Engine, prompts: Sequence[str], tokenizer: Tokenizer, stop: str | None = None
) -> Iterator[Continuation]:
    """The continuation of each of an engine's requests, whose texts are `prompts`, at its end.

    stop  text that ends a continuation, and is not part of it
    """
    texts = [Text(tokenizer, stop, request.prompt) for request in engine.requests]
    begin = time.perf_counter()
    indices = {request: index for index, request in enumerate(engine.requests)}
    added = [""] * len(prompts)
    for request, token in engine.run():
        index = indices[request]
        added[index] += texts[index].add(token)
        request.finished |= texts[index].ended
        if request.finished:
            added[index] += "" if texts[index].ended else texts[index].rest()
            seconds = round(time.perf_counter() - begin, 3)
            yield Continuation(index, prompts[index], added[index], len(request.tokens), seconds)


def open_new(path: Path) -> Callable[[str], object]:
    """What appends a line to a new file, on the disk at once. Raises GenerationError for a file that is there."""
    try:
        file = path.open("x", encoding="utf-8", buffering=1)
    except FileExistsError as error:
        raise GenerationError(f"out={path} exists, and is not overwritten; name another file.") from error
    except OSError as error:
        raise GenerationError(f"out={path} cannot be written ({error.strerror}); name another file.") from error
    return lambda line: file.write(line + "\n")


def write(found: Iterator[Continuation], count: int, put: Callable[[str], object]) -> None:
    """Put each continuation as a line of JSON, and tell on stderr how many of `count` are done."""
    begin, tokens = time.perf_counter(), 0
    for done, continuation in enumerate(found, 1):
        put(continuation.as_json())
        tokens += continuation.tokens
        if done == count or sys.stderr.isatty():
            rate = tokens / (time.perf_counter() - begin)
            end = "\n" if done == count else "\r"
            print(f"{done} of {count} prompts, {rate:,.0f} tokens/s", end=end, file=sys.stderr, flush=True)
