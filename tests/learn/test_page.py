"""learn/page.py: what the page shows is what the functions computed, also in a browser."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from learn.page import FIRST, key_of, packed, problem_of, record_choice, shown
from learn.problem import solve

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
CHOICE = FIRST | {"mask": "causal", "dropout": 0.25}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("learn") / "page.html"
    done = subprocess.run(
        [sys.executable, "-m", "learn", f"out={out}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "5.4329" in done.stdout
    assert str(out) in done.stdout
    return out


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("algorithm", ["flash_1", "flash_2"])
def test_every_number_of_every_step_is_the_tensors(algorithm: str, direction: str) -> None:
    choice = CHOICE | {"algorithm": algorithm, "direction": direction}
    recording = record_choice(choice)
    seen: dict[str, list[list[str]]] = {}
    for step, entry in zip(recording.steps, packed(recording, problem_of(choice))["steps"], strict=True):
        seen |= {f"fast {name}": rows for name, rows in entry.get("fast", {}).items()}
        seen |= {f"slow {name}": rows for name, rows in entry.get("slow", {}).items()}
        for kind, tensors in (("fast", step.fast), ("slow", step.slow)):
            for name, tensor in tensors.items():
                cells = [text for row in seen[f"{kind} {name}"] for text in row]
                for text, value in zip(cells, tensor.flatten().tolist(), strict=True):
                    if text not in ("−∞", "lowest"):
                        assert abs(float(text.replace("−", "-")) - value) <= 0.005001, (step.line, name)
                    else:
                        assert value <= torch.finfo(torch.float32).min


def test_the_recorded_end_is_that_of_an_unrecorded_run() -> None:
    for algorithm, result in (("flash_1", "O"), ("flash_2", "O")):
        choice = CHOICE | {"algorithm": algorithm}
        last = record_choice(choice).steps[-1]
        alone = solve(problem_of(choice), algorithm)
        assert torch.equal(last.slow[result], alone[result])
        assert (last.read, last.written) == (alone.traffic.read, alone.traffic.written)


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("step", [0, 21, 10_000])
def test_a_browser_shows_the_step_that_was_asked_for(page: Path, tmp_path: Path, step: int) -> None:
    recording = record_choice(CHOICE)
    step_there = min(step, len(recording.steps) - 1)
    query = "&".join(f"{name}={value}" for name, value in CHOICE.items())
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--dump-dom"]
    assert CHROMIUM is not None
    dom = subprocess.run(
        [
            CHROMIUM,
            *flags,
            f"--user-data-dir={tmp_path}",
            "--virtual-time-budget=10000",
            f"file://{page}#{query}&step={step}",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout
    assert 'data-ready="yes"' in dom
    assert f"{step_there + 1} of {len(recording.steps)}" in dom
    running = re.search(r'<span class="now">(.*?)</span>', dom)
    assert running is not None
    state = recording.steps[step_there]
    assert html.unescape(running[1]).strip() == recording.source[state.line].strip()
    for kind, tensors in (("fast", state.fast), ("slow", state.slow)):
        part = dom[dom.index(f'id="{kind}"') : dom.index("</section>", dom.index(f'id="{kind}"'))]
        for name, tensor in tensors.items():
            drawn = re.search(rf'data-name="{name}".*?</table>', part, re.DOTALL)
            assert drawn is not None, name
            cells = re.findall(r"<td[^>]*>(.*?)</td>", drawn[0])
            assert cells == [shown(value) for value in tensor.flatten().tolist()], name


def test_the_page_holds_every_setting_and_needs_no_network(page: Path) -> None:
    text = page.read_text()
    assert not re.search(r'(src|href)="(https?:)?//', text)
    assert key_of(FIRST).count("|") == 6


def test_a_page_that_cannot_be_written_ends_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = subprocess.run(
        [sys.executable, "-m", "learn", f"out={tmp_path / 'file' / 'page.html'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "out=<file>" in done.stderr
