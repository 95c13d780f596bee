"""The probes' comparison of each layer's attention alone with fp64: see recipe/training/parity_layers.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from recipe.compare.runs import Run

ERRORS = ("parity/attention_error", "parity/attention_error_higher")
UNSEEN = "parity/attention_unseen"


class Alone(NamedTuple):
    """The worst check of all layers.

    checks     how many there were
    errors     precision -> the largest error, as a share of what rounding explains: the run's, and a higher one, as far
               as something was compared
    step       of the largest, and `where` it is: layer, mode, result and row
    unseen     the parts that could not be compared, with the reasons
    """

    checks: int
    errors: dict[str, float]
    step: int
    where: str
    unseen: tuple[str, ...]

    @property
    def agrees(self) -> bool | None:
        """Whether rounding explains all errors; None where nothing was compared."""
        return max(self.errors.values()) <= 1 if self.errors else None


def alone_worst(runs: Sequence[Run]) -> Alone | None:
    """The worst of all checks in the runs of one implementation; None where none was made, as by older versions."""
    errors: dict[str, float] = {}
    worst, step, where, checks, unseen = -1.0, 0, "", 0, dict[str, None]()
    for run in runs:
        for record in run.records:
            if not any(name in record for name in (*ERRORS, UNSEEN)):
                continue
            checks += 1
            names = (run.precision, str(record.get("parity/attention_precision")))
            for name, metric in zip(names, ERRORS, strict=True):
                # Where nothing was compared, older versions wrote 0, which is at no place.
                if metric not in record or record.get("parity/attention_worst") == "":
                    continue
                share = float(record[metric])  # "inf" is text
                errors[name] = max(errors.get(name, 0.0), share)
                if share > worst:
                    worst, step, where = share, int(record["step"]), str(record.get("parity/attention_worst", ""))
            for part in filter(None, str(record.get(UNSEEN, "")).split("; ")):
                unseen[part] = None
    return Alone(checks, errors, step, where, tuple(unseen)) if checks else None
