"""What the shell's TAB key offers after `python train.py`: Hydra's answer, in less than a second.

    eval "$(python train.py -sc install=bash)"

The names come from config.py, which needs torch, whose import takes longer than one waits for a TAB. They are
therefore kept in a file, and gathered again when the code has changed since.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from cli import CONF
from files import write_atomically

ROOT = CONF.parent
PARTS = ("attention", "data", "model", "training")  # where the dataclasses of config.py are
NAMES = ROOT / ".cache" / "completion.yaml"


def complete() -> None:
    """Answer `--shell-completion` and exit, where the command line asks for it."""
    if not {"-sc", "--shell-completion"} & set(sys.argv[1:]):
        return
    store = ConfigStore.instance()
    store.store(name="schema", node=names())
    store.store(group="hydra/launcher", name="process", node={})
    hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(lambda cfg: None)()
    sys.exit()


def names() -> Any:
    """Everything that can be overridden, with its default."""
    code = [ROOT / "config.py", *(file for part in PARTS for file in (ROOT / part).rglob("*.py"))]
    if NAMES.is_file() and NAMES.stat().st_mtime > max(file.stat().st_mtime for file in code):
        return OmegaConf.load(NAMES)
    from config import Config

    defaults = OmegaConf.to_yaml(OmegaConf.structured(Config))
    with contextlib.suppress(OSError):  # in a folder that cannot be written, every answer takes its time
        NAMES.parent.mkdir(exist_ok=True)
        write_atomically(NAMES, defaults)
    return OmegaConf.create(defaults)
