"""Result files: the measurement of a row, rows that replace others, and the rows of a killed measurement."""

import json
import subprocess

import pytest
import torch

from bench.machine import ROOT
from bench.record import RESULTS, Recorder, measurement, read, result_file, write_table

CPU = torch.device("cpu")


def now(**changed: object):
    return {"command": "python -m bench.some", "device": "GPU", "versions": {"torch": "2"}, "sizes": {}} | changed


def test_a_row_has_its_measurement(tmp_path):
    made = measurement(["bench.some", "--text", "a b"], CPU, tokens=4)
    with Recorder(tmp_path / "some.json", ("name",), made) as recorder:
        recorder.add({"name": "flash", "ms": 1.0})
    (row,) = read(recorder.path)
    assert (row["name"], row["ms"]) == ("flash", 1.0)
    found = row["measurement"]
    assert found["command"] == "python -m bench.some --text 'a b'"
    assert found["versions"]["torch"] == torch.__version__
    assert found["sizes"] == {"tokens": 4}
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    assert found["commit"] == (head.stdout.strip() if head.returncode == 0 else None)
    assert found["date"] <= found["ended"]


@pytest.mark.parametrize("changed", [{"versions": {"torch": "3"}}, {"sizes": {"tokens": 8}}, {"device": "another"}])
def test_rows_of_other_software_sizes_or_devices_leave_the_file(tmp_path, changed):
    path = tmp_path / "some.json"
    Recorder(path, ("name",), now()).add({"name": "naive"})
    Recorder(path, ("name",), now(versions={"torch": "2", "python": "3.13"})).add({"name": "flash"})
    assert [row["name"] for row in read(path)] == ["naive", "flash"]  # what did not run does not matter
    recorder = Recorder(path, ("name",), now(**changed))
    assert recorder.dropped == 2
    recorder.add({"name": "flash"})
    assert [row["name"] for row in read(path)] == ["flash"]
    assert len(json.loads(path.read_text())["measurements"]) == 1


def test_a_measurement_that_fails_keeps_its_rows_and_has_no_end(tmp_path):
    def fail():
        with Recorder(tmp_path / "some.json", ("name",), now()) as recorder:
            recorder.add({"name": "flash"})
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        fail()
    (row,) = read(tmp_path / "some.json")
    assert row["measurement"]["ended"] is None


def test_every_result_file_is_readable_and_names_its_measurements():
    for path in RESULTS.glob("*.json"):
        rows = read(path)
        assert rows, path
        for row in rows:
            head = row["measurement"]
            assert result_file("x", head["device"]).stem.removeprefix("x-") in path.stem
            assert head["command"].startswith(
                ("python -m bench.", "python -m tests.attention.", "python train.py experiment=")
            )
            assert head["date"]


def test_a_table_says_where_and_when_its_rows_were_measured_and_names_each_command_once(tmp_path):
    files = tmp_path / "ours.json", tmp_path / "theirs.json"
    for file, device, day in ((files[0], "GPU", 1), (files[0], "GPU", 3), (files[1], "CPU", 2)):
        head = now(device=device, date=f"2026-11-0{day}T10:00", commit="abc", command=f"python -m bench.{file.stem}")
        Recorder(file, ("name",), head).add({"name": f"{day}, first"}, {"name": f"{day}, second"})
    write_table(tmp_path / "ours.md", "| ms |\n| --- |\n| 1 |", *files)
    assert (tmp_path / "ours.md").read_text().split("\n\n") == [
        "| ms |\n| --- |\n| 1 |",
        "GPU, 2026-11-01 to 2026-11-03; CPU, 2026-11-02",
        "- `python -m bench.ours`: GPU, torch 2, 2026-11-01, commit abc\n"
        "- `python -m bench.ours`: GPU, torch 2, 2026-11-03, commit abc\n"
        "- `python -m bench.theirs`: CPU, torch 2, 2026-11-02, commit abc",
        "Rows: [ours.json](ours.json), [theirs.json](theirs.json)\n",
    ]


def test_a_file_that_is_no_result_ends_in_a_sentence(tmp_path):
    for content in ("", "[]", '{"rows": [{"measurement": 3}], "measurements": []}'):
        (tmp_path / "x.json").write_text(content)
        with pytest.raises(SystemExit, match=r"^error: .*x\.json is no result of a benchmark .*; restore the file\.$"):
            read(tmp_path / "x.json")
