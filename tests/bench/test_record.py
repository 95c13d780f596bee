"""Result files: the measurement of a row, rows that replace others, and the rows of a killed measurement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench.kernels import GROUPS, kernel_digests
from bench.machine import ROOT
from bench.record import RESULTS, Recorder, Row, measurement, read, result_file

CPU = torch.device("cpu")


def now(**changed: object) -> Row:
    return {"command": "python -m bench.some", "device": "GPU", "versions": {"torch": "2"}, "sizes": {}} | changed


def test_a_row_has_its_measurement(tmp_path: Path) -> None:
    head = measurement(["bench.some", "--text", "a b"], CPU, tokens=4)
    with Recorder(tmp_path / "some.json", ("name",), head) as recorder:
        recorder.add({"name": "flash", "ms": 1.0})
    (row,) = read(recorder.path)
    assert (row["name"], row["ms"]) == ("flash", 1.0)
    found = row["measurement"]
    assert found["command"] == "python -m bench.some --text 'a b'"
    assert found["versions"]["torch"] == torch.__version__
    assert found["sizes"] == {"tokens": 4}
    assert found["kernels"] == kernel_digests()
    assert found["date"] <= found["ended"]


def test_a_new_row_replaces_the_one_with_the_same_identity(tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    for date, rows in (("1", [("flash", 1), ("naive", 2)]), ("2", [("flash", 3)])):
        with Recorder(path, ("name",), now(date=date)) as recorder:
            recorder.add(*({"name": name, "ms": ms} for name, ms in rows))
    assert {row["name"]: (row["ms"], row["measurement"]["date"]) for row in read(path)} == {
        "flash": (3, "2"),
        "naive": (2, "1"),
    }


def test_a_measurement_without_rows_leaves_the_file(tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    for date in ("1", "2"):
        with Recorder(path, ("name",), now(date=date)) as recorder:
            recorder.add({"name": "flash"})
    assert [head["date"] for head in json.loads(path.read_text())["measurements"]] == ["2"]


@pytest.mark.parametrize("changed", [{"versions": {"torch": "3"}}, {"sizes": {"tokens": 8}}, {"device": "another"}])
def test_rows_of_other_software_sizes_or_devices_leave_the_file(tmp_path: Path, changed: Row) -> None:
    path = tmp_path / "some.json"
    Recorder(path, ("name",), now()).add({"name": "naive"})
    recorder = Recorder(path, ("name",), now(**changed))
    assert recorder.dropped == 1
    recorder.add({"name": "flash"})
    assert [row["name"] for row in read(path)] == ["flash"]


def test_other_versions_of_what_did_not_run_do_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    Recorder(path, ("name",), now()).add({"name": "naive"})
    Recorder(path, ("name",), now(versions={"torch": "2", "python": "3.13"})).add({"name": "flash"})
    assert [row["name"] for row in read(path)] == ["naive", "flash"]


def test_a_measurement_that_fails_keeps_its_rows_and_has_no_end(tmp_path: Path) -> None:
    def fail() -> None:
        with Recorder(tmp_path / "some.json", ("name",), now()) as recorder:
            recorder.add({"name": "flash"})
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        fail()
    (row,) = read(tmp_path / "some.json")
    assert row["measurement"]["ended"] is None


def test_rows_of_one_problem_are_replaced_together(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "some.json", ("name", "length"), now())
    recorder.add(*({"name": name, "length": length} for name in ("flash", "naive") for length in (1, 2)))
    recorder.replace({"length": 1}, [{"name": "flash", "length": 1}])
    assert [(row["name"], row["length"]) for row in read(recorder.path)] == [("flash", 2), ("naive", 2), ("flash", 1)]


def test_every_result_file_is_readable_and_names_its_measurements() -> None:
    for path in RESULTS.iterdir():
        rows = read(path)
        assert rows, path
        for row in rows:
            head = row["measurement"]
            assert result_file("x", head["device"]).stem.removeprefix("x-") in path.stem
            assert head["command"].startswith(("python -m bench.", "python -m tests.attention.faults"))
            assert head["date"]


def test_the_digest_of_a_group_changes_with_its_sources_alone(tmp_path: Path) -> None:
    for paths in GROUPS.values():
        for path in paths:
            assert (ROOT / path).exists(), path
            (tmp_path / path).mkdir(parents=True, exist_ok=True) if (ROOT / path).is_dir() else None
            file = tmp_path / path / "a.py" if (ROOT / path).is_dir() else tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("kernel = 1\n")
    before = kernel_digests(tmp_path)
    (tmp_path / "model/softmax_kernel.py").write_text("kernel = 2\n")
    after = kernel_digests(tmp_path)
    assert {group for group in GROUPS if before[group] != after[group]} == {"model"}


def test_a_file_that_is_no_result_ends_in_a_sentence(tmp_path: Path) -> None:
    for content in ("", "{}", "[]", '{"rows": [{"measurement": 3}], "measurements": []}'):
        (tmp_path / "x.json").write_text(content)
        with pytest.raises(SystemExit, match=r"^error: .*x\.json is no result of a benchmark .*; restore the file\.$"):
            read(tmp_path / "x.json")
