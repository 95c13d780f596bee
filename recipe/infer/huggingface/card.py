"""The model card: README.md with the run's settings and results."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from data.untrusted import UntrustedError
from recipe.run.config import ConfigError
from recipe.run.run_folder import SUMMARY, read_summary
from recipe.training.checkpoint import read_manifest

# The entries of summary.json that the card shows.
RECORDED = (
    *("parameters", "tokens", "train_loss", "val_loss", "best_val_loss", "best_val_step"),
    *("attention_path", "precision", "finished"),
)


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
    rows = "\n".join(f"| {label} | {cell(value)} |" for label, value in facts(architecture, origin).items())
    most = max(1, min(100, origin.config["seq_len"] // 2))
    return f"""---
{yaml.safe_dump(front, sort_keys=False).strip()}
---

# {cell(name)}

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


def facts(architecture: str, origin: Origin) -> dict[str, object]:
    """The rows of the card's table by their labels, as far as they are recorded."""
    config, summary = origin.config, origin.summary or {}
    data, training = config["data"], config["training"]
    source = Path(data["path"]).name if data["path"] else data["hub"]  # without the folders of this machine
    rows = {
        "architecture": architecture,
        "context": f"{config['seq_len']:,} tokens",
        "data": f"{data['name']} ({source})" if source else data["name"],
        "tokenizer": data["tokenizer"],
        "weights after": f"{origin.step:,} of {training['steps']:,} steps",
        "seed": config["seed"],
        "attention": config["attention"]["name"],
    }
    if origin.average:
        rows["weights"] = f"moving average, training.ema={training['ema']} (the losses are of the weights themselves)"
    rows |= {name.replace("_", " "): summary[name] for name in RECORDED if name in summary}
    if isinstance(git := summary.get("git"), dict):
        rows["commit of gpt-attention"] = f"{git.get('commit')}{' with changes' if git.get('dirty') else ''}"
    return {label: value for label, value in rows.items() if value is not None}


def cell(value: object) -> str:
    """A value in a table of Markdown. Text of a stranger's folder is no HTML, no link and no further cell there."""
    if isinstance(value, float):
        return f"{value:.4f}"
    text = f"{value:,}" if type(value) is int else " ".join(str(value).split())
    return re.sub(r"[<>&|\[\]`*~!#\\\"']", lambda found: f"&#{ord(found[0])};", text)
