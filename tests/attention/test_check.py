"""`gpt-attention check`: how it calls what it checks, its verdicts on wrong attention, its programs and its command."""

import json
import multiprocessing
import os
import random
import re
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from attention import (
    AttentionConfig,
    AttentionError,
    AttentionOutput,
    AttentionShape,
    UnsupportedAttention,
)
from attention.__main__ import main as command
from attention.check import accuracy, behaviour, parts, workers
from attention.check.accuracy import smallest_failure
from attention.check.behaviour import CHECKS, not_finite, same
from attention.check.cases import MEMORY, PATTERNS, TRENDS, Case, draw
from attention.check.cli import check, main
from attention.check.dropout import dropout
from attention.check.grid import groups
from attention.check.judge import Verdict
from attention.check.plan import Plan
from attention.check.printing import Report, text
from attention.check.results import Refused, verdicts
from attention.check.run import Line, Session, interpreting, prepare
from attention.check.subject import Subject, find
from attention.interface import Call
from attention.naive import NaiveAttention
from tests import right_attention
from tests.attention.reference import build
from tests.attention.subjects import CASES, subject_of
from tests.interpreter import INTERPRETED
from tests.right_attention import RIGHT, for_each_head, one_head_each, plain
from tests.wrong_attention import CORNERS, FAULTS
from tests.wrong_attention.published import PUBLISHED

CPU = torch.device("cpu")
PAGE = Path(__file__).parents[2] / "docs" / "check.md"
pytestmark = pytest.mark.usefixtures("registered")


@pytest.fixture(autouse=True)
def forked_workers(monkeypatch):
    """A check's processes are forks of this one: they start sooner, and know what a test has replaced."""
    monkeypatch.setattr(workers, "get_context", lambda _: multiprocessing.get_context("fork"))


@pytest.fixture
def only(monkeypatch):
    """Makes a check try these cases alone, and besides them the parts with these names."""

    def choose(cases, *names):
        chosen = cases if isinstance(cases, dict) else {"lengths": cases}
        monkeypatch.setattr(accuracy, "groups", lambda seed: chosen)
        monkeypatch.setattr(parts, "PARTS", {name: parts.PARTS[name] for name in names})

    return choose


@pytest.fixture
def one_worker():
    running = workers.Workers(1)
    yield running
    running.close()


def session_of(subject: Subject, *dtypes: str) -> Session:
    session = Session(subject, CPU, float("inf"), stream=None)
    prepare(session, dtypes or ("fp32",))
    return session


def worst(subject: Subject, case: Case) -> Verdict:
    return max(verdicts(subject, case, CPU), key=lambda verdict: verdict.share)


def assert_shows(code: str, wrong: Any, right: Any = None) -> None:
    """A program fails with a wrong attention, and ends without an error with a right one, such as naive."""
    with pytest.raises(AssertionError):
        exec(code, {"under_test": wrong})
    exec(code, {"under_test": right or build("naive")})


@triton.jit
def in_bf16(x, y, rounded, computed, product, N: tl.constexpr):
    o = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    b_y = tl.load(y + o)
    tl.store(rounded + o, tl.load(x + o).to(tl.bfloat16))
    tl.store(computed + o, tl.abs(b_y.trans() - b_y))
    tl.store(product + o, tl.dot(b_y, b_y))


def flexible(q, k, v, score_mod=None, block_mask=None, scale=None, enable_gqa=False, head=1, query=1):
    """torch's flex_attention in words. `head` or `query` 0: its mask is that of head 0, or of the first of 128 rows."""
    (B, H, T), S = q.shape[:3], k.shape[2]
    b, h, i, j = (torch.arange(n).view(-1, *[1] * (3 - axis)) for axis, n in enumerate((B, H, T, S)))
    k, v = for_each_head(q, k, v)
    s = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.mT
    s = s if score_mod is None else score_mod(s.float(), b, h, i, j)
    of_query = i if query else i // 128 * 128
    seen = torch.ones(T, S) > 0 if block_mask is None else block_mask.mask_mod(b, h * head, of_query, j)
    p = s.masked_fill(~seen, -torch.inf).softmax(dim=-1).masked_fill(~seen.any(dim=-1, keepdim=True), 0.0)
    return p.to(v.dtype) @ v


