"""The list of wrong attention, and how one is added."""

from collections.abc import Callable
from dataclasses import dataclass, field

from attention import Attention, AttentionConfig, Score
from tests.attention_in_steps import InSteps, Steps


@dataclass(frozen=True)
class Fault:
    """A wrong attention, and a run in which its mistake has an effect.

    score      of the run's layers
    documents  whether the run separates documents
    grouped    whether query heads share key/value heads
    """

    attention: AttentionConfig
    score: Score = field(default_factory=Score)
    documents: bool = False
    grouped: bool = False


# Faults of inputs that a run does not have: the check finds them, in the line that is named.
CORNERS: dict[str, tuple[AttentionConfig, str]] = {}
FAULTS: dict[str, Fault] = {}
CLASSES: list[type[Attention]] = []
WINDOW, CAP, ALIBI, SINKS = Score(window=9), Score(soft_cap=2.0), Score(alibi=True), Score(sinks=True)


def named(steps: type[Steps]) -> str:
    """The name of an attention with these steps, which is registered."""
    name = "".join(f"_{c.lower()}" if c.isupper() else c for c in steps.__name__).removeprefix("_")
    CLASSES.append(type(steps.__name__ + "Attention", (InSteps,), {"name": name, "steps": steps}))
    return name


def corner(line: str) -> Callable[[type[Steps]], type[Steps]]:
    """Register an attention whose mistake a line of the check shows."""

    def register(steps):
        name = named(steps)
        CORNERS[name] = AttentionConfig(name), line
        return steps

    return register


def fault(
    score: Score = Score(),  # noqa: B008
    dropout: float = 0.0,
    documents: bool = False,
    grouped: bool = False,
) -> Callable[[type[Steps]], type[Steps]]:
    """Register an attention with these steps under the name of their class, in lower case with underscores."""

    def register(steps):
        name = named(steps)
        FAULTS[name] = Fault(AttentionConfig(name, dropout=dropout), score, documents, grouped)
        return steps

    return register
