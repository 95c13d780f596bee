"""The model card: README.md with the run's settings and results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from data.untrusted import UntrustedError
from recipe.files import recorded_number
from recipe.run.config import ConfigError
from recipe.run.run_folder import SUMMARY, read_summary
from recipe.training.checkpoint import read_manifest


@dataclass(frozen=True)
class Origin:
    """The origin of weights.

    step     number of updates
    config   of their run
    summary  summary.json of the run; None where it has not ended
    average  whether they are the moving average of the run's weights
    """

    step: int
    config: dict[str, Any]
    summary: dict[str, Any] | None
    average: bool = False


def read_origin(run: Path, checkpoint: Path, config: dict[str, Any], average: bool) -> Origin:
    """The origin of the weights, or of their moving average, in a run's checkpoint. Raises UserError."""
    try:
        summary = read_summary(run) if (run / SUMMARY).exists() else None
    except (OSError, UntrustedError) as error:
        raise ConfigError(f"{run / SUMMARY} cannot be read ({error}); restore it, or remove it.") from error
    return Origin(read_manifest(checkpoint).step, config, summary, average)


def model_card(name: str, architecture: str, origin: Origin) -> str:
    """Markdown with the front matter that Hugging Face's hub reads, for a model of an architecture of transformers."""
    front = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["gpt-attention"]}
    rows = "\n".join(f"| {label} | {value} |" for label, value in facts(architecture, origin))
    most = max(1, min(100, origin.config["seq_len"] // 2))
    return f"""---
{yaml.safe_dump(front, sort_keys=False).strip()}
---

# {name}

A language model trained with gpt-attention.

```python
from transformers import pipeline

print(pipeline("text-generation", model="{name}")("The", max_new_tokens={most})[0]["generated_text"])
```

| | |
|---|---|
{rows}

Losses are cross-entropies in nats per token.
"""


def facts(architecture: str, origin: Origin) -> Iterator[tuple[str, str]]:
    """The rows of the card's table, as far as they are known."""
    config, summary = origin.config, origin.summary
    data = config["data"]
    source = Path(data["path"]).name if data["path"] else data["hub"]  # without the folders of this machine
    yield "architecture", architecture
    yield "context", f"{config['seq_len']:,} tokens"
    yield "data", f"{data['name']} ({source})" if source else data["name"]
    yield "tokenizer", data["tokenizer"]
    yield "weights after", f"{origin.step:,} of {config['training']['steps']:,} steps"
    if origin.average:
        average = f"moving average, training.ema={config['training']['ema']}"
        yield "weights", f"{average} (the losses are of the weights themselves)"
    yield "seed", str(config["seed"])
    # A run whose end was cut short recorded some of the following.
    known = {key: value for key, value in (summary or {}).items() if value is not None}
    for key, label in (("parameters", "parameters"), ("tokens", "tokens of the run")):
        if isinstance(known.get(key), int):
            yield label, f"{known[key]:,}"
    losses = {
        key: value
        for key in ("train_loss", "val_loss", "best_val_loss")
        if (value := recorded_number(known.get(key))) is not None
    }
    for key, label in (("train_loss", "training loss at the end"), ("val_loss", "validation loss at the end")):
        if key in losses:
            yield label, f"{losses[key]:.4f}"
    if "best_val_loss" in losses and isinstance(known.get("best_val_step"), int):
        yield "best validation loss", f"{losses['best_val_loss']:.4f} at step {known['best_val_step']:,}"
    path = known.get("attention_path")
    yield "attention", str(known.get("attention", config["attention"]["name"])) + (f" ({path} kernels)" if path else "")
    if "precision" in known:
        yield "precision", str(known["precision"])
    device, git = (part if isinstance(part := known.get(key), dict) else {} for key in ("device", "git"))
    if device.get("name"):
        yield "device", f"{device.get('count', 1)} x {device['name']}"
    if git.get("commit"):
        yield "commit of gpt-attention", f"`{git['commit']}`" + (" with changes" if git.get("dirty") else "")
    if "finished" in known:
        yield "finished", str(known["finished"])
