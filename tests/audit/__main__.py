"""Make every mistake of mistakes.py and judge how the command ends: python -m tests.audit [regular expression]

A mistake is answered well if the command ends within SECONDS with a status other than 0, names the cause in few lines,
shows no traceback, and leaves every file as it was. Each command runs as `python <program> <arguments>` does, in a
separate folder and in a fork of this process, which has imported the libraries already.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import runpy
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.audit.mistakes import MISTAKES, PROGRAMS
from tests.audit.workshop import COMMANDS, furnish, spoil
from tests.programs import contents

ROOT = Path(__file__).parents[2]
SECONDS, MOST_LINES = 30.0, 8
# argparse prints the usage, of any length, above its message.
USAGE = re.compile(r"^usage: .*?(?=^\S[^\n]*: error: )", re.DOTALL | re.MULTILINE)


@dataclass
class Ending:
    """How a command ended: its status, what it printed, and the paths that it changed. Status None: it had not ended
    after SECONDS."""

    status: int | None
    printed: str
    seconds: float
    changed: list[str]

    def flaw(self, cause: str) -> str | None:
        """What is wrong with it, for a mistake with this cause."""
        said = USAGE.sub("", self.printed)
        flaws = {
            f"does not end within {SECONDS:g} s": self.status is None,
            "is accepted": self.status == 0,
            "ends in a traceback": "Traceback (most recent call last)" in said,
            "ends without a word": not said.strip(),
            "does not name the cause": not re.search(cause, said),
            f"takes more than {MOST_LINES} lines": len(said.strip().splitlines()) > MOST_LINES,
            f"changes {', '.join(self.changed[:3])}": bool(self.changed),
        }
        return next((flaw for flaw, found in flaws.items() if found), None)


def endings(commands: Sequence[Sequence[str]], workshop: Path | None = None) -> Iterator[Ending]:
    """How each command ends in a copy of the workshop; without one, in the current folder."""
    for command in commands:
        with tempfile.TemporaryDirectory() as place:
            folder = Path.cwd() if workshop is None else Path(place) / "workshop"
            if workshop is not None:
                shutil.copytree(workshop, folder, symlinks=True)
            before, begin, output = files(folder), time.monotonic(), Path(place) / "output"
            process = os.fork()
            if process == 0:
                become(command, folder, output)
            status = ended(process, begin + SECONDS)
            after = files(folder)
            changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
            printed = output.read_text(errors="replace")
            yield Ending(status, printed, time.monotonic() - begin, [] if workshop is None else changed)


def files(folder: Path) -> dict[str, bytes | None]:
    """The content of the folder but for prepared tokens, which a later run reads again."""
    return {name: content for name, content in contents(folder).items() if not name.startswith((".cache", "cache"))}


def ended(process: int, deadline: float) -> int | None:
    """The exit status of a process; None, and it is killed with all that it started, after the deadline."""
    while True:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.killpg(process, signal.SIGKILL)
            os.waitpid(process, 0)
            return None
        time.sleep(0.01)


def become(command: Sequence[str], folder: Path, output: Path) -> None:
    """Turn this process into `python *command`, with what it prints in a file. Never returns."""
    status = 1
    try:
        os.setsid()
        for descriptor in (1, 2):
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", buffering=1) for descriptor in (1, 2))
        os.chdir(folder)
        program, *arguments = command[1:] if command[0] == "-m" else command
        sys.argv = [program, *arguments]
        sys.path.insert(0, str(folder if command[0] == "-m" else ROOT))
        if command[0] == "-m":
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(ROOT / program), run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def build(folder: Path) -> None:
    """Make the workshop. Raises RuntimeError where a command that prepares it fails."""
    furnish(folder)
    os.chdir(folder)
    for command, ending in zip(COMMANDS, endings(COMMANDS), strict=True):
        if ending.status != 0:
            raise RuntimeError(f"{shlex.join(command)} failed:\n{ending.printed}")
    spoil(folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.audit", description=__doc__)
    parser.add_argument("only", nargs="?", default="", help="a regular expression for the commands to run")
    parser.add_argument("--show", action="store_true", help="print what each command printed")
    args = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    for program in PROGRAMS:
        importlib.import_module(program.removesuffix(".py"))
    chosen = {line: cause for line, cause in MISTAKES.items() if re.search(args.only, line)}
    wrong = 0
    with tempfile.TemporaryDirectory() as place:
        workshop = Path(place) / "workshop"
        workshop.mkdir()
        build(workshop)
        commands = [shlex.split(line) for line in chosen]
        for (line, cause), ending in zip(chosen.items(), endings(commands, workshop), strict=True):
            flaw = ending.flaw(cause)
            wrong += flaw is not None
            if flaw or args.show:
                print(
                    f"{line}\n  {flaw or 'is right'} ({ending.seconds:.1f} s)\n{ending.printed.strip()}\n", flush=True
                )
        os.chdir(ROOT)
    print(f"{len(chosen) - wrong} of {len(chosen)} mistakes are answered well")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
