"""How rows are named in tables."""

from __future__ import annotations

from bench.record import Row

VARIANTS = {
    "causal": "causal",
    "full": "full mask",
    "window": "window of 1,024",
    "documents": "documents of 1,024",
    "alibi": "ALiBi",
    "soft_cap": "soft cap 50",
    "sinks": "sinks",
}
PEERS = {
    "flash": "flash",
    "sdpa-cudnn": "cuDNN",
    "fa4": "FlashAttention-4",
    "fa4-deterministic": "FlashAttention-4, deterministic",
    "flex-flash": "FlexAttention with FlashAttention-4",
}


def problem(row: Row, *more: str) -> str:
    """The head size, mask and dropout of a row: head size 64, full mask, dropout 0.1."""
    mask = [] if row["variant"] == "causal" else [VARIANTS[row["variant"]]]
    dropout = [f"dropout {row['dropout']:g}"] if row["dropout"] else []
    return ", ".join([f"head size {row['head_size']}", *mask, *dropout, *more])


def thousands(value: float) -> str:
    """A speed in thousands: 573."""
    return f"{value / 1e3:,.0f}"


def percent(share: float, digits: int = 0) -> str:
    """A share: 96 %."""
    return f"{100 * share:.{digits}f} %"


def case(row: Row, name: str) -> str:
    """A value of a row's case, as text."""
    return str(row["case"][name])
