"""The command line of train.py: Hydra's overrides in, a checked configuration or plain sentences out.

launch.py      the order of things: what train.py calls
compose.py     composing a configuration, and what is wrong with an override
check.py       what is wrong with a configuration as a whole
resume.py      the run to resume, and the folder that a run keeps to itself
wording.py     a sentence for what Hydra says over several lines
completion.py  the answers to a shell's TAB
arguments.py   the key=value arguments of the programs that do without Hydra

This file imports nothing, so that completion.py answers before torch is loaded.
"""

from pathlib import Path

CONF = Path(__file__).parents[1] / "conf"
