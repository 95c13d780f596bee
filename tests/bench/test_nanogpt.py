"""nanoGPT's benchmark: the settings that its bench.py gets, and the row that is made of its output."""

import pytest

from bench import nanogpt

MODEL = """
from dataclasses import dataclass

@dataclass
class GPTConfig:
    block_size: int = 1024
    dropout: float = 0.0
"""
# Takes its settings as nanoGPT's does: names of globals on the command line.
BENCH = """
import sys
from ast import literal_eval
from model import GPTConfig

batch_size, block_size, real_data, dtype, compile = 12, 8, True, "float16", False
for argument in sys.argv[1:]:
    name, value = argument.removeprefix("--").split("=")
    assert name in globals()
    globals()[name] = value if name == "dtype" else literal_eval(value)
config = GPTConfig(block_size=block_size, dropout=0)
assert (real_data, dtype, compile) == (False, "bfloat16", True)
if config.dropout > 0.5:
    raise MemoryError("too much")
print(f"time per iteration: {config.block_size * (1 + config.dropout):.4f}ms")
"""


@pytest.fixture
def checkout(tmp_path):
    """A checkout with a torch of its own, which starts at once."""
    (tmp_path / "torch.py").write_text("class cuda:\n    max_memory_allocated = int")
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "bench.py").write_text(BENCH)
    return tmp_path


def test_the_benchmark_of_the_checkout_runs_with_the_shape_and_dropout_of_the_cell(checkout):
    row = nanogpt.measure(checkout, "4x100", 0.5)
    assert (row["status"], row["shape"], row["dropout"], row["step_ms"]) == ("completed", "4x100", 0.5, 150.0)
    assert row["tokens_per_s"] == pytest.approx(400 / 0.150)


def test_a_failure_is_reported_with_its_message(checkout):
    row = nanogpt.measure(checkout, "4x100", 0.75)
    assert row["status"] == "failed"
    assert "MemoryError: too much" in row["message"]


def test_a_folder_that_is_no_checkout_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        nanogpt.main([str(tmp_path)])
    assert f"{tmp_path} has no bench.py and model.py" in capsys.readouterr().err
