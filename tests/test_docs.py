"""The code of docs/, run as its pages describe."""

import re
from typing import Any

import pytest
import torch

from attention import IMPLEMENTATIONS
from model.options import GPTConfig
from recipe.run.metrics import read_metrics
from recipe.training import recall
from tests.parts import built
from tests.programs import ROOT, completed

PAGE = (ROOT / "docs" / "add-an-attention.md").read_text()
VARIANTS = (ROOT / "docs" / "variants.md").read_text()
PAGES = sorted((ROOT / "docs").glob("*.md"))  # for users; lab notes are in docs/notes/


def block_after(sentence: str) -> str:
    """The fenced block that follows a sentence of the page."""
    found = re.search(r"```\w+\n(.*?)```", PAGE[PAGE.index(sentence) :], re.DOTALL)
    assert found
    return found[1]


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_the_attention_of_the_page_trains_from_a_file_and_agrees_with_naive(tmp_path):
    (tmp_path / "mine.py").write_text(block_after("`mine.py`:"))
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 200)
    (command,) = re.findall(r"^ +python train\.py (attention=mine.py:RowsAttention attention.*)$", PAGE, re.MULTILINE)
    small = [
        *("model.n_layers=1", "model.n_heads=2", "model.n_kv_heads=1", "model.n_embd=16", "seq_len=150"),
        *("data=text", "data.path=text.txt", "data.tokenizer=bytes", "tracking.mode=disabled", "device=cpu"),
        *("training.batch_size=2", "training.eval_every=0", "training.sample_tokens=0", "schedule.warmup_steps=0"),
        "hydra.run.dir=run",
    ]
    assert "attention=mine.py:RowsAttention" in completed(ROOT / "train.py", *command.split(), *small, folder=tmp_path)
    probed = read_metrics(tmp_path / "run" / "metrics.jsonl")
    errors = [record["parity/grad_rel_err"] for record in probed if "parity/grad_rel_err" in record]
    assert len(errors) == 2
    assert 0 < max(errors) < 1e-5


def test_the_table_of_variants_is_what_implementations_support():
    columns = {"window": "window", "documents": "documents", "soft cap": "soft_cap", "ALiBi": "alibi", "sinks": "sinks"}
    columns |= {"formula": "formula"}
    assert f"| | {' | '.join(columns)} |" in VARIANTS
    rows = re.findall(r"^\| `(\w+)` \| ((?:yes|no).*) \|$", VARIANTS, flags=re.MULTILINE)
    assert {name for name, _ in rows} == set(IMPLEMENTATIONS)
    for name, cells in rows:
        supported = [feature in IMPLEMENTATIONS[name].supports for feature in columns.values()]
        assert [cell == "yes" for cell in cells.split(" | ")] == supported


def run_code_of(page: str, **names: Any) -> dict[str, Any]:
    """The names that the Python blocks of a page define, after these."""
    for code in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), flags=re.DOTALL):
        exec(code, names)
    return names


def test_the_calls_of_the_formulas_page_agree():
    names = run_code_of("formulas.md")
    torch.testing.assert_close(names["same"], names["out"])


def test_the_probe_of_the_page_measures_the_entropy_of_attention(monkeypatch):
    """Where all scores are 0, a query spreads its weight evenly over the keys that it sees: 1, 2, ..., T."""
    monkeypatch.setattr(recall, "OF_TEXT", dict(recall.OF_TEXT))
    run_code_of("change-the-model.md", **vars(recall))
    size, T = GPTConfig(n_layers=2, n_heads=4, n_kv_heads=2, n_embd=32), 24
    model = built(size, T, 65, "tiled").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "c_attn" in name:
                parameter.zero_()
        found = recall.build_recall("entropy", T, 65, "text", lambda: torch.arange(100).numpy() % 65).measure(model)
    mean = torch.arange(1, T + 1).double().log().mean().item()
    assert found == pytest.approx({"probe/entropy_0": mean, "probe/entropy_1": mean}, rel=1e-5)
    assert list(recall.unknown_recalls(["entropy"])) == []


def test_the_calls_of_the_decoding_page_run(capsys):
    names = run_code_of("decoding.md")
    assert len(capsys.readouterr().out.splitlines()) == 21
    assert all(len(request.tokens) == 20 or request.tokens[-1] == 10 for request in names["requests"])


def test_the_calls_of_the_pages_on_caches_and_variants_run():
    assert run_code_of("cache.md")["out"].shape == (2, 8, 1, 64)
    names = run_code_of("variants.md")
    assert (names["out"].shape, names["lse"].shape) == ((1031, 8, 64), (8, 1031))


def test_the_call_of_the_peers_page_runs_or_is_refused_with_the_reason(capsys):
    assert "out" in run_code_of("peers.md") or 'name="varlen" needs' in capsys.readouterr().out


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda path: path.name)
def test_a_page_is_short(page):
    assert page.read_text().count("\n") <= (140 if page.name == "README.md" else 150)


def test_readers_on_a_forge_have_a_list_of_all_pages():
    linked = set(re.findall(r"\]\(([\w/-]+\.md)\)", (ROOT / "docs" / "README.md").read_text()))
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert linked == {page for page in pages if not page.startswith("_build")} - {"README.md", "index.md"}
