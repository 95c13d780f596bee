"""A soft cap keeps scores between -c and c. Gemma Team 2024, "Gemma 2", section 2: c = 50 in attention."""


def formula(cap: float) -> str:
    """c tanh(s / c)."""
    return f"{cap!r} * tanh(s / {cap!r})"