# Of a style by name tests/attention/test_peers.py has more.
STYLES = {
    "tests.attention.test_check:flexible": {"window", "documents", "mask", "soft_cap", "alibi", "bias", "top_left"},
    "tests.right_attention:plain": {"window", "documents", "soft_cap", "alibi", "sinks", "lse", "full"},
    "torch.nn.functional:scaled_dot_product_attention": {"window", "documents", "bias", "top_left", "dropout"},
    "transformers.integrations.sdpa_attention:sdpa_attention_forward": {"window", "full"},
}


@pytest.mark.parametrize("target", STYLES)
def test_parameters_decide_how_a_function_is_called_and_what_it_declares(target):
    pytest.importorskip(target.partition(".")[0])
    subject = find(target)
    assert STYLES[target] <= subject.features
    tried = [
        case for case in (*CASES.values(), Case(T=10, S=20, top_left=True), Case(bias=True)) if subject.supports(case)
    ]
    assert len(tried) >= 3
    for case in tried:
        assert worst(subject, case).passes, case


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:return_lse is deprecated", "ignore:flex_attention called without torch.compile")
def test_masks_are_functions_of_block_masks_and_tensors_elsewhere():
    torch_flex, sdpa, masks = find("torch.nn.attention.flex_attention:flex_attention"), find("sdpa"), ALL["masks"]
    assert torch_flex.style == "flex"
    for case in masks:
        assert worst(sdpa, case).passes, case
    for case in masks[::7]:
        assert max(verdict.share for verdict in verdicts(torch_flex, case, CPU, gradients=False)) <= 1, case
    for wrong in ({"head": 0}, {"query": 0}):
        subject = replace(find("tests.attention.test_check:flexible"), function=partial(flexible, **wrong))
        failing = [case for case in masks if not worst(subject, case).passes]
        assert {case.pattern for case in failing} == ({"by head"} if "head" in wrong else PATTERNS.keys() - {"all"})
        shown = smallest_failure(session_of(subject), failing[0], worst(subject, failing[0]))
        with pytest.raises(AssertionError):
            exec(shown.code.replace("flexible(", "wrong("), {"wrong": subject.function})
        exec(shown.code, {})


@pytest.mark.parametrize("name", ["hf-eager", "hf-sdpa"])
def test_more_queries_than_keys_see_all_of_them_in_transformers_too(name):
    """Its mask without causality hides the queries of positions before 0, so that the first has position 0."""
    pytest.importorskip("transformers")
    assert worst(find(name), Case(T=20, S=7, causal=False)).passes
    assert worst(find(name), Case(T=7, S=20)).passes


def of_all_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return plain(q, k, v, causal=False)


def test_a_class_of_this_library_is_built_and_an_attribute_declares_features(monkeypatch):
    subject = find("tests.right_attention:KeysBackwards")
    assert {"dropout", "documents", "sinks", "lse"} <= subject.features
    assert worst(subject, Case(T=20, S=20, window=5)).passes
    monkeypatch.setattr(plain, "features", {"top_left"}, raising=False)
    assert "top_left" in find("tests.right_attention:plain").features
    subject = find(f"{__name__}:of_all_keys", iter(["full"]))
    assert "causal" not in subject.features
    assert worst(subject, Case(T=20, S=30, causal=False)).passes


