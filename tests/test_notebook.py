"""The notebook runs from its first cell to its last, and its results are those that its text states."""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "first_comparison.ipynb"


@pytest.mark.slow
def test_the_notebook_trains_compares_and_draws(here, monkeypatch):
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert len(cells) == 10
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(tempfile, "tempdir", str(here))
    mpl.use("agg")
    found: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), found)
    assert found["naive"][-1]["step"] == found["tiled"][-1]["step"] == 40
    assert 0 < max(found["distance"]) < 1e-5
    assert "kept weights" in found["axes"][1].get_title()
    assert (found["folder"] / "report" / "index.html").exists()
