"""attention/ as the library that `pip install` brings: its wheel is built, and imported away from the repository."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder with the unpacked wheel, built from attention/ and the project's description alone."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "attention", source / "attention", ignore=shutil.ignore_patterns("__pycache__"))
    build = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True, timeout=60)
    (wheel,) = (source / "dist").glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def run(code: str, *paths: Path) -> str:
    """What Python prints in a process that finds `paths` and what is installed, and not the repository."""
    path = f"import sys; sys.path[:0] = {[str(path) for path in paths]}\n"
    done = subprocess.run([sys.executable, "-I", "-c", path + code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_holds_every_file_of_attention_and_says_that_it_is_typed(installed):
    ours = {path.relative_to(ROOT / "attention") for path in (ROOT / "attention").rglob("*.py")}
    theirs = {path.relative_to(installed / "gpt_attention") for path in (installed / "gpt_attention").rglob("*")}
    assert ours <= theirs
    assert Path("py.typed") in theirs


def test_the_library_needs_torch_and_triton_alone(installed):
    (description,) = installed.glob("*.dist-info")
    needs = PathDistribution(description).requires or []
    assert [re.split(r"[<>=;]", need)[0] for need in needs if "extra ==" not in need] == ["torch", "triton"]
    # Everything else that is installed here cannot be imported, but for what torch and Triton need themselves.
    code = """
import torch, triton, triton.experimental.gluon, torch.nn.attention.flex_attention
class Refuse:
    def find_spec(self, name, path=None, target=None):
        known = {"torch", "triton", "gpt_attention", *sys.stdlib_module_names}
        if name.partition(".")[0] not in known:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
import gpt_attention
q = torch.randn(1, 2, 5, 8, requires_grad=True)
for name in ("naive", "tiled", "sdpa"):
    gpt_attention.build_attention(gpt_attention.AttentionConfig(name))(q, q, q).out.sum().backward()
print(gpt_attention.__version__, *[m for m in sys.modules if m in ("attention", "errors", "model", "training")])
"""
    assert run(code, installed).split() == [PathDistribution(description).version]


def test_the_library_and_a_checkout_live_in_one_process(installed):
    """Custom operators are global to a process: a second registration under a name would replace the first."""
    code = """
import attention, gpt_attention, torch
names = ("tiled_forward", "tiled_backward", "flash_forward", "flash_backward")
print(*[getattr(torch.ops.attention, name) is getattr(torch.ops.gpt_attention, name) for name in names])
"""
    assert run(code, installed, ROOT).split() == ["False"] * 4
