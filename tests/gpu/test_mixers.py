"""Mixers on a GPU: the kernels of flash-linear-attention against the definition in fp64, our layers against theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mixers import Decay, Recurrence, mix
from mixers.fla import KERNELS
from mixers.layers import MIXERS, build_mixer

layers = pytest.importorskip("fla.layers", reason="needs the package flash-linear-attention")

RECURRENCES = pytest.mark.parametrize("recurrence", KERNELS, ids=lambda r: f"{r.decay.value}-{r.delta}")


def distance(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference, over that of what is expected."""
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@RECURRENCES
@pytest.mark.parametrize("documents", [False, True])
def test_the_packages_kernels_compute_the_recurrence(recurrence: Recurrence, documents: bool) -> None:
    torch.manual_seed(0)
    B, H, T, K, V = 2, 3, 300, 64, 64

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    inputs: dict[str, Any] = {
        "q": drawn(B, H, T, K),
        "k": torch.nn.functional.normalize(drawn(B, H, T, K).float(), dim=-1).bfloat16(),
        "v": drawn(B, H, T, V),
        "beta": torch.rand(B, H, T, device="cuda"),
    }
    if recurrence.decay is not Decay.none:
        inputs["log_decay"] = -torch.rand(B, H, T, K if recurrence.decay is Decay.channel else 1, device="cuda")
    numbers = (torch.arange(T, device="cuda") >= 130).long() + (torch.arange(T, device="cuda") >= 131).long()
    packed: dict[str, Any] = {"documents": numbers.expand(B, T)} if documents else {}
    exact: dict[str, Any] = {name: x.double() for name, x in inputs.items()}
    expected, last = mix(recurrence=recurrence, mixer="recurrent", **exact, **packed)
    found, state = mix(recurrence=recurrence, mixer="fla", **inputs, **packed)
    assert distance(found, expected) < 0.01
    assert distance(state, last) < 0.01


# Our parameter -> theirs.
COMMON = {name: name for name in ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")}
CASES: dict[str, tuple[Callable[[int, int], nn.Module], dict[str, str]]] = {
    "linear": (
        lambda C, H: layers.LinearAttention(hidden_size=C, num_heads=H, feature_map="elu"),
        COMMON | {"o_norm": "norm.weight"},
    ),
    "retnet": (
        lambda C, H: layers.MultiScaleRetention(hidden_size=C, num_heads=H),
        COMMON | {"o_norm": "g_norm_swish_gate.weight", "g_proj.weight": "g_proj.weight"},
    ),
    "gla": (
        lambda C, H: layers.GatedLinearAttention(hidden_size=C, num_heads=H),
        COMMON
        | {"o_norm": "g_norm_swish_gate.weight", "g_proj.weight": "g_proj.weight"}
        | {f"decay.proj.{part}": f"gk_proj.{part}" for part in ("0.weight", "1.weight", "1.bias")},
    ),
    "deltanet": (
        lambda C, H: layers.DeltaNet(hidden_size=C, num_heads=H),
        COMMON | {"b_proj.weight": "b_proj.weight", "o_norm": "o_norm.weight"},
    ),
    "gdn": (
        lambda C, H: layers.GatedDeltaNet(hidden_size=C, num_heads=H, head_dim=3 * C // (4 * H)),
        COMMON
        | {"b_proj.weight": "b_proj.weight", "o_norm": "o_norm.weight", "g_proj.weight": "g_proj.weight"}
        | {"decay.proj.weight": "a_proj.weight", "decay.A_log": "A_log", "decay.dt_bias": "dt_bias"},
    ),
    "kda": (
        lambda C, H: layers.KimiDeltaAttention(hidden_size=C, num_heads=H, head_dim=C // H),
        COMMON
        | {"b_proj.weight": "b_proj.weight", "o_norm": "o_norm.weight"}
        | {f"g_proj.{part}": f"g_proj.{part}" for part in ("0.weight", "1.weight", "1.bias")}
        | {f"decay.proj.{part}": f"f_proj.{part}" for part in ("0.weight", "1.weight")}
        | {"decay.A_log": "A_log", "decay.dt_bias": "dt_bias"},
    ),
    "mamba2": (
        lambda C, H: layers.Mamba2(
            hidden_size=C, num_heads=2 * H, head_dim=C // H, state_size=2 * C // H, backend="triton"
        ),
        {"in_proj.weight": "in_proj.weight", "o_proj.weight": "out_proj.weight", "norm": "norm.weight"}
        | {name: name for name in ("A_log", "dt_bias", "D")},
    ),
}


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("mixer", ["chunked", "fla"])
def test_a_layer_computes_what_the_packages_layer_computes(name: str, mixer: str) -> None:
    torch.manual_seed(0)
    C, H = 256, 4
    build, names = CASES[name]
    theirs = build(C, H).cuda()
    ours = build_mixer(name, C, H, mixer).cuda()
    parameters: dict[str, Tensor] = dict(theirs.named_parameters())
    weights = {own: parameters[their] for own, their in names.items()}
    if name == "mamba2":
        weights |= {"conv.weight": parameters["conv1d.weight"][:, 0], "conv.bias": parameters["conv1d.bias"]}
    elif ours.conv is not None:
        convs = [parameters[f"{part}_conv1d.weight"].reshape(-1, 4) for part in "qkv"]
        weights["conv.weight"] = torch.cat(convs)
    ours.load_state_dict({own: weight.detach() for own, weight in weights.items()})
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    x = torch.randn(2, 200, C, device="cuda", dtype=torch.bfloat16)
    ours, theirs = ours.bfloat16(), theirs.bfloat16()
    with torch.no_grad():
        for model in (ours, theirs):  # as fla's own models keep them
            for parameter_name, parameter in model.named_parameters():
                if parameter_name.endswith(("A_log", "dt_bias")):
                    parameter.data = parameter.float()
    assert distance(ours(x)[0], theirs(x)[0]) < 0.02
