"""Tab completion for `python train.py`: Hydra's answer, in less than a second.

    eval "$(python train.py -sc install=bash)"

The names come from config.py, which imports torch, and that takes too long for a TAB. So they are cached in a file,
which is written again when the code has changed.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from data.atomic import write_atomically
from recipe import CONF

ROOT = CONF.parent
PARTS = ("attention", "data", "model", "recipe")  # where the dataclasses of config.py are
NAMES = ROOT / ".cache" / "completion.yaml"


def complete() -> None:
    """If the command line asks for `--shell-completion`, answer and exit."""
    if not {"-sc", "--shell-completion"} & set(sys.argv[1:]):
        return
    store = ConfigStore.instance()
    store.store(name="schema", node=names())
    store.store(group="hydra/launcher", name="process", node={})
    hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(lambda cfg: None)()
    sys.exit()


def names() -> Any:
    """Every override with its default."""
    code = [*(file for part in PARTS for file in (ROOT / part).rglob("*.py"))]
    if NAMES.is_file() and NAMES.stat().st_mtime > max(file.stat().st_mtime for file in code):
        return OmegaConf.load(NAMES)
    from recipe.run.config import Config

    defaults = OmegaConf.to_yaml(OmegaConf.structured(Config))
    with contextlib.suppress(OSError):  # without write permission every answer is slow, but right
        NAMES.parent.mkdir(exist_ok=True)
        write_atomically(NAMES, defaults)
    return OmegaConf.create(defaults)
