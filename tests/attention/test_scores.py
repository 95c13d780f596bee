"""Each option of a score is one file: a new option takes a new file and a preset."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DIAGONAL = '''
import torch
from .option import HeadTensor, ScoreOption

class Diagonal(ScoreOption):
    """what is added to the score of the key at the query's position, times a number of the head"""
    name, order, type, words, default, title = "diagonal", 5, float | None, "a number", None, "a diagonal"
    is_formula = True
    tensor = HeadTensor("shares", lambda H, device: 1 / torch.arange(1.0, H + 1, device=device), False, "share")

    def formula(self, value, s):
        return f"{s} + where(i - j < 1, {value!r} * shares[h], 0)"
'''
CHUNK = '''
from .option import ScoreOption

class Chunk(ScoreOption):
    """a query sees no key before the last position that is a multiple of this"""
    name, order, type, words, default, title = "chunk", 6, int | None, "a whole number", None, "a chunk"
    looks_back = hides_keys = True

    def first_key(self, value, query):
        return query // value * value

    def most_keys(self, value):
        return value
'''
PROGRAM = """
import torch
from attention.check.interpreter import hasten
hasten()
from omegaconf import OmegaConf
from attention import AttentionConfig, Score, UnsupportedAttention, build_attention
from model.score import ScoreConfig, describe_score, layer_scores

preset = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ScoreConfig), OmegaConf.load("diagonal.yaml")))
(score,) = layer_scores(preset, 1)
assert score == Score(soft_cap=2.0, diagonal=0.7), score
assert describe_score(preset) == "diagonal (soft_cap=2.0, diagonal=0.7)", describe_score(preset)
T = 21
q, k, v, do = torch.randn(4, 2, 3, T, 16, generator=torch.Generator().manual_seed(0)).unbind()
distance = torch.arange(T)[:, None] - torch.arange(T)
s = 2 * torch.tanh(q.double() @ k.double().mT / 8)
s = s + 0.7 * torch.tensor([1, 1 / 2, 1 / 3])[:, None, None] * (distance == 0)
for score, hidden, names in (
    (score, distance < 0, ("naive", "tiled", "flash", "flex")),
    (Score(chunk=8), (distance < 0) | (distance > torch.arange(T)[:, None] % 8), ("naive", "tiled", "flex")),
):
    s = s if score.diagonal else q.double() @ k.double().mT / 4
    expected = s.masked_fill(hidden, -torch.inf).softmax(-1) @ v.double()
    for name in names:
        out = build_attention(AttentionConfig(name))(q, k, v, score=score).out
        assert (out - expected).abs().max() < 2e-5, (name, score, (out - expected).abs().max())
try:
    build_attention(AttentionConfig("flash"))(q, k, v, score=Score(chunk=8))
except UnsupportedAttention as refusal:
    print(refusal)
"""


def test_a_new_option_is_a_file_and_a_preset(tmp_path: Path) -> None:
    for folder in ("attention", "model"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "attention/scores/diagonal.py").write_text(DIAGONAL)
    (tmp_path / "attention/scores/chunk.py").write_text(CHUNK)
    (tmp_path / "diagonal.yaml").write_text("name: diagonal\ndiagonal: 0.7\nsoft_cap: 2.0\n")
    (tmp_path / "program.py").write_text(PROGRAM)
    given = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=given, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert 'name="flash" does not support chunk=8; leave it out or choose name=' in done.stdout
