"""Attention with common mistakes, for tests that have to catch them.

FAULTS has each of them by name, CORNERS those that only unusual inputs show, and published.PUBLISHED those that
libraries had. A class replaces one step of tests/attention_in_steps.py; its docstring describes the mistake.
"""

from attention import Ablation, AttentionConfig
from tests.wrong_attention import backward, corners, forward, published
from tests.wrong_attention.registry import CLASSES, CORNERS, FAULTS, Fault

__all__ = ["CLASSES", "CORNERS", "FAULTS", "WRONG", "Fault", "backward", "corners", "forward", "published"]

FAULTS["no_rescaling"] = Fault(AttentionConfig("tiled", block_q=8, block_k=8, ablate=Ablation.no_rescaling))
# Those that a run's losses show too.
WRONG = {
    name: FAULTS[name].attention
    for name in ("mask_off_by_one", "scale_by_head_size", "no_rescaling", "mask_ignores_layer")
}
