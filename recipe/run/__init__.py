"""From a command to a run folder: the configuration, the parts that it names, and what a run records.

process.py     how a program begins and ends
launch.py      the entry point: checks, then Hydra
compose.py     composes a configuration, and finds mistakes in single overrides
mistakes.py    finds mistakes in a whole configuration
resume.py      finds the run to resume, and checks its folder
wording.py     turns errors of Hydra into one sentence
describe.py    what a run prints at its start and end
completion.py  tab completion
arguments.py   key=value arguments of the programs without Hydra

This file imports nothing slow, so completion.py can answer before torch is loaded.
"""

import argparse
import sys

if sys.version_info >= (3, 14):
    # Python 3.14 formats a help text when it is added. One help text of Hydra 1.3 is an object until it is shown.
    argparse.ArgumentParser._check_help = lambda self, action: None
