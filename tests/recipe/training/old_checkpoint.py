"""Checkpoints of format 1, from before torch.distributed.checkpoint was used."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor


def format_1(path: Path, weights: dict[str, Tensor], rest: dict[str, Any]) -> Path:
    """Write a checkpoint of format 1: weights as safetensors, the rest by torch.save, and a manifest."""
    path.mkdir(parents=True)
    safetensors.torch.save_file(weights, path / "model.safetensors")
    torch.save(rest, path / "training.pt")
    files = {
        name: {"bytes": (path / name).stat().st_size, "sha256": hashlib.sha256((path / name).read_bytes()).hexdigest()}
        for name in ("model.safetensors", "training.pt")
    }
    content = {"step": 3, "metadata": {"val_loss": 1.5}, "aliases": {}, "files": files}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps({"format": 1, **content, "digest": digest}))
    return path
