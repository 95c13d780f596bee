"""The kind of failure that a user who asks for text can act on."""

from __future__ import annotations

from recipe.errors import UserError


class GenerationError(UserError, ValueError):
    """Prompts, sampling options or files that cannot be used, or text that does not fit in memory; the message says
    what to change."""
