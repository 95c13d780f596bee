"""Prompts from a file, tokens to text as they come and up to the text's end, and texts to a file."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from data.chat import end_at_answers
from data.errors import brief
from data.files import rows_in
from data.tokenizers import Tokenizer, ends_of, load_tokenizer
from data.untrusted import LINE, UntrustedError, read_text
from model.gpt import GPT
from recipe.files import to_json
from recipe.infer.generation.engine import Engine, Request
from recipe.infer.generation.sampling import GenerationError, Sampling

CONTEXT = 8  # tokens of a prompt that are decoded with its continuation


class Text:
    """The text of a sequence's tokens, in pieces.

    It ends before a token that ends a text and before the first of the texts `stops`; `ended` is then true. A character
    may span several tokens: it appears with its last byte. Text that may be the beginning of a stop is held back until
    it is not.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), prompt: Sequence[int] = ()) -> None:
        """prompt  tokens of the text that is continued: many tokenizers drop the blank before a text's first word"""
        self.tokenizer, self.tokens = tokenizer, list(prompt)
        self.ends, self.stops = ends_of(tokenizer), list(filter(None, stops))
        # The DecodeStream of `tokenizers` raises an error at bytes that are not UTF-8, which a model may well generate.
        self.decoded = len(self.tokens)  # number of tokens whose text is decoded
        self.first = max(0, self.decoded - CONTEXT)  # the first token that is decoded again with the next ones
        self.held = ""  # text that `add` has not returned yet
        self.ended = False

    def add(self, token: int) -> str:
        """The text that is certain after this token."""
        if token in self.ends:
            self.ended = True
            return self.rest()
        self.tokens.append(token)
        text = self.undecoded()
        if text and not text.endswith("\ufffd"):  # a character may be incomplete
            self.first, self.decoded = self.decoded, len(self.tokens)
            self.held += text
        return self.give_out(len(self.held) - self.beginning_of_stop())

    def rest(self) -> str:
        """The text that remains when no more tokens come."""
        self.held += self.undecoded()
        return self.give_out(len(self.held))

    def undecoded(self) -> str:
        """The text of the newest tokens, complete or not."""
        before, text = (self.tokenizer.decode(self.tokens[self.first : end]) for end in (self.decoded, None))
        return text[len(before) :]

    def give_out(self, end: int) -> str:
        """The held text up to `end`, or up to the first stop, which ends it all."""
        if found := [self.held.index(stop) for stop in self.stops if stop in self.held]:
            self.ended, end = True, min(found)
        piece, self.held = self.held[:end], "" if self.ended else self.held[end:]
        return piece

    def beginning_of_stop(self) -> int:
        """The length of the longest beginning of a stop at the end of the held text."""
        lengths = range(len(self.held), 0, -1)
        return next((n for n in lengths if any(stop.startswith(self.held[-n:]) for stop in self.stops)), 0)


