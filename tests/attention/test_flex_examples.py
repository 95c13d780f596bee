"""attention-gym's examples for flex_attention as formulas, the most useful of which docs/formulas.md lists."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from attention import AttentionConfig, Score, build_attention

PAGE = Path(__file__).parents[2] / "docs" / "formulas.md"
B, H, T, D = 2, 2, 64, 16


class Example(NamedTuple):
    """A formula, the scores or the visible pairs that it stands for, and the shapes of its tensors.

    changed  of s (B, H, T, T), i (T, 1), j (T) and the tensors: scores, or a mask of who sees whom
    """

    formula: str
    changed: Callable[..., Tensor]
    shapes: dict[str, tuple[int, ...]] | None = None
    causal: bool = True


def with_mask(formula: str, seen: Callable[[Tensor, Tensor], Tensor], causal: bool = False) -> Example:
    return Example(formula, lambda s, i, j: s.masked_fill(~seen(i, j), -torch.inf), causal=causal)


def near(x: Tensor, y: Tensor, most: int) -> Tensor:
    return (x - y).abs() <= most


def of_image(s: Tensor, i: Tensor, j: Tensor, image: Tensor) -> Tensor:
    return s.masked_fill(image[:, None] != image, -torch.inf)


EXAMPLES = {
    "alibi": Example(
        "s - slope[h] * (i - j)", lambda s, i, j, slope: s - slope[:, None, None] * (i - j), {"slope": (H,)}
    ),
    "softcapping": Example("20 * tanh(s / 20)", lambda s, i, j: torch.tanh(s / 20) * 20),
    "relative_position": Example("s + (i - j)", lambda s, i, j: s + i - j),
    "rel_bias": Example(
        "s + bias[h, max(i - j, 0)]", lambda s, i, j, bias: s + bias[:, (i - j).clamp(min=0)], {"bias": (H, T)}
    ),
    "checkerboard": Example(
        "s if (i - j) % 2 == 0 else 0.5 * s", lambda s, i, j: torch.where((i - j) % 2 == 0, s, 0.5 * s)
    ),
    "relative_1d": Example(
        "s + bias[abs(i - j)]", lambda s, i, j, bias: s + bias[(i - j).abs()], {"bias": (T,)}, causal=False
    ),
    "absolute_2d": Example("s + bias[i, j]", lambda s, i, j, bias: s + bias, {"bias": (T, T)}, causal=False),
    "head_specific": Example("s + bias[h, i, j]", lambda s, i, j, bias: s + bias, {"bias": (H, T, T)}, causal=False),
    "batch_head": Example("s + bias[b, h, i, j]", lambda s, i, j, bias: s + bias, {"bias": (B, H, T, T)}, causal=False),
    "multiplicative": Example("s * bias[i]", lambda s, i, j, bias: s * bias[:, None], {"bias": (T,)}, causal=False),
    "local_window": Example(
        "s + bias[min(max(i - j + 16, 0), 32)]",
        lambda s, i, j, bias: s + bias[(i - j + 16).clamp(0, 32)],
        {"bias": (33,)},
        causal=False,
    ),
    "global_tokens": Example("s + bias[j]", lambda s, i, j, bias: s + bias, {"bias": (T,)}, causal=False),
    "dilated_sliding_window": with_mask(
        "s if abs(i - j) <= 6 and (i - j) % 2 == 0 else -1e9", lambda i, j: near(i, j, 6) & ((i - j) % 2 == 0)
    ),
    "sink_attn": with_mask("s if i - j <= 6 or j < 4 else -1e9", lambda i, j: (i - j <= 6) | (j < 4), causal=True),
    "svg_spatial": with_mask(
        "s if j < 2 or i < 2 or abs(i - j) < 8 else -1e9", lambda i, j: (j < 2) | (i < 2) | near(i, j, 7)
    ),
    "svg_temporal": with_mask(
        "s if j < 2 or i < 2 or abs((i - 2) % 9 - (j - 2) % 9) < 3 else -1e9",
        lambda i, j: (j < 2) | (i < 2) | near((i - 2).remainder(9), (j - 2).remainder(9), 2),
    ),
    "prefix_lm": with_mask("s if j < 5 or j <= i else -1e9", lambda i, j: (j < 5) | (j <= i)),
    "natten": with_mask(
        "s if abs(i // 8 - j // 8) <= 1 and abs(i % 8 - j % 8) <= 1 else -1e9",
        lambda i, j: near(i // 8, j // 8, 1) & near(i % 8, j % 8, 1),
    ),
    "sta": with_mask(
        "s if abs(min(max(i // 16, 1), 2) - j // 16) <= 1 "
        "and abs(min(max(i // 4 % 4, 1), 2) - j // 4 % 4) <= 1 else -1e9",
        lambda i, j: near((i // 16).clamp(1, 2), j // 16, 1) & near((i // 4 % 4).clamp(1, 2), j // 4 % 4, 1),
    ),
    "flamingo": Example("s if image[i] == image[j] else -1e9", of_image, {"image": (T,)}, causal=False),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_of_attention_gym_is_a_formula(name):
    torch.manual_seed(0)
    example = EXAMPLES[name]
    q, k, v = torch.randn(3, B, H, T, D)
    i, j = torch.arange(T)[:, None], torch.arange(T)
    tensors = {name: torch.randn(shape) for name, shape in (example.shapes or {}).items()}
    if "image" in tensors:
        tensors["image"] = (j // 7).float()
    s = example.changed(q @ k.mT / D**0.5, i, j, **tensors)
    expected = (s.masked_fill(j > i, -torch.inf) if example.causal else s).softmax(-1) @ v
    score, options = Score(causal=example.causal, formula=example.formula), AttentionConfig("tiled")
    torch.testing.assert_close(build_attention(options)(q, k, v, score=score, tensors=tensors).out, expected)


def test_the_page_of_formulas_lists_some_of_these_examples():
    """A row names one example or more, and has their formulas in the same order."""
    section = PAGE.read_text().split("## The examples of flex_attention")[1].split("\n## ")[0]
    listed: dict[str, Any] = {}
    for row in re.findall(r"^\| (`.*) \|$", section, flags=re.MULTILINE):
        names, formulas = (re.findall("`([^`]*)`", cell) for cell in row.split(" | "))
        listed |= dict(zip(names, [x for x in formulas if re.search(r"\bs\b", x)], strict=False))
    assert len(listed) > 12
    assert listed.items() <= {name: example.formula for name, example in EXAMPLES.items()}.items()
