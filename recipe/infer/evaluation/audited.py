"""What the referee measures of a run itself, on its last checkpoint: the loss, and what its audits compare.

python -m recipe.infer.evaluation.audited <run folder>        prints one line of JSON
"""

import json
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

from data.options import Documents
from data.store import digest
from data.tokenizers import FILE
from recipe.errors import UserError, fail
from recipe.infer.evaluation.scorer import LanguageModel, padded
from recipe.infer.evaluation.text import Text, measure, validation_text
from recipe.infer.trained import CheckpointChoice, ModelChoice, load_any, of_text
from recipe.training.checkpoint import load_checkpoint, read_manifest

WINDOWS = 16  # of one forward pass


def measured(run: Path) -> dict[str, Any]:
    """{"bits_per_byte", "tokens", "bytes", ...} of the validation text, and

    future       how much predictions change with later tokens, nats
    parameters   values in the checkpoint
    weights      digest of the checkpoint's weights
    tokenizer    digest of the run's tokenizer
    data         identity of the prepared text
    step         updates of the checkpoint
    checkpoints  how many the run has

    Raises UserError.
    """
    trained = of_text(load_any(run, ModelChoice(checkpoint=CheckpointChoice.newest), documents=True), run)
    text, model, manifest = validation_text(trained), LanguageModel(trained), read_manifest(trained.checkpoint)
    found = measure(model, text, model.max_length, WINDOWS, trained.config.data.documents is not Documents.ignore)
    files = {name: file["sha256"] for name, file in manifest.files.items() if name.startswith("model/")}
    state = load_checkpoint(trained.checkpoint, parts=["model"])["model"]
    return found | {
        "future": future(model, text),
        "parameters": sum(value.numel() for value in state.values()),
        "weights": digest(files),
        "tokenizer": sha256((run / FILE).read_bytes()).hexdigest(),
        "data": manifest.metadata["data"],
        "threads": manifest.metadata["cpu_threads"],
        "step": manifest.step,
        "checkpoints": len(list(trained.checkpoint.parent.glob("step-*"))),
    }


def future(model: LanguageModel, text: Text) -> float:
    """The largest change of a prediction's logarithm, in nats, when tokens behind it change: at a quarter and a half of
    a window, and at its end. A causal model has none, but for rounding."""
    window = text.tokens[: model.max_length + 1].tolist()
    inputs, targets = padded([(window, len(window) - 1)])
    before, changes = model.scores(inputs, targets)[0], [0.0]
    length = inputs.shape[1]
    for cut in {length // 4, length // 2, length - 1} - {0}:
        changed = inputs.clone()
        changed[:, cut:] = (changed[:, cut:] + 1) % model.trained.tokenizer.n_vocab  # other tokens
        changes.append(float((model.scores(changed, targets)[0] - before)[:cut].abs().max()))
    return max(changes)


if __name__ == "__main__":
    try:
        print(json.dumps(measured(Path(sys.argv[1]))))
    except UserError as error:
        fail(error)