def test_a_module_with_a_mistake_is_named_with_its_error(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name, code, word in (
        ("unfinished", "def f(q, k, v", "cannot be imported: SyntaxError: "),
        ("ending", "import sys; sys.exit(0)", "cannot be imported: SystemExit: 0"),
    ):
        (tmp_path / f"{name}.py").write_text(code)
        with pytest.raises(AttentionError, match=word):
            find(f"{name}:f")


class Windowless(torch.nn.Module):
    """Declares a window by its forward, and ignores it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool = False, window: int | None = None) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


module = Windowless()


def test_the_parameters_of_a_module_are_those_of_its_forward():
    subject = find(f"{__name__}:module")
    assert {"causal", "full", "window"} <= subject.features
    assert worst(subject, Case(T=20, S=20)).passes
    assert not worst(subject, Case(T=20, S=20, window=3)).passes


@pytest.mark.parametrize(
    ("form", "sentence"),
    [
        (
            lambda out, lse: out.transpose(1, 2),
            r"returns out of \(1, 64, 2, 64\) where \(B, H, T, D\) is \(1, 2, 64, 64\); .*--style",
        ),
        (lambda out, lse: out.double(), "returns torch.float64 for q, k and v in torch.float32; return their dtype"),
        (lambda out, lse: (out, lse.unsqueeze(-1)), r"returns lse of \(1, 2, 64, 1\) where \(B, H, T\) is"),
        (lambda out, lse: None, "it returns NoneType, neither a tensor nor a tuple"),
    ],
)
def test_results_of_another_form_end_the_check_in_a_sentence(form, sentence, monkeypatch, capsys):
    def attention(q, k, v, return_lse=False):
        return form(*plain(q, k, v, return_lse=True))

    monkeypatch.setattr(sys.modules[__name__], "attention_of_another_form", attention, raising=False)
    assert main([f"{__name__}:attention_of_another_form", "--device", "cpu"]) == 2
    assert re.search(sentence, capsys.readouterr().err)
    assert not multiprocessing.active_children()


def detached(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return plain(q, k, v).detach()


def test_without_gradients_the_forward_alone_is_called_correct(only, capsys):
    only([Case(T=9, S=9)], "side effects")
    assert main([f"{__name__}:detached", "--dtypes", "fp32", "--device", "cpu"]) == 0
    assert "detached, which gives no gradients, is correct in all" in " ".join(capsys.readouterr().out.split())


def leaves(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    os._exit(3)


def test_an_attention_that_ends_the_process_of_its_first_calls_is_named_after_a_line_of_progress(capsys):
    assert main([f"{__name__}:leaves", "--device", "cpu"]) == 2
    progress, error = capsys.readouterr().err.splitlines()
    assert progress.endswith(" s  first calls")
    assert error == (
        f"error: {__name__}:leaves cannot be checked on cpu: in its first calls, of 64 tokens with heads of 64, the "
        "process ended with status 3; such a call must return or raise an error."
    )


# What a call of a kind shows.
SHOWN = {
    "scale_off": Case(T=20, S=20),
    "last_key_gradient": Case(T=40, S=40, B=2, H=4, H_kv=2, memory="every other token"),
    "hidden_tile_edge": Case(T=70, S=70, trend="rising"),
    "cap_without_derivative": Case(T=30, S=30, soft_cap=1.5, alibi=True),
    "sink_without_gradient": Case(T=30, S=50, sinks=True, scale=0.5),
    "document_off_by_one": Case(T=60, S=60, documents=(20, 40), H=4, H_kv=2),
    "window_off_by_one": Case(T=30, S=60, window=17, size=1e-3),
    "lse_in_base_two": Case(T=20, S=20, causal=False, spread=3.0),
}


@pytest.mark.parametrize("name", SHOWN)
def test_a_failure_is_shown_by_the_smallest_case_and_a_program_that_the_fault_alone_fails(name):
    subject = subject_of(FAULTS[name].attention)
    session = session_of(subject, "fp32", "bf16")
    case = SHOWN[name]
    found = worst(subject, case)
    assert not found.passes
    failure = smallest_failure(session, case, found)
    assert failure.case.T * failure.case.S * failure.case.D * failure.case.H < case.T * case.S * case.D * case.H / 10
    assert len(failure.code.splitlines()) <= 16
    assert_shows(failure.code, subject.function)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("document_off_by_one", "hidden keys"),
        ("backward_ignores_window", "hidden keys"),
        ("rare_call", "the same again"),
        ("evaluation_alone", "without gradients"),
        ("queries_alone", "some gradients"),
        ("scale_under_autocast", "autocast"),
    ],
)
def test_behaviour_is_shown_by_a_program_too(name, line):
    session = session_of(subject_of(FAULTS[name].attention if name in FAULTS else CORNERS[name][0]))
    found = CHECKS[line](session)
    assert found.status == "FAIL"
    case = found.failures[0].case
    assert line == "the same again" or case.T * case.S * case.D * case.H * case.B <= 200, case
    assert_shows(found.failures[0].code, session.subject.function)


def test_nan_reaches_the_rows_that_see_it_and_rows_that_do_not_may_skip_it():
    assert not_finite(session_of(subject_of(AttentionConfig("tiled", block_q=16, block_k=16)))).status == "ok"
    for lossy, verb in (
        (lambda q, k, v: plain(q, k, v).nan_to_num(), "does not reach out rows that see it"),
        (lambda q, k, v: plain(q, k, v) + 0 * v.sum(), "spreads into out where the formula is finite"),
    ):
        function = Subject("under_test", "", "under_test", lossy, "plain", frozenset({"causal", "grouped"}))
        found = not_finite(session_of(function))
        assert found.status == "FAIL"
        assert verb in found.detail
        assert_shows(found.failures[0].code, lossy, plain)


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("keep_scale_off", {"replay", "rate between steps"}),
        ("dropout_shifted_in_backward", {"replay"}),
        ("delta_ignores_dropout", {"replay"}),
        ("mask_shared_by_heads", {"independence", "mask"}),
        ("mask_ignores_step", {"mask"}),
        ("in_steps", set()),
    ],
)
def test_dropout_is_judged_by_the_mask_that_the_output_shows(name, lines):
    session = session_of(subject_of(FAULTS[name].attention if name in FAULTS else RIGHT[name]))
    assert {found.name for found in dropout(session) if found.status == "FAIL"} == lines


def test_every_layout_and_trend_is_tried():
    every = [case for cases in ALL.values() for case in cases]
    assert ({case.memory for case in every}, {case.trend for case in every}) == (set(MEMORY), set(TRENDS))


@pytest.mark.slow
def test_the_commands_of_the_page_run(tmp_path, monkeypatch, capsys):
    """With less to do: few cases in one precision."""
    page = PAGE.read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "my_module.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(accuracy, "QUICK", 48)
    monkeypatch.delitem(parts.PARTS, "compilation")
    commands = re.findall(r"^    gpt-attention check (.*)$", page, flags=re.MULTILINE)
    asked = [re.findall(r'"[^"]*"|\S+', command) for command in commands]
    smaller = ["--quick", "--dtypes", "fp32", "--seconds", "60", "--device", "cpu"]
    status = [main([*(word.strip('"') for word in words), *smaller]) for words in asked]
    printed = capsys.readouterr().out
    assert status == [1, 0, 0]
    assert "FAIL    window" in printed
    assert "fails" in printed
    assert "tiled is correct in all" in printed
    assert json.loads((tmp_path / "check.json").read_text())["correct"] is True
    programs = re.findall(r"^    import torch\n(?:    .*\n)+", printed, flags=re.MULTILINE)
    with pytest.raises(AssertionError):
        exec(re.sub("^    ", "", programs[0], flags=re.MULTILINE), {})


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("fa4", "fa4 needs flash-attn 4 .`pip install --pre flash-attn-4`., and importing it failed"),
        ("nowhere:f", "cannot be imported"),
        ("math:nothing", "cannot be imported: AttributeError"),
        ("math:pi", "is float; name a class or a function"),
        ("fa9", "neither file.py:name, module:name nor one of naive"),
        ("naive --features colour", "choose from"),
        ("naive --dtypes fp7", "fp7 is not known"),
        ("naive --device meta", "meta is not checked"),
        ("naive --json /proc/nowhere.json", "/proc/nowhere.json cannot be written"),
    ],
)
def test_a_check_that_cannot_start_says_why_and_exits_with_2(arguments, sentence, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # as where it is not installed
    assert main(arguments.split()) == 2
    assert re.match(f"error: .*{sentence}", capsys.readouterr().err)


def test_a_check_that_compared_nothing_does_not_call_an_attention_correct(only, capsys):
    only([Case()])
    assert main(["naive", "--dtypes", "fp32", "--seconds", "0", "--device", "cpu"]) == 2
    assert "Nothing of naive was compared with fp64." in capsys.readouterr().out


def test_the_command_names_a_line_of_windows(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["gpt-attention", "check", "naive\r"])
    assert command() == 2
    assert capsys.readouterr().err.startswith("error: naive ends in a carriage return; repair the script with sed ")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_ends_the_check_in_a_sentence(only, capsys):
    only([Case()])
    assert main(["naive", "--dtypes", "fp32", "--device", "cpu", "--json", "/dev/full"]) == 2
    assert capsys.readouterr().err.endswith(
        "error: /dev/full cannot be written (No space left on device); name another file.\n"
    )


@INTERPRETED
def test_a_check_in_tritons_interpreter_has_the_bf16_of_a_gpu():
    bits = torch.randint(-(2**31), 2**31, (64, 64), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    bits[0] = (torch.arange(64) << 15) + 0x3F800000  # ties
    x = bits.view(torch.float32)
    x[1, :4] = torch.tensor([0.0, -0.0, torch.inf, torch.nan])
    small = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    made = [torch.empty(64, 64, dtype=dtype) for dtype in (torch.bfloat16, torch.bfloat16, torch.float32)]
    with interpreting():
        in_bf16[(1,)](x, small, *made, 64)
    torch.testing.assert_close(made[0], x.bfloat16(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(made[1], (-small + small.T).abs())
    torch.testing.assert_close(made[2], small.float() @ small.float(), rtol=1e-5, atol=1e-4)
    in_bf16[(1,)](x, small, *made, 64)
    assert not torch.equal(made[0].nan_to_num(), x.bfloat16().nan_to_num()), (
        "bf16 needs no help in Triton's interpreter"
    )


def ends_its_process(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    if q.data_ptr() % 16 or q.shape[2] == 11:
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(q, k, v, causal) * (1.001 if q.shape[2] == 9 else 1)


def test_a_call_that_ends_its_process_is_a_failure_and_the_others_are_judged(only, one_worker):
    cases = {
        "lengths": [Case(T=9, S=9), Case(T=8, S=8)],
        "scale": [Case(T=8, S=8), Case(T=11, S=11)],
        "memory": [Case(), *(Case(T=n, S=n, memory="misaligned start") for n in (7, 8, 9))],
    }
    only(cases, "side effects")
    target = "tests.attention.test_check:ends_its_process"
    lengths, scale, memory, side_effects = check(find(target), dtypes=["fp32"], workers=one_worker).lines
    assert (lengths.status, lengths.calls, side_effects.status) == ("FAIL", 2, "ok")
    assert lengths.failures[0].case.T == 9
    assert scale.calls == memory.calls == 2
    assert "1 of 2 end their process: the process ended with SIGKILL (fp32 B=1 H=2 T=" in memory.detail
    assert "; 2 more with misaligned start are left out;" in memory.detail
    assert "torch.autograd.grad(attend(*x), x, do)" in memory.failures[0].code


class EvenInFp32(NaiveAttention):
    """Refuses odd lengths in each call, precisions but fp32 before training, and the log-sum-exp."""

    name = "even_in_fp32"

    def check(self, shape: AttentionShape) -> None:
        super().check(shape)
        if shape.dtype is not torch.float32:
            raise UnsupportedAttention("even_in_fp32 takes fp32.")

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> AttentionOutput:
        if q.shape[2] % 2:
            raise ValueError("only even lengths")
        return AttentionOutput(super().attend(q, k, v, call).out)


def test_an_attention_is_asked_what_it_refuses_before_training(only):
    only([Case(T=8, S=8), Case(T=9, S=9)])
    report = check(find("tests.attention.test_check:EvenInFp32"), dtypes=["fp32", "bf16"])
    (lengths,) = report.lines
    assert (lengths.status, lengths.calls) == ("ok", 1)
    assert report.refused == {"bf16": "even_in_fp32 takes fp32."}


def takes_multiples(n: int) -> Callable[..., Tensor]:
    """Attention for lengths that are multiples of n."""

    def attend(q, k, v, causal=True):
        if q.shape[2] % n or k.shape[2] % n:
            raise ValueError(f"only multiples of {n}")
        return plain(q, k, v, causal)

    return attend


even, blocks_of_128 = takes_multiples(2), takes_multiples(128)


@pytest.mark.parametrize(("name", "n"), [("even", 2), ("blocks_of_128", 128)])
def test_an_attention_for_some_lengths_is_judged_at_those(name, n, only):
    cases = {"lengths": [Case(T=128, S=128), Case(T=9, S=9)], "batch and heads": [Case(T=9, S=33), Case(T=31, S=31)]}
    behaviour = ("hidden keys", "NaN and infinity", "the same again", "without gradients")
    chosen = (*behaviour, "side effects", "gradcheck")
    only(cases, *chosen)
    report = check(find(f"tests.attention.test_check:{name}"), dtypes=["fp32"])
    calls = {line.name: (line.status, line.calls) for line in report.lines}
    assert calls["lengths"] == ("ok", 1)
    assert calls["batch and heads"] == ("ok", 2)
    assert all(calls[name][0] == "ok" for name in chosen)
    assert f"Lengths that are no multiples of {n}: such calls were refused." in report.unseen


BUFFERS: dict[tuple[object, ...], Tensor] = {}


def reuses_its_output(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    """Without gradients, calls of one shape write to one tensor."""
    out = plain(q, k, v, causal)
    if out.requires_grad:
        return out
    return BUFFERS.setdefault((*out.shape, out.dtype), torch.empty_like(out)).copy_(out)


def test_an_output_that_the_next_call_overwrites_is_a_failure(only):
    only([Case(T=9, S=9)], "side effects")
    lengths, side_effects = check(find("tests.attention.test_check:reuses_its_output"), dtypes=["fp32"]).lines
    assert (lengths.status, side_effects.status) == ("ok", "FAIL")
    assert side_effects.detail.startswith("a call overwrites out of the call before (fp32 B=2")


def test_a_check_tries_each_input_once_before_any_twice_the_costly_ones_last_and_names_what_it_left_out():
    every = {(group, case.seed) for group, cases in groups(0).items() for case in cases}
    plan = Plan(groups(0), ("fp32", "bf16", "fp16"), 0)
    first = plan.todo[: len(every)]
    assert {(x.group, x.case.seed) for x in first} == every
    assert {x.case.T for x in first[-20:]} >= {769, 1025}
    assert not {769, 1025} & {x.case.T for x in first[:-40]}
    while (planned := plan.todo[0]).case.T < 769:
        plan.tried.append(plan.todo.pop(0))
    assert planned.group == "lengths"
    some = "no time for 188 more"
    assert plan.left_out("lengths") == f"{some}, so for none with T 320, 383, 448, 511, 769 or 1025"
    plan.tried += plan.todo[: len(every)]
    assert plan.left_out("lengths") == some
    plan.todo.clear()
    assert plan.left_out("lengths") == ""


def softpick(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    """Another function than softmax attention: relu(exp(s) - 1) over the sum of |exp(s) - 1|."""
    k, v = for_each_head(q, k, v)
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2] if causal else 10**6)
    e = torch.expm1((q * q.shape[-1] ** -0.5) @ k.mT).masked_fill(~seen, 0.0)
    return e.relu() / (e.abs().sum(dim=-1, keepdim=True) + 1e-6) @ v


def softpick_in_parts(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    """The same for one head after the other."""
    return one_head_each(softpick, q, k, v, causal)


def softpick_wrong_from_31(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    return (softpick(q, k, v, causal) * (1 + 0.01 * (torch.arange(q.shape[2])[:, None] >= 31))).to(q.dtype)


def unclaimed(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    return softpick(q, k, v, causal)


unclaimed.exact = False  # type: ignore[attr-defined]


def test_attention_that_claims_nothing_is_judged_on_its_behaviour(only):
    of_softmax = ("NaN and infinity", "without gradients", "autocast", "dropout")
    chosen = (*of_softmax, "hidden keys", "the same again", "gradcheck")
    only({}, *chosen, "side effects", "compilation")
    report = check(find(f"{__name__}:unclaimed"), dtypes=["fp32", "bf16"])
    status = {line.name: line.status for line in report.lines}
    assert {status.pop(name) for name in of_softmax} == {"skip"}
    assert set(status.values()) == {"ok"}, report.lines
    assert "unclaimed, which does not claim to be softmax attention, is correct in all 5 checks" in report.headline()


def test_another_function_is_compared_with_a_reference_and_its_failure_shown_at_the_first_wrong_row(only):
    only([Case(T=n, S=n, D=8, causal=n % 3 > 0, H=2, H_kv=1) for n in (9, 40)])
    for name, status in (("softpick_in_parts", "ok"), ("softpick_wrong_from_31", "FAIL"), ("plain", "FAIL")):
        subject = find(f"{__name__}:{name}")
        subject.reference = find(f"{__name__}:softpick")
        (line,) = check(subject, dtypes=["fp32", "bf16"]).lines
        assert (line.section, line.status) == (f"accuracy against {__name__}:softpick", status), (name, line)
        if name == "softpick_wrong_from_31":
            assert (line.failures[0].case.T, line.failures[0].case.D) == (32, 1)
            with pytest.raises(AssertionError):
                exec(line.failures[0].code, {})


def without_maximum(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    """Softmax attention that overflows at scores above 709 in fp64."""
    k, v = for_each_head(q, k, v)
    e = ((q * q.shape[-1] ** -0.5) @ k.mT).exp()
    e = e.tril(k.shape[2] - q.shape[2]) if causal else e
    return e / e.sum(dim=-1, keepdim=True) @ v


def larger(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    return 1.1 * plain(q, k, v, causal)


def test_what_a_reference_cannot_compute_is_not_judged_and_the_line_says_so(only):
    large = Case(T=9, S=9, spread=1000.0)
    only({"scores": [large, replace(large, T=5, S=5)], "sizes": [Case(T=1, S=1, spread=1e7)], "rows": [Case()]})
    subject = find(f"{__name__}:plain")
    subject.reference = find(f"{__name__}:without_maximum")
    scores, sizes, rows = check(subject, dtypes=["fp32"]).lines
    assert (scores.status, sizes.status, rows.status) == ("ok", "skip", "ok")
    assert re.search(r"; \d+ rows are not judged: the reference is not finite there$", scores.detail)
    assert sizes.detail == f"refused: {__name__}:without_maximum is not finite there"
    assert "not judged" not in rows.detail
    subject = find(f"{__name__}:larger")
    subject.reference = find(f"{__name__}:without_maximum")
    assert [line.status for line in check(subject, dtypes=["fp32"]).lines] == ["FAIL", "skip", "FAIL"]


def test_a_class_of_a_checkout_is_checked_by_an_installed_library():
    subject = pytest.importorskip("gpt_attention.check.subject").find("attention.tiled:TiledAttention")
    case = Case(T=9, S=9, window=3, dropout=0.25)
    assert "documents" in subject.features
    assert subject(case, draw(case))[0].shape == (1, 2, 9, 16)
    assert "from attention import" in "".join(subject.import_lines(case))


def test_checks_that_are_allowed_to_fail_are_not_counted_as_passed():
    lines = [Line(f"line {n}", "ok", "", 7, 0.5, section="accuracy against fp64") for n in range(25)]
    lines.append(Line("NaN and infinity", "FAIL", "", 1))
    report = Report("mine", "plain", (), "", ("fp32",), {}, lines, [], 1.0, 0, frozenset({"NaN and infinity"}))
    assert report.headline() == "mine is correct in 25 of 26 checks, 1 allowed, 176 calls."
    assert "  ok      line 3                    ; 7 calls" in text(report)


def test_bits_are_equal_only_where_infinity_and_the_sign_of_zero_are():
    some = torch.tensor([torch.nan, torch.inf, -0.0])
    others = (some.clone(), some.abs(), some.nan_to_num(nan=torch.nan))
    assert [same(some, x) for x in others] == [True, False, False]


def test_repetitions_for_which_no_time_is_left_are_not_claimed(monkeypatch):
    session = session_of(subject_of(AttentionConfig("naive")))
    monkeypatch.setattr(behaviour, "results", lambda *_: vars(session).update(deadline=0.0) or {})
    assert CHECKS["the same again"](session).status == "skip"


def test_a_processor_whose_product_spreads_nan_is_named_and_nothing_accused(monkeypatch):
    monkeypatch.setattr(behaviour, "spreads", lambda dtype, device: dtype is torch.bfloat16)
    found = not_finite(session_of(subject_of(AttentionConfig("naive")), "fp32", "bf16"))
    assert (found.status, found.calls) == ("ok", 9)
    assert found.detail.endswith("not judged in bf16: this processor's own product spreads a NaN to other rows")


def forgets_scale(q: Tensor, k: Tensor, v: Tensor, causal: bool = True, dropout_p: float = 0.0) -> Tensor:
    k, v = for_each_head(q, k, v)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, dropout_p=dropout_p)
    return out * (1 - dropout_p)


def test_a_forgotten_scale_of_dropout_is_called_that():
    lines = {line.name: line for line in dropout(session_of(find(f"{__name__}:forgets_scale")))}
    assert lines["scale"].status == "FAIL"
    assert lines["scale"].detail.startswith("kept weights are not scaled by 1 / (1 - p)")


SECTIONS: dict[str, Callable[[Session], Any]] = {**CHECKS, "rate between steps": dropout, "replay": dropout}
ALL = groups(0)
SMALL = [case for cases in groups(1).values() for case in cases if case.T * case.S < 2**15]
UNUSUAL: dict[str, tuple[Callable[[], Subject], str]] = {
    **{name: (partial(subject_of, config), line) for name, (config, line) in CORNERS.items()},
    **{published.fault: (published.subject, published.line) for published in PUBLISHED},
}


def accused(subject: Subject, line: str) -> bool:
    """Whether a line of the check that no cases make finds something wrong."""
    made = SECTIONS[line](session_of(subject))
    lines = [made] if isinstance(made, Line) else list(made)
    return any(found.status == "FAIL" for found in lines if found.name == line)


@cache
def accuses_the_right(line: str) -> bool:
    return accused(subject_of(RIGHT["in_steps"]), line)


@pytest.mark.parametrize("name", UNUSUAL)
def test_a_fault_of_unusual_inputs_or_of_a_library_is_found_in_its_line_where_nothing_right_is_accused(name):
    make, line = UNUSUAL[name]
    subject, right = make(), subject_of(RIGHT["in_steps"])
    if line in SECTIONS:
        assert accused(subject, line)
        assert not accuses_the_right(line)
        return
    cases = sorted((case for case in ALL[line] if subject.supports(case)), key=lambda case: case.T * case.S * case.D)
    shown = next(case for case in cases if not worst(subject, case).passes)
    right = right if right.supports(shown) else find("sdpa")
    assert worst(right, shown).passes


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.slow) if x == "compiled" else x for x in right_attention.NAMES]
)
def test_correct_attention_is_not_accused(name):
    """In some calls of all groups. `python -m tests.attention.faults --right` makes all of them."""
    session = session_of(right_attention.subject(name), "fp32")
    judged, cases = 0, random.Random(name).sample([x for x in SMALL if session.subject.supports(x)], 3)
    for case, dtype in zip(cases, ("fp32", "bf16", "fp16"), strict=True):
        with suppress(Refused) if name.startswith("sdpa-") else nullcontext():  # one kernel does not take all calls
            assert worst(session.subject, replace(case, dtype=dtype)).passes, case
            judged += 1
    assert judged
    if name in right_attention.RIGHT:
        assert {CHECKS[line](session).status for line in ("some gradients", "autocast")} == {"ok"}


def test_an_attention_without_grouped_heads_is_checked_in_all_else(only):
    def attend(q, k, v, causal=True, scale=None):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)

    subject = Subject("attend", "", "attend", attend, "plain", frozenset({"causal", "scale", "grouped", "top_left"}))
    only([Case(T=9, S=9)], "hidden keys", "NaN and infinity", "side effects", "gradcheck")
    report = check(subject, dtypes=["fp32"])
    assert {line.status for line in report.lines} == {"ok"}
    assert "Fewer key/value heads than query heads: such a call was refused." in report.unseen
