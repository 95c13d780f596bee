"""From a command to a run folder: the configuration, the parts that it names, and what a run records.

launch.py     the entry point: from the command line to a run or a sweep
compose.py    composes a configuration, and finds mistakes in single overrides
mistakes.py   finds mistakes in a whole configuration
resume.py     finds the run to resume, and checks its folder
build.py      the parts of a run
record.py     what a run writes into its folder
arena.py      an arena: its plan, and the runs of the plan
queue.py      the jobs of a sweep, each in a process
wording.py    turns errors of Hydra into one sentence
arguments.py  key=value arguments of the programs without Hydra
"""

import argparse
import sys

if sys.version_info >= (3, 14):
    # Python 3.14 formats a help text when it is added. One help text of Hydra 1.3 is an object until it is shown.
    argparse.ArgumentParser._check_help = lambda self, action: None
