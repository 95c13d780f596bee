"""Conversations to tokens, by the tokenizer's chat template, with a mark on the tokens of answers.

A line of the file is one conversation:

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}

Beside `messages` may stand `tools`, for the template; an answer with "weight": 0 is not learned.

The template is the Jinja template that transformers reads from the tokenizer's folder. It runs in Jinja's sandbox and
has no clock, so that the same file gives the same tokens every day. An answer is the text that the template adds for a
message of the assistant after its generation prompt, the marks that end the message included.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import tokenizers
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from data.atomic import write_atomically
from data.errors import DataError, brief
from data.files import Row, Span, numbered_rows
from data.own_tokenizer import OwnTokenizer
from data.tokenizers import Tokenised, Tokenizer
from data.untrusted import RECORD, read_json, read_text

Messages = Sequence[Mapping[str, Any]]
CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
FILE = "chat_template.json"  # in a run folder
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
EXAMPLE = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'

# Programs that convert lines of other forms, by a field that only these have.
CONVERSIONS = {
    "conversations": "import json, sys; roles = {'human': 'user', 'gpt': 'assistant'}; [print(json.dumps({'messages': "
    "[{'role': roles.get(m['from'], m['from']), 'content': m['value']} for m in json.loads(line)['conversations']]})) "
    "for line in sys.stdin if line.strip()]",
    "instruction": "import json, sys; [print(json.dumps({'messages': [{'role': 'user', 'content': r['instruction'] + "
    "('\\n\\n' + r['input'] if r.get('input') else '')}, {'role': 'assistant', 'content': r['output']}]})) "
    "for r in map(json.loads, sys.stdin)]",
}


class Generation(Extension):
    """{% generation %}, with which some templates enclose answers, has no effect on the text."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


@dataclass(frozen=True)
class ChatTemplate:
    """A template, and the special tokens that it may name: bos_token, eos_token and others."""

    source: str
    tokens: dict[str, str]

    @cached_property
    def _template(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        environment.globals["raise_exception"] = _refuse
        return environment.from_string(self.source)

    def render(self, messages: Messages, add_generation_prompt: bool = False, tools: list[Any] | None = None) -> str:
        """The text of a conversation. Raises jinja2.TemplateError where the template refuses it."""
        return self._template.render(
            messages=messages, tools=tools, documents=None, add_generation_prompt=add_generation_prompt, **self.tokens
        )

    def answers(self, messages: Messages, tools: list[Any] | None = None) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation, and where each answer that is to be learned begins and ends in it.

        Raises jinja2.TemplateError, and ValueError where a part of a conversation is no beginning of the whole.
        """
        text, spans = self.render(messages, tools=tools), []
        for n, message in enumerate(messages):
            if message["role"] != "assistant" or message.get("weight") == 0:
                continue
            before = self.render(messages[:n], add_generation_prompt=True, tools=tools)
            after = self.render(messages[: n + 1], tools=tools)
            if not (after.startswith(before) and text.startswith(after)):
                raise ValueError(
                    f"the chat template writes the first {n + 1} messages in another way when more follow, so that "
                    "their answer cannot be located"
                )
            spans.append((len(before), len(after)))
        return text, spans

    def save(self, folder: Path) -> None:
        """Write the template to a run's folder."""
        write_atomically(folder / FILE, json.dumps(asdict(self)))


def load_template(run: Path) -> ChatTemplate | None:
    """The template of a run's conversations; None where it trained on none. Raises DataError."""
    try:
        return ChatTemplate(**read_json(run / FILE)) if (run / FILE).exists() else None
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{run / FILE} cannot be read ({brief(error)}); restore it, or remove it.") from error


def end_at_answers(tokenizer: Tokenizer, run: Path) -> None:
    """Let generated text also end where an answer does, if the run trained on conversations. Raises DataError."""
    template = load_template(run)
    if template is not None and isinstance(tokenizer, OwnTokenizer):
        end = tokenizer.model.token_to_id(str(template.tokens.get("eos_token", "")))
        if end is not None:
            tokenizer.ends.add(end)


def read_template(tokenizer: str) -> ChatTemplate:
    """The chat template beside a tokenizer.json. Raises DataError where there is none."""
    folder = Path(tokenizer).expanduser().parent
    try:
        # Its longest length may be an integer of 100 bits, which read_json refuses.
        config = json.loads(read_text(folder / CONFIG, RECORD)) if (folder / CONFIG).exists() else {}
        source = config.get("chat_template")
        if isinstance(source, list):  # several, by name
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        if (folder / TEMPLATE).exists():
            source = read_text(folder / TEMPLATE, RECORD)
        if not isinstance(source, str):
            raise DataError(
                f"{folder} has no chat template, neither in {CONFIG} nor as {TEMPLATE}; put one there, for instance "
                "from the model's chat version, or train on plain text with data=text."
            )
        named = {name: token for name in SPECIAL_TOKENS if (token := config.get(name))}
        tokens = {name: token["content"] if isinstance(token, dict) else token for name, token in named.items()}
        template = ChatTemplate(source, tokens)
        template._template  # noqa: B018 (compiles it)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, jinja2.TemplateError) as error:
        raise DataError(
            f"the chat template in {folder} cannot be read ({brief(error)}); copy or fetch its {CONFIG} again."
        ) from error
    return template


def read_conversations(span: Span, template: ChatTemplate) -> Iterator[Row]:
    """The conversations of a part of a file as rows, with the places of their answers. Raises DataError."""
    path = Path(span.path)
    for line, row in islice(numbered_rows(path), span.start, span.stop):
        for form, command in CONVERSIONS.items():
            if form in row and "messages" not in row:
                raise DataError(
                    f"line {line} of {path} has {form} and no messages; convert the file with:\n"
                    f'    python -c "{command}" < {path.name} > messages-{path.name}'
                )
        if isinstance(messages := row.get("messages"), list):
            row["messages"] = [joined(message) for message in messages]
        if flaw := next(mistakes(row), None):
            raise DataError(f"line {line} of {path} {flaw}; repair or remove it.")
        try:
            text, answers = template.answers(row["messages"], row.get("tools"))
        except Exception as error:  # a template may raise any kind
            reason = str(error) if isinstance(error, ValueError) else f"the chat template refuses it: {brief(error)}"
            raise DataError(
                f"line {line} of {path} cannot be written as text ({reason}); repair or remove it."
            ) from error
        yield {"split": span.split, "text": text, "opens": True, "answers": answers}


def joined(message: Any) -> Any:
    """A message whose content is one text, where it is a list of them."""
    parts = message.get("content") if isinstance(message, dict) else None
    if not isinstance(parts, list) or not all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in parts):
        return message
    return message | {"content": "".join(part["text"] for part in parts)}


