"""Hydra, which composes more than a thousand configurations in the tests, made nine times as fast; and runs and
comparisons without their pictures, which take as long as all else in them.

Hydra's replacements compute the same: tests/recipe/run/test_composing.py compares configurations with those of plain
Hydra.
The time of a configuration, each replacement added to those before it:

    none 70 ms   choices 60 ms   files 28 ms   merges 8 ms
"""

import copy
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from data.atomic import write_atomically

_name_choices: Any = defaults_list._create_interpolation_map
_merge: Any = ConfigLoaderImpl._compose_config_from_defaults_list
_copy: Any = DictConfig.__deepcopy__
_read: dict[tuple, dict[str, Any]] = {}
_merged: dict[tuple, Any] = {}


def _share_repository(self: Any, delegate: Any) -> None:
    """Share registered sources and what was read from them. Hydra copies and reads them for each composition."""
    self.delegate = copy.copy(delegate)
    _share_files(self)


def _share_other_files(self: Any, search_path: Any) -> None:
    """As above, where a configuration names further folders."""
    self.delegate.initialize_sources(search_path)
    _share_files(self)


def _share_files(repository: Any) -> None:
    """Let Hydra find what was read from these files, as long as none of them changes."""
    sources = repository.get_sources()
    folders = [Path(source.path) for source in sources if source.scheme() == "file"]
    files = ((path, path.stat().st_mtime_ns) for folder in folders for path in sorted(folder.rglob("*.yaml")))
    repository.files = (*(source.full_path() for source in sources), *files)
    repository.cache = _read.setdefault(repository.files, {})


def _name_choices_if_read(overrides: Any, defaults: list[Any], self_added: bool) -> Any:
    """Make the configuration of the choices so far only for a default that interpolates, which alone reads it."""
    return _name_choices(overrides, defaults, self_added) if any(d.is_interpolation() for d in defaults) else None


def _copies(repo: Any) -> Any:
    """A repository whose configurations may be changed."""
    other = copy.copy(repo)
    other.load_config = lambda config_path: copy.deepcopy(repo.load_config(config_path))
    return other


def _copied(self: Any, memo: Any) -> Any:
    """A whole configuration's copy in a third of the time, unless Hydra has read a module of its types twice."""
    with suppress(pickle.PicklingError):
        if not self._get_parent():
            return pickle.loads(pickle.dumps(self))
    return _copy(self, memo)


def _merge_once(self: Any, defaults: list[Any], repo: Any) -> Any:
    """Merge the same files once, whatever single values replace theirs; so also those of Hydra with the schema, which
    come first in every configuration."""
    key = (repo.files, *((default.config_path, default.package, default.primary) for default in defaults))
    if key not in _merged:
        common = 1 + next((n for n, default in enumerate(defaults) if default.config_path == "schema"), len(defaults))
        own = _merge(self, defaults[common:] or defaults, _copies(repo))
        if defaults[common:]:
            try:
                (config := _merge_once(self, defaults[:common], repo)).merge_with(own)
            except OmegaConfBaseException:
                return _merge(self, defaults, _copies(repo))  # whose error names the file
            own = config
        _merged[key] = own
    return copy.deepcopy(_merged[key])


PIXEL = bytes.fromhex(  # a PNG
    "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b550000000a49444154789c636000000002000148afa471"
    "0000000049454e44ae426082"
)


# The curve of a run's losses, and the charts of a comparison, whose SVG the page shows.
PICTURES = (
    ("recipe.run.tracker", "draw_loss_curve", lambda _, path, title: write_atomically(path, PIXEL)),
    ("recipe.compare.page", "render_png", lambda _: PIXEL),
    ("recipe.compare.probes", "render_png", lambda _: PIXEL),
)


REPLACED = [
    (owner, name, getattr(owner, name), replacement)
    for owner, name, replacement in (
        (defaults_list, "_create_interpolation_map", _name_choices_if_read),
        (CachingConfigRepository, "__init__", _share_repository),
        (CachingConfigRepository, "initialize_sources", _share_other_files),
        (ConfigLoaderImpl, "_compose_config_from_defaults_list", _merge_once),
        (DictConfig, "__deepcopy__", _copied),
        # In forks of the tests' server alone, which has imported these.
        *((sys.modules[module], name, new) for module, name, new in PICTURES if module in sys.modules),
    )
]


def hasten() -> None:
    """Skip work of Hydra and OmegaConf whose result they do not use, or have computed before, and pictures."""
    for owner, name, _, replacement in REPLACED:
        setattr(owner, name, replacement)


@contextmanager
def as_it_is() -> Iterator[None]:
    """Within the block, Hydra and runs as they are."""
    for owner, name, original, _ in REPLACED:
        setattr(owner, name, original)
    try:
        yield
    finally:
        hasten()
