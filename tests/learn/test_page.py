"""learn/page.py: the page shows the values that the functions computed, also in a browser."""

import contextlib
import html
import io
import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from learn.__main__ import main, run
from learn.flash import block_sizes
from learn.page import CHOICES, FIRST, packed, record_choice, shown
from learn.tracing import Recording
from learn.why import OF_FUNCTIONS
from tests.browser import needs_browser, opened
from tests.programs import completed

CHOICE = FIRST | {"mask": "causal", "dropout": 0.25}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    out = tmp_path_factory.mktemp("learn") / "walk.html"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        main([f"out={out}"])
    assert "5.4329" in printed.getvalue()
    assert str(out) in printed.getvalue()
    return out


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("algorithm", ["flash_1", "flash_2"])
def test_every_number_of_every_step_is_the_tensors(algorithm, direction):
    choice = CHOICE | {"algorithm": algorithm, "direction": direction}
    recording = record_choice(choice)
    seen: dict[str, list[list[str]]] = {}
    for step, entry in zip(recording.steps, packed(recording, choice)["steps"], strict=True):
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


def test_every_line_that_runs_has_a_reason_and_every_reason_a_line():
    for algorithm, direction in itertools.product(("flash_1", "flash_2"), ("forward", "backward")):
        of_lines = OF_FUNCTIONS[f"{algorithm}_{direction}"]
        run = set()
        for mask in CHOICES["mask"]:
            choice = CHOICE | {"algorithm": algorithm, "direction": direction, "mask": mask, "N": 8}
            recording = record_choice(choice)
            run |= {recording.source[step.line].strip() for step in recording.steps}
            why = packed(recording, choice)["why"]
            assert all(why[step.line].endswith(".") for step in recording.steps)
        assert run == of_lines.keys()


def test_memory_that_a_tile_has_freed_is_not_counted():
    """FlashAttention-2 with its first queries and the second, last tile of keys."""
    recording = record_choice(FIRST)
    idle = {
        recording.source[step.line].split("=")[0].strip(): step.idle
        for step in recording.steps
        if step.tile == {"i": slice(0, 3), "j": slice(4, 5)}
    }
    assert idle["k, v"] == {"s", "m_new", "p", "alpha"}  # those of the first tile of keys
    assert idle["s"] == {"q", "k", "m_new", "p", "alpha"}
    assert idle["p"] == {"q", "k", "s", "alpha"}
    assert idle["m"] == {"q", "k", "v", "s", "m_new", "p", "alpha"}  # o, l and m are all that goes on


# What a reader sees.
DISPLAYED = """const $ = (id) => document.getElementById(id);
  const change = (on, type) => on.dispatchEvent(new Event(type, { bubbles: true }));
  const tables = (id) => Object.fromEntries([...$(id).querySelectorAll("table")].map((table) =>
    [table.caption.textContent, [...table.rows].map((row) => [...row.cells].map((cell) => cell.textContent))]));
  const texts = (...ids) => Object.fromEntries(ids.map((id) => [id, $(id).textContent]));
  const displayed = () => ({ ...texts("counter", "why", "sizes", "held", "moved"), fast: tables("fast"),
    slow: tables("slow"), line: document.querySelector(".now").textContent });"""


def expected(recording: Recording, choice: dict[str, Any], n: int) -> dict[str, Any]:
    """What DISPLAYED gives for step n, from the tensors of that step."""

    def tables(tensors):
        return {
            f"{name}  {len(tensor)}×{tensor[0].numel()}": [[shown(value) for value in row] for row in tensor.tolist()]
            for name, tensor in tensors.items()
        }

    step = recording.steps[n]
    B_r, B_c = block_sizes(choice["d"], choice["M"])
    line = recording.source[step.line]
    moves = ", ".join(f"{move.kind}s {move.name}[{move.rows.start}:{move.rows.stop}]" for move in step.moves)
    held = sum(tensor.numel() for tensor in step.fast.values())
    unused = sum(step.fast[name].numel() for name in step.idle)
    size = step.slow["Q"].element_size()
    return {
        "counter": f"{n + 1} of {len(recording.steps)}",
        "line": line,
        "why": OF_FUNCTIONS[f"{choice['algorithm']}_{choice['direction']}"][line.strip()]
        + (f"  →  {moves}" if moves else ""),
        "sizes": f"B_r = {B_r} rows of queries, B_c = {B_c} rows of keys",
        "held": f"{held} numbers" + (f", {unused} of them not needed any more (pale)" if unused else ""),
        "moved": f"{size * step.read} bytes read, {size * step.written} written",
        "fast": tables(step.fast),
        "slow": tables(step.slow),
    }


