"""The table of training steps on several GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from bench.markdown import table
from bench.record import Row
from bench.several_gpus.cases import ALONE


def speeds(rows: Sequence[Row]) -> str:
    """Every measurement: tokens/s as a multiple of one GPU's, memory, and whether the bits are those of one GPU."""
    of = {(row["kind"], row["name"], row["gpus"]): row for row in rows}
    lines = []
    for (kind, name, gpus), row in sorted(of.items()):
        alone = of.get((kind, ALONE, gpus)) or of.get((kind, name, 1))
        comparable = alone is not None and gpus > 1 and not row["compiles"] and not alone["compiles"]
        one = of.get((kind, name, 1), {}).get("digest")
        lines.append(
            [
                f"{kind}, {name}",
                str(gpus),
                f"{row['seq_len']:,}",
                f"{row['tokens_per_s']:,.0f}" + (" with compiling" if row["compiles"] else ""),
                f"{row['tokens_per_s'] / alone['tokens_per_s']:.2f}" if comparable and alone else "",
                f"{row['peak_allocated_gib']:.1f}",
                {True: "yes", False: "no"}[row["digest"] == one] if one and gpus > 1 else "",
            ]
        )
    head = ["", "GPUs", "tokens of a sequence", "tokens/s", "times one", "GiB per GPU", "the bits of one"]
    return table(head, lines)
