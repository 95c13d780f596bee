"""The model card: README.md with what the run did and what it reached."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from recipe.training.checkpoint import read_manifest


@dataclass(frozen=True)
class Origin:
    """The origin of weights.

    step     updates that made them
    config   of their run
    summary  summary.json of the run; None where it has not ended
    average  whether they are the moving average of the run's weights
    """

    step: int
    config: dict[str, Any]
    summary: dict[str, Any] | None
    average: bool = False


def read_origin(run: Path, checkpoint: Path, config: dict[str, Any], average: bool) -> Origin:
    """The origin of the weights, or of their moving average, in a run's checkpoint. Raises CheckpointError."""
    path = run / "summary.json"
    summary = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    return Origin(read_manifest(checkpoint).step, config, summary, average)


def model_card(name: str, architecture: str, origin: Origin) -> str:
    """Markdown with the front matter that Hugging Face's hub reads, for a model of an architecture of transformers."""
    front = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["gpt-attention"]}
    rows = "\n".join(f"| {label} | {value} |" for label, value in facts(architecture, origin))
    longest = min(100, origin.config["seq_len"])
    return f"""---
{yaml.safe_dump(front, sort_keys=False).strip()}
---

# {name}

A language model trained with gpt-attention.

```python
from transformers import pipeline

print(pipeline("text-generation", model="{name}")("The", max_length={longest})[0]["generated_text"])
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
    if summary is None:
        yield "attention", config["attention"]["name"]
    else:
        yield "parameters", f"{summary['parameters']:,}"
        yield "tokens of the run", f"{summary['tokens']:,}"
        for key, label in (("train_loss", "training loss at the end"), ("val_loss", "validation loss at the end")):
            if summary[key] is not None:
                yield label, f"{float(summary[key]):.4f}"
        if summary["best_val_loss"] is not None:
            yield "best validation loss", f"{float(summary['best_val_loss']):.4f} at step {summary['best_val_step']:,}"
        path = summary["attention_path"]
        yield "attention", summary["attention"] + (f" ({path} kernels)" if path else "")
        yield "precision", summary["precision"]
        yield "device", f"{summary['device']['count']} x {summary['device']['name']}"
        if (commit := summary["git"]["commit"]) is not None:
            yield "commit of gpt-attention", f"`{commit}`" + (" with changes" if summary["git"]["dirty"] else "")
        yield "finished", summary["finished"]
