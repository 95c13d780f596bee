"""The command `gpt-attention`, also as `python -m gpt_attention`."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command that the arguments name; returns the exit status."""
    command, *arguments = sys.argv[1:] or ["--help"]
    if command == "check":
        from .check.cli import main as check

        return check(arguments)
    known = "gpt-attention check my_module:my_attention    is this attention correct? (check --help has the options)"
    if command in ("--help", "-h"):
        print(known)
        return 0
    print(f"error: {command} is not a command. There is one:\n  {known}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
