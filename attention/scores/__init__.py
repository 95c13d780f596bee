"""The options of a `Score`: a file holds everything about one option but its field (attention/score.py).

option.py has the base class. Formulas that need no option are presets in conf/score/.
"""

from .alibi import ALiBi
from .option import HeadTensor, Recognised, ScoreOption
from .sinks import Sinks
from .soft_cap import SoftCap
from .window import Window

OPTIONS: tuple[ScoreOption, ...] = (Window(), SoftCap(), ALiBi(), Sinks())  # in the order in which they change a score

__all__ = ["OPTIONS", "HeadTensor", "Recognised", "ScoreOption"]
