"""The options of a `Score`: each file holds everything about one option. A new file is a new option.

option.py has the base class. Formulas that need no option are presets in conf/score/.
"""

from importlib import import_module
from pkgutil import iter_modules

from .option import HeadTensor, Recognised, ScoreOption

for module in iter_modules(__path__):
    import_module(f"{__name__}.{module.name}")

OPTIONS = tuple(sorted((option() for option in ScoreOption.__subclasses__()), key=lambda option: option.order))

__all__ = ["OPTIONS", "HeadTensor", "Recognised", "ScoreOption"]
