"""What the parity probe's metrics mean: differences beyond rounding, and a run's worst. Needs no torch."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from recipe.wording import times

# The limit for `parity/*` of a correct implementation, in units of `parity/noise_*`. Another order of summation is
# mostly within twice. FlashAttention's delta = rowsum(do * out) costs up to eight times in fp32 and four in bf16, where
# the gradients of queries and keys nearly cancel. Wrong implementations are off by tens to millions after a few
# updates.
PARITY_MARGIN = 10.0
# Of each layer alone: see parity_layers.py.
ALONE = ("attention_error", "attention_error_higher")


def beyond_rounding(measured: Mapping[str, Any]) -> str | None:
    """A sentence on the difference that rounding does not explain, or None.

    Logits and gradients may differ by PARITY_MARGIN times the noise. The loss does not count: the difference of two
    scalars is too often close to zero by accident.
    """
    for name, what in (
        ("logits_max_diff", "a logit"),
        ("grad_rel_err", f"the gradient of {measured['parity/worst_parameter']}"),
    ):
        difference, noise = measured[f"parity/{name}"], measured[f"parity/noise_{name}"]
        if not difference <= PARITY_MARGIN * noise:  # a NaN is not
            return f"{what} differs from the reference's by {difference:.2g}, where rounding explains {noise:.2g}"
    return None


def wrong_alone(measured: Mapping[str, Any]) -> str | None:
    """A sentence on a layer whose attention alone is further from fp64 than rounding explains, or None."""
    names = [f"parity/{name}" for name in ALONE]
    worst = max((float(measured[name]) for name in names if name in measured), default=0.0)
    if worst <= 1:
        return None
    return f"{measured['parity/attention_worst']} is {times(worst)} as far from fp64 as rounding explains"


def rank(value: Any) -> float:
    """A sort key with NaN above all numbers. metrics.jsonl has "nan" and "inf" as text."""
    return math.inf if math.isnan(float(value)) else float(value)


def summarise(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The `parity` entry of summary.json from the lines of metrics.jsonl: the worst value of every measure, the largest
    noise, and the [sequences, tokens] of the last probe. None without probes."""
    checks = [line for line in lines if "parity/loss_diff" in line]
    if not checks:
        return None

    def worst(name: str) -> float:
        return max((check[f"parity/{name}"] for check in checks if f"parity/{name}" in check), key=rank)

    measures = ("loss_diff", "logits_max_diff", "grad_rel_err")
    return {
        "checks": len(checks),
        **{f"worst_{name}": worst(name) for name in measures},
        "worst_parameter": max(checks, key=lambda check: rank(check["parity/grad_rel_err"]))["parity/worst_parameter"],
        **{f"noise_{name}": worst(f"noise_{name}") for name in measures},
        "tokens": checks[-1]["parity/tokens"],
        **{f"worst_{name}": worst(name) for name in ALONE if any(f"parity/{name}" in check for check in checks)},
    }
