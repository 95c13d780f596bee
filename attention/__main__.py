"""The command `gpt-attention`, also as `python -m gpt_attention`."""

import sys
from importlib import import_module
from importlib.util import find_spec

from .from_file import load


def main() -> int:
    """Run the command that the arguments name; returns the exit status."""
    command, *arguments = sys.argv[1:] or ["--help"]
    for argument in sys.argv[1:]:
        if argument.endswith("\r"):
            script = "repair the script with sed -i 's/\\r$//' <script>."
            print(f"error: {argument.strip()} ends in a carriage return; {script}", file=sys.stderr)
            return 2
    if command == "check":
        # Mixers are beside this package in the checkout, and within it where it is installed.
        package = f"{__package__}.mixers" if __package__ != "attention" else "mixers"
        if find_spec(package) is not None:
            mixers = import_module(f"{package}.check")
            if mixers.takes_on(arguments, load):
                return mixers.main(arguments, load)
        from .check.cli import main as check

        return check(arguments)
    usage = "gpt-attention check my_module:my_attention    is this attention or mixer correct? (check --help has more)"
    if command in ("--help", "-h"):
        print(usage)
        return 0
    print(f"error: {command} is not a command. There is one:\n  {usage}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
