"""What the shell's TAB key offers after `python train.py`: answered by Hydra, from the files of conf/ alone.

    eval "$(python train.py -sc install=bash)"

The types of config.py come with torch, whose import takes longer than one waits for a TAB. They add no name to what
conf/ has, so completion does without them.
"""

from __future__ import annotations

import sys

import hydra
from hydra.core.config_store import ConfigStore

from cli import CONF


def complete() -> None:
    """Answer `--shell-completion` and exit, where the command line asks for it."""
    if not {"-sc", "--shell-completion"} & set(sys.argv[1:]):
        return
    ConfigStore.instance().store(name="schema", node={})
    hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(lambda cfg: None)()
    sys.exit()