def mistakes(row: Row) -> Iterator[str]:
    """What is wrong with a line that should be a conversation, as the end of a sentence."""
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        yield f"has no list of messages; a line is {EXAMPLE}"
        return
    if not isinstance(row.get("tools"), list | None):
        yield "has tools that are no list"
    for n, message in enumerate(messages, start=1):
        fields = message if isinstance(message, dict) else {}
        calls = fields.get("role") == "assistant" and fields.get("tool_calls")
        for name in ("role", "content"):
            value = fields.get(name)
            if calls and name == "content" and value is None:
                continue
            if not isinstance(value, str) or (name == "role" and not value):
                yield f"has no {name} in message {n}; a message is an object with role and content, both text"
                return
        if message["role"] == "assistant" and not calls and not message["content"].strip():
            yield f"has an empty answer in message {n}"
        if message.get("weight", 1) not in (0, 1):
            yield f"has the weight {message['weight']} in message {n}, which can be 0 or 1"
    if not any(message["role"] == "assistant" and message.get("weight", 1) for message in messages):
        yield "has no answer: no message with the role assistant, or all have the weight 0"


def chat_encoder(tokenizer: OwnTokenizer) -> Callable[[Row], Tokenised]:
    """A function from a row to its tokens, with a mark on those of answers.

    The name of a special token in a text becomes this token, as in transformers.
    """
    model = tokenizers.Tokenizer.from_str(tokenizer.content)
    model.encode_special_tokens = False

    def encode(row: Row) -> Tokenised:
        encoding = model.encode(row["text"], add_special_tokens=False)
        begins, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        marks = np.zeros(len(encoding.ids), np.uint8)
        for start, stop in row["answers"]:
            marks[(ends > start) & (begins < stop)] = 1
        return np.array(encoding.ids, np.uint32), marks, tokenizer.lost(encoding.ids, row["text"])

    return encode


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
