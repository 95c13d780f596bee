"""A window: a query sees only its last keys. Beltagy et al. 2020, "Longformer"; Jiang et al. 2023, "Mistral 7B"."""

from ..errors import Option, ScoreError
from .option import ScoreOption


class Window(ScoreOption):
    """keys a query sees, itself included; None: all"""

    name = "window"
    type, words, default = int | None, "a whole number", None
    looks_back = in_kernels = True

    def check(self, value: int) -> None:
        if value < 1:
            window = Option("score.window", value)
            raise ScoreError("{} must be at least 1, the query's own key; leave it out for all keys.", window)
