"""A release: its parts are commands that exist, run in any order and on any day, and know what is out of date."""

from __future__ import annotations

import importlib
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.arena.cases import SEEDS, SWEEPS
from bench.experiments.cases import EXPERIMENTS
from bench.kernels import GROUPS, kernel_digests
from bench.machine import ROOT, device_name
from bench.record import RESULTS, Recorder, measurement, result_file
from bench.release.__main__ import main
from bench.release.parts import MOST_MINUTES, PARTS, Part, missing
from bench.release.status import repeats, status
from bench.tables.blocks import BLOCKS, CPU, FIGURES, GPU, H100, XEON, load_all, results_path

PART = next(part for part in PARTS if part.name == "generate-cpu")
NOW = dict.fromkeys(GROUPS, "1")


def test_no_part_takes_longer_than_nine_minutes_and_no_two_share_a_name() -> None:
    assert max(part.minutes for part in PARTS) <= MOST_MINUTES
    assert len({part.name for part in PARTS}) == len(PARTS)


def test_the_parts_measure_every_result_file_that_the_documents_show_but_those_of_other_environments() -> None:
    load_all()
    shown = {results_path(name).name for source in (*BLOCKS.values(), *FIGURES.values()) for name in source.files}
    measured = {
        f"{part.results}-{machine}.json" for part in PARTS for machine in ([GPU, H100] if part.gpus else [CPU, XEON])
    }
    assert shown - measured == {f"stack-{name}-{CPU}.json" for name in ("kernels", "tests")}  # of `make stack`


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_the_command_of_a_part_is_accepted_and_writes_its_result_file(part: Part, monkeypatch, capsys) -> None:
    """Without a GPU, a command ends with the sentence that it needs one; experiments on a CPU are looked up."""
    module, *arguments = shlex.split(part.command)
    if torch.cuda.is_available():
        pytest.skip("it would measure")
    if part.gpus == 0:
        known = module in ("bench.generate", "bench.llama", "tests.attention.faults")
        assert known or arguments[0] in {*EXPERIMENTS, *SEEDS, *SWEEPS}
        return
    if part.needs.endswith("nanoGPT"):
        monkeypatch.setattr(Path, "is_file", lambda path: True)
    if "fa4" in arguments:
        pytest.skip("its package is not installed")
    name = f"{module}.__main__" if (ROOT / module.replace(".", "/")).is_dir() else module
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module(name).main(arguments)
    assert "needs a CUDA GPU, and torch finds none here" in capsys.readouterr().err
    assert set(part.kernels) <= set(GROUPS)


def record(folder: Path, part: Part = PART, **changed: object) -> Path:
    """A result file with one finished measurement of a part."""
    path = result_file(part.results, "AMD EPYC, 2 threads", folder)
    head = measurement(shlex.split(part.command), torch.device("cpu")) | {"dirty": False, "kernels": NOW}
    with Recorder(path, ("name",), head | changed) as recorder:
        recorder.add({"name": "flash"})
    return path


def test_a_finished_part_is_up_to_date_until_a_kernel_it_measured_changes(tmp_path: Path) -> None:
    part = PART._replace(kernels=("attention",))
    path = record(tmp_path, part)
    assert status(part, path, NOW).state == "up to date"
    assert status(part, path, NOW | {"softmax": "2"}).state == "up to date"
    assert status(part, path, NOW | {"attention": "2"}).state == "older than the kernels: attention"


def test_missing_and_untrusted_files_are_distinguished(tmp_path: Path) -> None:
    assert status(PART, tmp_path / "none.json", NOW).state == "missing"
    assert status(PART, record(tmp_path, dirty=True), NOW).state == "measured with uncommitted changes"
    assert status(PART, record(tmp_path, command="python -m bench.other"), NOW).state == "measured by another command"
    path = record(tmp_path, kernels={})
    assert status(PART._replace(kernels=("cache",)), path, NOW).state == "kernels were not recorded"
    content = json.loads(path.read_text())
    content["measurements"][0]["ended"] = None
    path.write_text(json.dumps(content))
    assert status(PART, path, NOW).state == "interrupted"


