"""The kind of failure that a user who asks for text can act on."""

from __future__ import annotations

from errors import UserError


class GenerationError(UserError, ValueError):
    """A prompt, or an amount of text, that cannot be served; the message says what to change."""