# Every fourth step of both algorithms: what is cut off, and where the memories end below the buttons.
CUT_OFF = """seen.cut_off = [];
  for (const algorithm of ["flash_1", "flash_2"]) for (const direction of ["forward", "backward"]) {
    document.querySelector("select[name=algorithm]").value = algorithm;
    document.querySelector("select[name=direction]").value = direction;
    change($("controls"), "change");
    for (let n = 0; n <= $("slider").max; n += 4) {
      $("slider").value = n; change($("slider"), "input");
      const bar = $("bar").getBoundingClientRect().top, bottom = (id) => $(id).getBoundingClientRect().bottom - bar;
      seen.cut_off.push({ cut: $("source").scrollWidth - $("source").clientWidth,
        sideways: document.documentElement.scrollWidth - innerWidth, line: $("line").textContent,
        ends: Math.max(bottom("fast"), bottom("slow"), bottom("map")),
        shown: getComputedStyle($("line")).display, now: document.querySelector(".now").textContent.trim() });
    }
  }"""


def assert_not_cut_off(steps: list[dict[str, Any]], display: str) -> None:
    """In any step; `display` is the CSS property of the line that is shown apart from its program."""
    assert len(steps) > 40
    for step in steps:
        assert step["cut"] <= 0
        assert step["sideways"] <= 0
        assert step["line"] == step["now"]
        assert step["shown"] == display


def driven(page: Path, folder: Path, *scripts: str, flags: tuple[str, ...] = (), fragment: str = "") -> Any:
    """What the scripts put into `seen`, once the page is ready."""
    path = folder / "driven.html"
    ready = 'while (document.body.dataset.ready !== "yes") await new Promise((done) => setTimeout(done, 10));'
    blocks = "\n".join(f"{{ {script} }}" for script in scripts)
    script = f"""<script>(async () => {{ {ready}\n{DISPLAYED}\nconst seen = {{}};\n{blocks}
      document.body.dataset.seen = JSON.stringify(seen); }})();</script>"""
    path.write_text(page.read_text().replace("</body>", f"{script}</body>"))
    found = re.search(r'data-seen="(.*?)"', opened(f"{path.as_uri()}#{fragment}", folder, *flags).stdout, re.DOTALL)
    assert found is not None
    return json.loads(html.unescape(found[1]))


def walk(asked: list[dict[str, Any]], stride: int) -> str:
    """Shows each of the settings, and in it a step of so many."""
    texts = json.dumps([{name: str(value) for name, value in choice.items()} for choice in asked])
    return f"""seen.walk = [];
  for (const choice of {texts}) {{
    for (const [name, value] of Object.entries(choice)) document.querySelector(`select[name=${{name}}]`).value = value;
    change($("controls"), "change");
    const steps = [];
    for (let n = 0; n <= $("slider").max; n += {stride}) {{
      $("slider").value = n; change($("slider"), "input"); steps.push(displayed());
    }}
    seen.walk.push(steps);
  }}"""


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize(("N", "d", "M", "stride", "first"), [(5, 3, 59, 8, 21), (8, 2, 36, 11, 10_000)])
def test_a_browser_shows_the_step_that_was_asked_for_and_the_numbers_of_every_algorithm(
    page, tmp_path, N, d, M, stride, first
):
    """Forward and backward, with every mask, with and without dropout; and on a wide screen nothing is cut off."""
    varied = ("algorithm", "direction", "mask", "dropout")
    values = itertools.product(*(CHOICES[name] for name in varied))
    asked = [{"N": N, "d": d, "M": M} | dict(zip(varied, each, strict=True)) for each in values]
    fragment = "&".join(f"{name}={value}" for name, value in (CHOICE | {"step": first}).items())
    flags = ("--window-size=1280,844",)
    scripts = ("seen.first = displayed();", walk(asked, stride), CUT_OFF)
    seen = driven(page, tmp_path, *scripts, flags=flags, fragment=fragment)
    recording = record_choice(CHOICE)
    assert seen["first"] == expected(recording, CHOICE, min(first, len(recording.steps) - 1))
    for choice, steps in zip(asked, seen["walk"], strict=True):
        recording = record_choice(choice)
        shown_steps = range(0, len(recording.steps), stride)
        for n, step in zip(shown_steps, steps, strict=True):
            assert step == expected(recording, choice, n), (choice, n)
    assert_not_cut_off(seen["cut_off"], "none")


