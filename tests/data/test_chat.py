"""Conversations: their tokens and answers against those of transformers, their rows, and lines that are refused."""

import itertools
import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from data.batches import GlobalBatch
from data.errors import DataError
from data.feed import ChatBatches, PackedRows, best_fit, chat_windows
from data.options import DataConfig, Documents
from data.prepare import prepare
from tests.lines import write_lines
from tests.toy_llama import TEMPLATES, conversation, conversations, tokenizer

LINES = conversations(40)


def prepared(folder, lines, theirs=None, **options: Any):
    (theirs or tokenizer()).save_pretrained(folder / "model")
    path, model = write_lines(folder / "chats.jsonl", lines), str(folder / "model" / "tokenizer.json")
    files: dict[str, Any] = {"path": str(path), "tokenizer": model, "cache": str(folder / "cache")}
    return prepare(DataConfig("chat", **files, documents=Documents.restart, **options))


def by_template(folder, lines, source):
    """The prepared conversations, and transformers' tokenizer, by the template of a file."""
    theirs: Any = tokenizer()
    theirs.chat_template = source
    return prepared(folder, lines, theirs), theirs


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("chat"), LINES)


def by_transformers(theirs, messages, **more: Any):
    """The tokens of a conversation, and whether each is of an answer."""
    found = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True, **more)
    return found["input_ids"], found["assistant_masks"]


def documents_of(split):
    """The tokens of each prepared conversation, and whether each is learned."""
    bounds = zip(split.documents, split.stops, strict=True)
    return [(split.tokens[a:b].tolist(), split.answers[a:b].tolist()) for a, b in bounds]


def packed(data, seq_len=128):
    return PackedRows(data.train, seq_len, data.tokenizer.eot_token)


@pytest.mark.parametrize("template", TEMPLATES)
def test_tokens_and_answers_are_those_of_transformers(template, tmp_path):
    theirs = tokenizer(template)
    data = prepared(tmp_path, LINES, theirs)
    found = [*documents_of(data.train), *documents_of(data.val)]
    assert len(data.val.documents) == 4
    assert found == [by_transformers(theirs, line["messages"]) for line in LINES]


def test_an_epoch_has_every_conversation_once_and_learns_its_answers_alone(data):
    rows = packed(data)
    expected = []
    for line in LINES[:36]:
        tokens, answers = by_transformers(tokenizer(), line["messages"])
        pairs = zip(tokens[1:], answers[1:], strict=True)
        expected.append((tokens[:-1], [token if answer else -100 for token, answer in pairs]))
    batches, found = ChatBatches(rows, GlobalBatch(1), seed=3), []
    for step in range(len(rows.rows)):
        batch: Any = batches.stored(step).widened()
        inputs, targets = batch.inputs[0], batch.targets[0]
        assert batch.learned == (targets >= 0).sum()
        cuts = [*np.unique(batch.document_starts[0]).tolist(), len(inputs)]
        pieces = [(inputs[a:b].tolist(), targets[a:b].tolist()) for a, b in itertools.pairwise(cuts)]
        found += [piece for piece in pieces if set(piece[1]) != {-100}]  # the end of a row has nothing to learn
        assert [b - a for a, b in itertools.pairwise(cuts)] == batches.stored(step).pieces()
    assert sorted(found) == sorted(expected)


def test_a_batch_is_the_same_however_it_is_cut(data):
    rows = packed(data)
    together = ChatBatches(rows, GlobalBatch(4), seed=1)
    for step in (0, 5):  # the second is in a later epoch
        cuts = [(GlobalBatch(1, rank, 2, 2), micro) for micro in (0, 1) for rank in (0, 1)]
        parts = [ChatBatches(rows, cut, seed=1).stored(step, micro) for cut, micro in cuts]
        for of_together, *of_parts in zip(together.stored(step)[:3], *(part[:3] for part in parts), strict=True):
            assert np.array_equal(of_together, np.concatenate(of_parts))
        assert {4 * np.asarray(part.learned).item() for part in parts} == {
            np.asarray(together.stored(step).learned).item()
        }
    assert not np.array_equal(ChatBatches(rows, GlobalBatch(4), seed=2).stored(0).inputs, together.stored(0).inputs)
    windows = chat_windows(rows, 2, 3)
    learned = torch.stack([window.learned for window in windows if window.learned is not None])
    assert learned.sum() == sum((window.targets >= 0).sum() for window in windows)


