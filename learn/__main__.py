"""Check every step of the ladder, and write the page that walks through FlashAttention: python -m learn [out=<file>]"""

import math
import sys
from pathlib import Path

from recipe.run import process

if __name__ == "__main__":
    process.begin()

from learn.ladder import EXAMPLE, Measured, measure, silent_error
from learn.page import render
from recipe.errors import UserError, fail

DEFAULT = Path("outputs/learn.html")


def table(ladder: list[Measured]) -> str:
    """The ladder, a line each."""
    lines = [f"{'':26}{'x = 1..6':>10}{'passes':>8}{'held':>7}{'from fp64':>11}   overflows at"]
    for entry in ladder:
        limits = ", ".join(f"{name} {x:.2f}" for name, x in entry.overflow.items() if not math.isinf(x)) or "no score"
        figures = f"{entry.result:>10.4f}{entry.passes:>8g}{entry.held:>7}{entry.error:>11.1e}"
        lines.append(f"{entry.rung.title:26}{figures}   {limits}")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    """Print the ladder and write the page. Raises UserError."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return
    if arguments and not (len(arguments) == 1 and arguments[0].startswith("out=")):
        raise UserError(f"python -m learn takes out=<file> and nothing else; got {' '.join(arguments)}.")
    out = Path(arguments[0].removeprefix("out=")) if arguments else DEFAULT
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.open("a", encoding="utf-8").close()
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}); name another file with out=<file>.") from error
    ladder = measure()
    print(f"Attention over the scores and values {', '.join(f'{x:g}' for x in EXAMPLE.tolist())}, step by step\n")
    print(table(ladder))
    line, wrong, right = silent_error()
    print(f"\nWithout this line the output is {wrong:.4f} instead of {right:.4f}, and nothing complains:\n    {line}\n")
    print("recording FlashAttention-1 and -2 ...", flush=True)
    out.write_text(render(ladder), encoding="utf-8")
    print(f"page: {out}")


def run() -> None:
    """The command."""
    try:
        main(sys.argv[1:])
    except UserError as error:
        fail(error)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    process.run(run)
