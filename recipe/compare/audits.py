"""The audits of the referee: why an attempt is not valid, as a sentence.

They compare what the judge measured of an edit with the same of the best commit, under the same seed, and with the
budget of the track. They find mistakes and short cuts. They are no sandbox for code that attacks the judge.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from recipe.errors import UserError
from recipe.files import flatten, number

FUTURE = 1e-3  # nats: more than rounding changes a prediction
FIXED = ("seq_len", "data", "init_from", "resume", "device", "probes")  # settings that no edit may change
OF_TRAINING = ("eval_every", "target_loss", "cpu.memory_gib", "checkpoint_every", "keep_last")
# What must be equal for a pair to be one, and what an edit does that changes it.
EQUAL = {
    "seed": "changes the seed list",
    "data": "changes the text, its split or its tokens",
    "tokenizer": "changes the tokenizer",
    "bytes": "changes the count of bytes",
    "predicted": "changes the tokens that are evaluated",
    "device": "ran on another device or with other software",
    "settings": "changes settings that the track fixes",
}
LIMITS = ("tokens", "seconds", "flops", "parameters")


class InvalidError(UserError):
    """An attempt that is not judged; the message is the audit's reason."""


def check_paths(changed: list[str], editable: list[str]) -> None:
    """Raise InvalidError for a file that the track lets no edit change: those of the evaluation, the text, the loop."""
    for path in changed:
        if not any(path == place or path.startswith(f"{place}/") for place in editable):
            raise InvalidError(
                f"the edit changes {path}, and the track lets an edit change {', '.join(editable)} alone; take the "
                "change back."
            )


def result(summary: Mapping[str, Any], measured: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """What the audits compare of a run.

    summary   its summary.json
    measured  by the judge, from its checkpoint; empty if it diverged
    seconds   of its training, by the judge's clock
    """
    flat = flatten(summary.get("config") or {})
    names = [name for name in flat if name.split(".")[0] in FIXED]
    names += [f"training.{name}" for name in OF_TRAINING]
    tokens = number(summary.get("tokens")) or 0.0
    return {
        **measured,
        "predicted": measured.get("tokens"),
        "seed": flat.get("seed"),
        "settings": {name: flat.get(name) for name in names},
        "device": [summary.get("device"), summary.get("versions"), measured.get("threads")],
        "tokens": tokens,
        "seconds": seconds,
        "flops": tokens * (number(summary.get("flops_per_token")) or 0.0),
        "steps": summary.get("steps"),
        "recorded": [name for name in ("eval", "val_loss", "best_val_loss") if summary.get(name) is not None],
        "diverged": summary.get("non_finite_step") is not None or not math.isfinite(measured["bits_per_byte"]),
    }


def faults(edit: Mapping[str, Any], best: Mapping[str, Any], budget: Mapping[str, float]) -> Iterator[str]:
    """A sentence for each audit that an edit's run fails, beside the best commit's with the same seed.

    budget  the most tokens, seconds, operations and parameters
    """
    for name, words in EQUAL.items():
        if not edit["diverged"] and edit[name] != best[name]:
            yield f"the edit {words}: {difference(edit[name], best[name])}."
    for name in LIMITS:
        if name in budget and edit.get(name, 0) > budget[name]:
            yield f"the edit uses {edit[name]:,.6g} {name}, and the track allows {budget[name]:,.6g}."
    if edit["recorded"]:
        yield (
            f"the run folder holds a validation result ({', '.join(edit['recorded'])}) that the judge did not write: "
            "training is not evaluated."
        )
    if edit["diverged"]:
        return
    if edit["step"] != edit["steps"] or edit["checkpoints"] != 1:
        yield (
            f"the run has {edit['checkpoints']} checkpoints, the last of step {edit['step']} of {edit['steps']}; the "
            "weights after the last step are judged, not the best of several."
        )
    if not edit["future"] <= FUTURE:
        yield f"the model sees the future: a prediction changes by {edit['future']:.2g} nats with tokens behind it."


def difference(ours: Any, theirs: Any) -> str:
    """Two values that differ; of mappings the entries that do."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        names = [name for name in ours if ours[name] != theirs.get(name)]
        return ", ".join(f"{name}={ours[name]} instead of {theirs.get(name)}" for name in names)
    return f"{ours} instead of {theirs}"