def test_further_overrides_after_a_commands_end_are_the_same_part(tmp_path: Path) -> None:
    command = f"python -m {PART.command} -- data.path=input.txt"
    assert status(PART, record(tmp_path, command=command), NOW).state == "up to date"
    flash, bf16 = (next(part for part in PARTS if part.name == f"train-step-{name}") for name in ("flash", "bf16"))
    assert repeats(f"python -m {bf16.command}", bf16.command)
    assert not repeats(f"python -m {bf16.command}", flash.command)


def test_it_measures_what_is_out_of_date_and_a_second_call_continues(tmp_path, capsys) -> None:
    """With a stand-in for measuring, which records each part as done."""
    device = device_name(torch.device("cpu"))
    head = measurement([], torch.device("cpu")) | {"dirty": False}
    done: list[str] = []

    def runner(part: Part) -> bool:
        done.append(part.name)
        command = {"command": shlex.join(["python", "-m", *shlex.split(part.command)])}
        with Recorder(result_file(part.results, device, tmp_path), ("part",), head | command) as recorder:
            recorder.add({"part": part.name})
        return True

    able = [part.name for part in PARTS if not missing(part, torch.cuda.device_count())]
    shortest = min((part for part in PARTS if part.name in able), key=lambda part: part.minutes)
    assert main(["--minutes", str(shortest.minutes + 0.5)], runner, tmp_path) == 0
    first = list(done)
    assert 0 < len(first) < len(able)
    assert "left for the next call" in capsys.readouterr().out
    assert main([], runner, tmp_path) == 0
    assert sorted(done) == sorted(able)
    assert main([], runner, tmp_path) == 0
    assert "is up to date" in capsys.readouterr().out
    assert len(done) == len(able)


def test_a_part_that_fails_is_named_and_the_others_go_on(tmp_path, capsys) -> None:
    able = [part.name for part in PARTS if not missing(part, torch.cuda.device_count())]
    assert main([], lambda part: part.name != able[0], tmp_path) == 1
    captured = capsys.readouterr()
    assert f"failed: {able[0]}" in captured.err
    assert f"{able[-1]}: done" in captured.out


def test_a_part_that_this_machine_cannot_measure_is_refused_by_name(capsys) -> None:
    part = next(part for part in PARTS if part.gpus == 4)
    with pytest.raises(SystemExit, match="2"):
        main(["--part", part.name])
    assert f"--part {part.name} needs 4 GPUs, which this machine lacks" in capsys.readouterr().err


def test_status_and_list_name_every_part(capsys) -> None:
    for option in ("--status", "--list"):
        assert main([option]) == 0
        shown = capsys.readouterr().out
        assert all(part.name in shown for part in PARTS)


def test_the_committed_results_carry_todays_kernels_or_say_that_they_do_not() -> None:
    """--status depends on it: a digest is either recorded for every group that there was or for none."""
    groups = set(kernel_digests())
    for path in RESULTS.iterdir():
        for head in json.loads(path.read_text())["measurements"]:
            assert set(head["kernels"]) in (set(), groups, groups - {"exchange"})  # the newest group


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_part_runs_its_command(tmp_path) -> None:
    """A real benchmark on a CPU, at a size that takes seconds."""
    arguments = "--device cpu --lengths 16 32 --heads 8 --tokens 32 --hidden 8 --dtype fp32 --only naive sdpa-math"
    command = f"bench.attention {arguments} --masks causal --dropout 0 --name tiny --results {tmp_path}"
    part = Part("tiny", command, "tiny", 1, 0, kernels=("attention",))
    subprocess.run([sys.executable, "-m", *shlex.split(part.command)], check=True)
    path = result_file("tiny", device_name(torch.device("cpu")), tmp_path)
    found = status(part, path, kernel_digests())
    assert found.state in ("up to date", "measured with uncommitted changes")
    assert found.measurement is not None
    assert found.measurement["command"] == f"python -m {command}"
