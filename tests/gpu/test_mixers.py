"""Mixers on a GPU: the kernels of flash-linear-attention against the definition in fp64, our layers against theirs."""

import pytest
import torch
from torch import Tensor
from triton.runtime.autotuner import Autotuner

from bench.mixers import first_configurations, packages_layer
from mixers import MixerError
from mixers.cases import Case
from mixers.check import RECURRENCES, judge, named
from mixers.layers import MIXERS, build_mixer

pytest.importorskip("fla.layers", reason="needs the package flash-linear-attention")
CUDA = torch.device("cuda")

COMMON = {name: name for name in ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")}
GATED = {"o_norm": "g_norm_swish_gate.weight", "g_proj.weight": "g_proj.weight"}
RATES = {
    "decay.A_log": "A_log",
    "decay.dt_bias": "dt_bias",
    "b_proj.weight": "b_proj.weight",
    "o_norm": "o_norm.weight",
}
# Our parameter -> theirs.
PARAMETERS: dict[str, dict[str, str]] = {
    "linear": COMMON | {"o_norm": "norm.weight"},
    "retnet": COMMON | GATED,
    "gla": COMMON | GATED | {f"decay.proj.{part}": f"gk_proj.{part}" for part in ("0.weight", "1.weight", "1.bias")},
    "deltanet": COMMON | {"b_proj.weight": "b_proj.weight", "o_norm": "o_norm.weight"},
    "gdn": COMMON | RATES | {"g_proj.weight": "g_proj.weight", "decay.proj.weight": "a_proj.weight"},
    "kda": COMMON
    | RATES
    | {f"g_proj.{part}": f"g_proj.{part}" for part in ("0.weight", "1.weight", "1.bias")}
    | {f"decay.proj.{part}": f"f_proj.{part}" for part in ("0.weight", "1.weight")},
    "mamba2": {"in_proj.weight": "in_proj.weight", "o_proj.weight": "out_proj.weight", "norm": "norm.weight"}
    | {name: name for name in ("A_log", "dt_bias", "D")},
}


@pytest.fixture(autouse=True, scope="module")
def no_tuning():
    """It would take minutes for each size of a head."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_bench", "check_disk_cache"):
            patch.setattr(Autotuner, name, vars(Autotuner)[name])  # so that it is put back
        first_configurations()
        yield


def distance(found, expected):
    """The norm of the difference, over that of what is expected."""
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def right(name):
    """The package's kernels, skipped where they refuse to run."""
    try:
        return named(f"fla-{name}", CUDA)
    except MixerError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", RECURRENCES)
def test_the_packages_kernels_compute_the_recurrence(name):
    """Two documents and the rest, in heads of 64: the check of all cases is `gpt-attention check fla-<name>`."""
    subject = right(name)
    assert judge(subject, Case("documents", subject.recurrence, (64, 64), (130, 1, 69), dtype="bf16"), CUDA).share <= 1


@pytest.mark.parametrize("name", MIXERS)
def test_a_layer_computes_what_the_packages_layer_computes(name):
    torch.manual_seed(0)
    C, H = 256, 4
    theirs = packages_layer(name, C, H).cuda()
    parameters: dict[str, Tensor] = dict(theirs.named_parameters())
    weights = {own: parameters[their] for own, their in PARAMETERS[name].items()}
    if name == "mamba2":
        weights |= {"conv.weight": parameters["conv1d.weight"][:, 0], "conv.bias": parameters["conv1d.bias"]}
    elif name in ("deltanet", "gdn", "kda"):
        convs = [parameters[f"{part}_conv1d.weight"].reshape(-1, 4) for part in "qkv"]
        weights["conv.weight"] = torch.cat(convs)
    x = torch.randn(2, 200, C, device="cuda", dtype=torch.bfloat16)
    for way in ("fla", "chunked"):
        ours = build_mixer(name, C, H, way).cuda()
        ours.load_state_dict({own: weight.detach() for own, weight in weights.items()})
        assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            assert distance(ours(x)[0], theirs(x)[0]) < 0.02


@pytest.mark.parametrize(("name", "documents"), [("retnet", False), ("gdn", False), ("kda", True), ("mamba2", True)])
def test_a_layers_gradients_are_those_of_plain_pytorch(name, documents):
    """With the package's kernels around the recurrence beside none of them."""
    torch.manual_seed(0)
    layers = {way: build_mixer(name, 256, 4, way).cuda() for way in ("fla", "chunked")}
    layers["chunked"].load_state_dict(layers["fla"].state_dict())
    x = torch.randn(2, 200, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    numbers = (torch.arange(400, device="cuda").view(2, 200) // 90) if documents else None
    results = []
    for layer in layers.values():
        try:
            with torch.autocast("cuda", torch.bfloat16):
                out, state = layer(x, numbers)
        except MixerError as error:
            pytest.skip(str(error))
        results.append([out, state.inputs, *torch.autograd.grad(out.float().square().sum(), [x, *layer.parameters()])])
    names = ["out", "inputs", "x", *dict(layers["fla"].named_parameters())]
    for label, found, expected in zip(names, *results, strict=True):
        assert found is expected is None or distance(found, expected) < 0.05, label