def stream(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str,
    tokens: int,
    sampling: Sampling,
    stop: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Iterator[str]:
    """The continuation of a prompt by at most `tokens`, in pieces. An empty prompt begins a text.

    stop   text that ends the continuation, and is not part of it
    dtype  as for Engine

    Raises GenerationError, before the first piece is asked for.
    """
    (request,) = requests_of([prompt], tokenizer, tokens)
    engine = Engine(model, [request], sampling, dtype=dtype)
    return (piece for _, piece in texts(engine, {request: continued(request, tokenizer, stop)}))


def sample_of_run(model: GPT, folder: Path, tokens: int, seed: int) -> str:
    """What the model of a complete run generates, or why it does not: an attention may refuse lengths of a text."""
    tokenizer, sampling = load_tokenizer(folder), Sampling(temperature=0.8, top_k=50, seed=seed)
    end_at_answers(tokenizer, folder)
    try:
        text = "".join(stream(model, tokenizer, "\n", tokens, sampling, dtype=model.shape.dtype)).strip()
    except Exception as error:
        return f"the run is complete, but has no sample ({brief(error)}); training.sample_tokens=0 asks for none"
    return f"\n{text}\n"


def continued(request: Request, tokenizer: Tokenizer, stop: str | None) -> Text:
    """The text that continues a request's prompt, which is an end of text alone where it continues none."""
    begins = list(request.prompt) == [tokenizer.eot_token]
    return Text(tokenizer, [stop or ""], () if begins else request.prompt)


def texts(engine: Engine, every: Mapping[Request, Text]) -> Iterator[tuple[Request, str]]:
    """Each of an engine's requests with its next piece of text; the last one comes when it is finished."""
    for request, token in engine.run():
        text = every[request]
        piece = text.add(token)
        request.finished |= text.ended
        yield request, piece + (text.rest() if request.finished and not text.ended else "")


@dataclass(frozen=True)
class Continuation:
    """The text that was added to prompt number `index`, its number of tokens, and the seconds until it was complete.

    sample  the number of this text among the texts of its prompt
    """

    index: int
    sample: int
    prompt: str
    text: str
    tokens: int
    seconds: float

    def as_json(self) -> str:
        """One line."""
        return to_json(vars(self))


def read_lines(path: Path, option: str) -> list[str]:
    """The lines of a file that an option names. Raises GenerationError where it cannot be read or is empty."""
    try:
        text = read_text(path, LINE, pipe=True).removeprefix("\ufeff")  # a byte order mark is not part of the text
    except (OSError, UntrustedError) as error:
        raise GenerationError(
            f"{option}={path} cannot be read ({error.strerror if isinstance(error, OSError) else f'it {error}'}); "
            "name a file of text."
        ) from error
    if not text.strip("\n"):
        raise GenerationError(f"{option}={path} is empty; give it at least one line.")
    return text.removesuffix("\n").split("\n")


def read_prompts(path: Path) -> list[str]:
    """A prompt from each line of a file; of a .jsonl file, the "prompt" of each line.

    Raises GenerationError or DataError where the file cannot be read or is empty, and for a line without a prompt.
    """
    lines, prompts = read_lines(path, "prompts"), list[str]()
    rows = ((number, row.get("prompt")) for number, row in rows_in(map(str.encode, lines), path, "prompts"))
    for number, prompt in rows if path.suffix == ".jsonl" else enumerate(lines, 1):
        if not prompt or not isinstance(prompt, str):
            raise GenerationError(f"Line {number} of prompts={path} has no prompt; write one there, or take it out.")
        prompts.append(prompt)
    return prompts


def requests_of(prompts: Sequence[str], tokenizer: Tokenizer, tokens: int, samples: int = 1) -> list[Request]:
    """A request for each text: `samples` of each prompt, each with separate random numbers. An empty prompt begins a
    text."""
    return [
        Request(tokenizer.encode_ordinary(prompt) or [tokenizer.eot_token], tokens, (index, sample))
        for index, prompt in enumerate(prompts)
        for sample in range(samples)
    ]


def continuations(
    engine: Engine, prompts: Sequence[str], tokenizer: Tokenizer, stop: str | None = None
) -> Iterator[Continuation]:
    """The continuation of each of an engine's requests for `prompts`, at its end.

    stop  text that ends a continuation, and is not part of it
    """
    begin, added = time.perf_counter(), dict.fromkeys(engine.requests, "")
    for request, piece in texts(engine, {request: continued(request, tokenizer, stop) for request in engine.requests}):
        added[request] += piece
        if request.finished:
            (index, sample), seconds = request.stream, round(time.perf_counter() - begin, 3)
            yield Continuation(index, sample, prompts[index], added[request], len(request.tokens), seconds)


def open_new(path: Path) -> Callable[[Continuation], object]:
    """A function that appends a line of JSON to a new file and syncs it. Both raise GenerationError, the first one also
    if the file exists."""
    try:
        file = path.open("x", encoding="utf-8", buffering=1)
    except FileExistsError as error:
        raise GenerationError(f"out={path} exists, and is not overwritten; name another file.") from error
    except OSError as error:
        raise GenerationError(f"out={path} cannot be written ({error.strerror}); name another file.") from error

    def put(continuation: Continuation) -> None:
        try:
            file.write(continuation.as_json() + "\n")
        except OSError as error:
            raise GenerationError(f"out={path} has become incomplete ({error.strerror}); name another file.") from error

    return put


def in_order(continuations: Iterable[Continuation]) -> Iterator[Continuation]:
    """Continuations of one prompt in the order of their samples, each as soon as those before it are there."""
    waiting, following = dict[int, Continuation](), 0
    for continuation in continuations:
        waiting[continuation.sample] = continuation
        while following in waiting:
            yield waiting.pop(following)
            following += 1


def write(continuations: Iterable[Continuation], count: int, put: Callable[[Continuation], object]) -> None:
    """Pass each continuation to `put`, and report on stderr how many of `count` are done."""
    begin, tokens = time.perf_counter(), 0
    for done, continuation in enumerate(continuations, 1):
        put(continuation)
        tokens += continuation.tokens
        if done == count or sys.stderr.isatty():
            print(
                f"{done} of {count} prompts, {tokens / (time.perf_counter() - begin):,.0f} tokens/s",
                end="\n" if done == count else "\r",
                file=sys.stderr,
                flush=True,
            )