def test_rows_are_nearly_full():
    lengths = np.random.default_rng(0).integers(1, 100, 2000)
    rows = best_fit(lengths, 128)
    assert sorted(item for row in rows for item in row) == list(range(2000))
    assert all(lengths[row].sum() <= 128 for row in rows)
    assert len(rows) <= 1.02 * max(lengths.sum() / 128, (lengths > 64).sum())


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ({"text": "hello"}, "line 2 of {path} has no list of messages; a line is"),
        ({"messages": [{"content": "hello"}]}, "line 2 of {path} has no role in message 1"),
        ({"messages": [{"role": "user"}]}, "line 2 of {path} has no content in message 1"),
        ({"messages": [{"role": "user", "content": "hello"}]}, "line 2 of {path} has no answer"),
        (conversation("hello", " "), "line 2 of {path} has an empty answer in message 2"),
        ({"messages": [{"role": "cook", "content": "x"}, *conversation("a", "b")["messages"]]},
         "line 2 of {path} cannot be written as text (the chat template refuses it: TemplateError: no role cook)"),
    ],
)  # fmt: skip
def test_a_line_that_is_no_conversation_is_named(line, sentence, tmp_path):
    with pytest.raises(DataError) as refusal:
        prepared(tmp_path, [conversation("a", "b"), line, *LINES], tokenizer("llama2"))
    assert str(refusal.value).startswith(sentence.format(path=tmp_path / "chats.jsonl"))


def test_a_conversation_that_is_longer_than_a_row_is_named(tmp_path):
    data = prepared(tmp_path, [*LINES[:3], conversation("a", "Yes. " * 200), *LINES])
    with pytest.raises(DataError, match=r"longer than seq_len=128 \(1, the first is number 4\); set seq_len=\d+"):
        packed(data)


def test_a_tokenizer_without_a_template_and_options_without_effect_are_refused(tmp_path):
    with pytest.raises(DataError, match="has no chat template"):
        prepared(tmp_path, LINES, tokenizer(None))
    with pytest.raises(DataError, match="data=chat puts several conversations into a sequence"):
        prepare(DataConfig(name="chat", path="x.jsonl", tokenizer=str(tmp_path / "model" / "tokenizer.json")))
    with pytest.raises(DataError, match="data=chat needs a tokenizer with a chat template"):
        prepare(DataConfig(name="chat", path="x.jsonl", documents=Documents.restart))
    with pytest.raises(DataError, match="max_tokens=5 has no effect with data=chat"):
        prepared(tmp_path, LINES, max_tokens=5)


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path):
    last_alone = "{% for m in messages %}{{ m['role'] }}{% if loop.last %}{{ m['content'] }}{% endif %}{% endfor %}"
    with pytest.raises(DataError, match=r"line 1 of .* in another way when more follow"):
        by_template(tmp_path, LINES, last_alone)


def test_tools_reach_the_template_parts_are_joined_and_an_answer_of_weight_0_is_not_learned(tmp_path):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "1 + 2?"}]
    lines: list[Any] = [
        {"messages": [{"role": "user", "content": "1 + 2?"}, {"role": "assistant", "content": "5", "weight": 0},
                      {"role": "user", "content": "No."}, {"role": "assistant", "content": "It is 3."}],
         "tools": tools},
        {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "Yes."}]},
        *LINES,
    ]  # fmt: skip
    source = "{% if tools %}{{ tools | tojson }}{% endif %}" + TEMPLATES["llama3"]
    data, theirs = by_template(tmp_path, lines, source)
    tokens, answers = by_transformers(theirs, lines[0]["messages"], tools=tools)
    second = answers.index(0, answers.index(1))  # transformers marks both answers; the first is not to be learned
    assert documents_of(data.train)[:2] == [
        (tokens, [0] * second + answers[second:]),
        by_transformers(theirs, conversation("What is 1 + 2?", "Yes.")["messages"]),
    ]


def test_an_answer_that_calls_a_tool_needs_no_content(tmp_path):
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
    result = [{"role": "tool", "content": "3"}, {"role": "assistant", "content": "It is 3."}]
    line: Any = {"messages": [{"role": "user", "content": "1 + 2?"}, call, *result]}
    source = (
        "{% for m in messages %}{{ m['role'] }}: {% if m['role'] == 'assistant' %}{% generation %}"
        "{% if m['tool_calls'] %}{{ m['tool_calls'] | tojson }}{% else %}{{ m['content'] }}{% endif %};"
        "{% endgeneration %}{% else %}{{ m['content'] }};{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    data, theirs = by_template(tmp_path, [line, *LINES], source)
    assert documents_of(data.train)[0] == by_transformers(theirs, line["messages"])


@pytest.mark.parametrize(
    "line",
    [
        {"conversations": [{"from": "human", "value": "What\nis it?"}, {"from": "gpt", "value": 'It is "木".'}]},
        {"instruction": "What\nis it?", "input": "", "output": 'It is "木".'},
    ],
)
def test_other_forms_are_refused_with_the_line_that_converts_them(line, tmp_path):
    with pytest.raises(DataError, match="convert the file with:") as refusal:
        prepared(tmp_path, [line] * 20)
    command = str(refusal.value).partition("\n")[2].replace("python ", f"{sys.executable} ", 1)
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    converted = [json.loads(text) for text in (tmp_path / "messages-chats.jsonl").read_text().splitlines()]
    assert converted == [conversation("What\nis it?", 'It is "木".')] * 20
