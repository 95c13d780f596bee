"""The check of mixers: planted faults are caught, right mixers are not accused."""

import json
from dataclasses import replace
from itertools import product

import pytest
import torch

from attention.__main__ import main as command
from attention.from_file import load
from mixers.cases import LONG, cases
from mixers.check import RECURRENCES, TAKES, Mixer, Subject, check, judge, main, of_function, takes_on
from tests.mixers.wrong_mixers import CHUNK, FAULTS, OF_SUMS, RIGHT, state_in_the_inputs_precision

CPU, SIZES = torch.device("cpu"), (4, 6)


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch):
    """In fp32 the longest call shows no more than a short one."""
    monkeypatch.setattr("mixers.cases.LONG", 64)


def caught(mixer: Mixer, name: str, takes: frozenset[str] = TAKES) -> str | None:
    """The group of the first case that a mixer fails in fp32; None: it fails none."""
    subject = Subject(name, mixer, RECURRENCES[name], takes)
    for case in cases(subject.recurrence, SIZES, CHUNK, takes):
        if judge(subject, case, CPU).share > 1:
            return case.group
    return None


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(name):
    assert caught(FAULTS[name], "gdn") is not None


@pytest.mark.parametrize("name", OF_SUMS)
def test_a_planted_fault_of_a_sum_is_caught(name):
    assert caught(OF_SUMS[name], "mamba2", frozenset({"beta", "scale"})) == "decays"


@pytest.mark.slow
def test_a_state_in_16_bits_is_caught_where_its_rounding_adds_up():
    (case,) = (case for case in cases(RECURRENCES["gdn"], (16, 24), CHUNK, TAKES) if case.group == "long")
    case = replace(case, lengths=(LONG,), dtype="bf16")
    right, wrong = (
        judge(Subject("mine", mixer, case.recurrence), case, CPU).share
        for mixer in (RIGHT["chunked"], state_in_the_inputs_precision)
    )
    assert right < 0.5 < 1 < wrong


@pytest.mark.parametrize(
    ("name", "kind"), [*product(RIGHT, ("mamba2", "gdn", "kda")), *product(("chunked",), RECURRENCES)]
)
def test_a_right_mixer_is_not_accused(name, kind):
    subject = Subject(name, RIGHT[name], RECURRENCES[kind])
    dtypes = ["fp32", "bf16", "fp16", "fp64"] if (name, kind) == ("chunks of 4", "kda") else ["fp32"]
    lines = list(check(subject, CPU, dtypes, CHUNK, SIZES))
    assert {line.status for line in lines} == {"ok"}


MINE = """
from mixers import Decay, Recurrence, mix

def my_mixer(q, k, v, log_decay, beta, initial=None):
    return mix(q, k, v, recurrence=Recurrence(Decay.head, True), log_decay=log_decay, beta=beta, initial=initial)

def wrong(q, k, v, log_decay, beta):
    return my_mixer(q, k, v, log_decay, beta.clamp(max=1))[0]

def packages(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None):
    q, k, v, g, beta = (x.transpose(1, 2) for x in (q, k, v, g[..., None], beta))
    options = {"recurrence": Recurrence(Decay.head, True), "log_decay": g, "beta": beta, "scale": scale}
    if cu_seqlens is None:
        out, state = mix(q, k, v, **options, initial=initial_state)
        return out.transpose(1, 2), state
    import torch
    documents = torch.arange(len(cu_seqlens) - 1).repeat_interleave(cu_seqlens.diff().long())[None]
    states = [
        mix(*(x[:, :, a:b] for x in (q, k, v)), recurrence=options["recurrence"], log_decay=g[:, :, a:b],
            beta=beta[:, :, a:b], scale=scale)[1]
        for a, b in zip(cu_seqlens[:-1], cu_seqlens[1:])
    ]
    return mix(q, k, v, **options, documents=documents)[0].transpose(1, 2), torch.cat(states)

def detached(q, k, v, log_decay, beta):
    return my_mixer(q, k, v, log_decay, beta.detach())

def attention(q, k, v, causal, documents):
    return v
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path / "mine.py"


def test_a_function_is_judged_by_the_recurrence_it_is_nearest_to(mine):
    subjects = {}
    for name in ("my_mixer", "wrong", "detached", "packages"):
        subjects[name] = of_function(name, load(f"{mine}:{name}"), None, CPU)
    assert {subject.recurrence for subject in subjects.values()} == {RECURRENCES["gdn"]}
    assert subjects["my_mixer"].takes == {"beta", "initial"}
    assert subjects["packages"].takes == {"beta", "scale", "initial", "documents"}


def test_the_command_says_what_is_right_and_what_is_wrong(mine, capsys, monkeypatch):
    options = ["--device", "cpu", "--chunk", "4", "--dtypes", "fp32", "--json", str(mine.with_suffix(".json"))]
    monkeypatch.setattr("sys.argv", ["gpt-attention", "check", f"{mine}:my_mixer", *options])
    assert command() == 0
    printed = capsys.readouterr().out
    assert "decay=head, with the delta rule" in printed
    assert "skip  documents   not among its parameters" in printed
    assert json.loads(mine.with_suffix(".json").read_text())["correct"]
    assert main([f"{mine}:packages", *options], load) == 0
    assert "refused 1: mixer=fla takes no initial state together with documents" in capsys.readouterr().out
    assert main([f"{mine}:wrong", *options], load) == 1
    assert "FAIL  beta        1 of 2 wrong, " in capsys.readouterr().out
    assert main(["fla-gdn", *options], load) == 2
    assert "error: mixer=fla needs a GPU and not cpu" in capsys.readouterr().err


def test_what_is_no_mixer_is_left_to_the_check_of_attention(mine, capsys):
    for arguments in (["--quick", "kda"], [f"{mine}:attention"], ["nowhere:mixer"]):
        assert not takes_on(arguments, load)
    for arguments in (["chunked-kda"], [f"{mine}:attention", "--mixer", "linear"]):
        assert takes_on(arguments, load)
    broken = mine.with_name("broken.py")
    broken.write_text("undefined")
    assert not takes_on([f"{broken}:mixer"], load)
    assert main([f"{broken}:mixer"], load) == 2
    assert "cannot be imported: NameError: name 'undefined' is not defined" in capsys.readouterr().err
    for option in ("--dtypes=fp8", "--chunk=0", "--device=banana", "--json=nowhere/x"):
        assert main(["chunked-gdn", option], load) == 2
        assert option.partition("=")[2] in capsys.readouterr().err