def test_the_page_holds_every_setting_and_needs_no_network(page):
    assert not re.search(r'(src|href)="(https?:)?//', page.read_text())


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_the_documentation_becomes_a_site_with_the_page_and_without_a_warning(page, tmp_path):
    """As `make docs` makes it."""
    pytest.importorskip("sphinx")
    options = ["-q", "-E", "-W", "--keep-going", "-b", "html", "-D", f"html_extra_path={page.parent}"]
    completed("-m", "sphinx", *options, "docs", tmp_path)
    assert "walk.html" in (tmp_path / "learn.html").read_text()
    assert (tmp_path / "walk.html").read_bytes() == page.read_bytes()


def test_a_page_that_cannot_be_written_ends_in_a_sentence(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setattr(sys, "argv", ["learn", f"out={tmp_path / 'file' / 'page.html'}"])
    with pytest.raises(SystemExit, match="1"):
        run()
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "out=<file>" in error


# What a reader does, one after the other, and the step that is shown after it.
DRIVE = """const wait = (ms) => new Promise((done) => setTimeout(done, ms));
  const press = (key, on) => on.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
  const after = (what) => (seen[what] = $("counter").textContent);
  $("next").click(); after("button forward");
  press("ArrowRight", $("next")); after("key on a button");
  press("ArrowRight", document.body); after("key");
  $("back").click(); after("button back");
  press("End", document.body); after("end");
  press("Home", document.body); after("home");
  $("slider").value = 7; $("slider").dispatchEvent(new Event("input")); after("slider");
  press(" ", document.body); seen.playing = $("play").getAttribute("aria-label"); await wait(1500);
  $("play").click(); after("played"); seen.paused = $("play").getAttribute("aria-label");
  for (const [name, value] of [["algorithm", "flash_1"], ["direction", "backward"], ["N", "8"], ["d", "2"], ["M", "36"],
                               ["mask", "window 2"], ["dropout", "0.25"]]) {
    const select = document.querySelector(`select[name=${name}]`);
    select.value = value; select.dispatchEvent(new Event("change", { bubbles: true }));
  }
  after("controls"); press("End", document.body); after("end of the other");
  const colours = getComputedStyle(document.body), top = (id) => $(id).getBoundingClientRect().top;
  seen.wider = document.documentElement.scrollWidth - innerWidth;
  seen.memories = top("fast") < top("slow") && top("slow") < top("source");
  seen.colours = [colours.backgroundColor, colours.color].map((rgb) => rgb.match(/\\d+/g).map(Number));"""


@pytest.mark.slow
@needs_browser
def test_buttons_keys_slider_and_controls_step_through_the_recording_on_a_narrow_dark_screen(page, tmp_path):
    """At 844 pixels all but the program is seen at once, from the buttons on."""
    flags = ("--window-size=390,844", "--blink-settings=preferredColorScheme=0")
    seen = driven(page, tmp_path, DRIVE, CUT_OFF, flags=flags)
    first = len(record_choice(FIRST).steps)
    other = FIRST | {"algorithm": "flash_1", "direction": "backward", "N": 8, "d": 2, "M": 36}
    last = len(record_choice(other | {"mask": "window 2", "dropout": 0.25}).steps)
    assert {name: seen[name] for name in ("playing", "paused")} == {"playing": "Pause", "paused": "Play"}
    shown_steps = {"button forward": 2, "key on a button": 3, "key": 4, "button back": 3, "end": first, "home": 1}
    shown_steps |= {"slider": 8, "played": 10}
    assert {name: seen[name] for name in shown_steps} == {name: f"{n} of {first}" for name, n in shown_steps.items()}
    assert [seen["controls"], seen["end of the other"]] == [f"1 of {last}", f"{last} of {last}"]
    # On a narrow screen nothing is cut off, and what the line that runs has changed comes before the whole program.
    assert seen["wider"] <= 0
    assert seen["memories"]
    paper, ink = seen["colours"]
    assert max(paper) < 64 < 192 < min(ink)  # in the dark
    assert_not_cut_off(seen["cut_off"], "block")
    assert max(step["ends"] for step in seen["cut_off"]) <= 844
