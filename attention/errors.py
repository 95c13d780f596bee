"""The kind of failure that a caller can act on."""

from __future__ import annotations


class AttentionError(ValueError):
    """A refusal in one sentence that names the offending value and what to change.

    The base of ScoreError and UnsupportedAttention.
    """
