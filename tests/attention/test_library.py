"""attention/ as the library that `pip install` brings: its wheel is built, and imported away from the repository."""

import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import PathDistribution
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the wheel alone, which is built from attention/, mixers/ and the project's description."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("attention", "mixers"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True, timeout=60)
    (wheel,) = (source / "dist").glob("*.whl")
    zipfile.ZipFile(wheel).extractall(target)
    return target


def test_the_wheel_has_a_command_and_every_file_of_attention_and_says_that_it_is_typed(installed):
    ours = {path.relative_to(ROOT / "attention") for path in (ROOT / "attention").rglob("*.py")}
    theirs = {path.relative_to(installed / "gpt_attention") for path in (installed / "gpt_attention").rglob("*")}
    assert ours <= theirs
    assert Path("py.typed") in theirs
    (script,) = PathDistribution(next(installed.glob("*.dist-info"))).entry_points
    assert (script.group, script.name, script.value) == (
        "console_scripts",
        "gpt-attention",
        "gpt_attention.__main__:main",
    )


@pytest.mark.slow
def test_the_library_needs_torch_and_triton_alone_and_lives_beside_a_checkout(installed):
    (path,) = installed.glob("*.dist-info")
    description = PathDistribution(path)
    needs = description.requires or []
    assert [re.split(r"[<>=;]", need)[0] for need in needs if "extra ==" not in need] == ["torch", "triton"]
    # Nothing else can be imported, but for what torch and Triton have imported themselves. Custom operators are global
    # to a process, where a second registration under a name would replace the first.
    code = f"""
import sys
sys.path.insert(0, {str(installed)!r})
import torch, triton, triton.experimental.gluon, torch.nn.attention.flex_attention
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in {{"torch", "triton", "gpt_attention", *sys.stdlib_module_names}}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
import gpt_attention
print("torch._dynamo" in sys.modules)  # the compiler, which would double the time of the import
refuse = sys.meta_path.pop(0)
import torch._dynamo
sys.meta_path.insert(0, refuse)
q = torch.randn(1, 2, 5, 8, requires_grad=True)
for name in ("naive", "tiled", "sdpa"):
    gpt_attention.build_attention(gpt_attention.AttentionConfig(name))(q, q, q).out.sum().backward()
print(gpt_attention.__version__)
import gpt_attention.__main__, gpt_attention.check.cli
from gpt_attention.check.cases import Case
from gpt_attention.check.results import verdicts
from gpt_attention.check.subject import find
print(all(verdict.passes for verdict in verdicts(find("naive"), Case(T=9, S=9), torch.device("cpu"))))
sys.meta_path.pop(0)
import contextlib, io, pathlib, tempfile
with tempfile.TemporaryDirectory() as elsewhere, contextlib.chdir(elsewhere):
    pathlib.Path("mine.py").write_text("import attention.dropout")
    sys.argv = ["gpt-attention", "check", "mine.py:attend"]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        print(gpt_attention.__main__.main(), "write gpt_attention in mine.py." in said.getvalue())
sys.path.insert(0, {str(ROOT)!r})
import attention
for name in ("tiled_forward", "tiled_backward", "flash_forward", "flash_backward"):
    print(getattr(torch.ops.attention, name) is getattr(torch.ops.gpt_attention, name))
"""
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", description.version, "True", "2", "True"] + ["False"] * 4


def code_of(page: str) -> dict[str, Any]:
    """The names that the Python blocks of a page define."""
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), flags=re.DOTALL):
        exec(code, names)
    return names


def test_the_code_of_the_library_page_runs(installed, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(installed)
    names = code_of("use-as-a-library.md")
    assert names["out"].shape == (2, 8, 300, 64)
    assert torch.equal(names["first"], names["second"])


def test_the_code_of_the_page_on_torchs_switch_runs(installed, monkeypatch):
    monkeypatch.syspath_prepend(installed)
    names = code_of("torch-sdpa.md")
    exact = names["F"].scaled_dot_product_attention(*(names[x].double() for x in "qkv"), is_causal=True)
    assert (names["out"] - exact).abs().max() < 0.02
    assert torch.nn.attention.current_flash_attention_impl() is None
