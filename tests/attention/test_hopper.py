"""The Hopper path without a Hopper GPU: the kernels that calls run on."""

import math

import pytest
import torch

from attention import AttentionShape, KernelPath, Score, UnsupportedAttention
from attention.flash.call import Problem
from attention.flash.hopper.added import parts_kernel
from attention.flash.hopper.backward_pipeline import Counters, DeltaConstants, DeltaRows, delta_kernel
from attention.flash.hopper.configs import backward_blocks
from attention.flash.paths import choose_path, describe_path
from attention.flash.tiles import rows_like, tiles
from attention.spec import Spec
from tests.attention.reference import build
from tests.interpreter import INTERPRETED

PROBLEM = Problem(Spec(Score(), scale=1.0), 128, torch.bfloat16, 4096, 4096, capability=(9, 0))
EVERY_LENGTH = range(0, 2**16, 128)


def along(path: str, problem: Problem = PROBLEM, **other) -> Problem:
    """The problem with other properties, on a path of this name."""
    return problem._replace(spec=problem.spec._replace(path=path), **other)


def shape(dtype: torch.dtype = torch.bfloat16, head_dim: int = 128, **options) -> AttentionShape:
    return AttentionShape(head_dim, 4, 4, dtype, torch.device("cuda:0"), **options)


def flash(**options):
    return build("flash", path=KernelPath.hopper, **options)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"capability": (8, 0)}, r"needs a GPU of compute capability 9.0 \(Hopper\)"),
        ({"capability": (10, 0)}, r"needs a GPU of compute capability 9.0 \(Hopper\)"),
        ({"dtype": torch.float32}, "takes bf16 or fp16, not torch.float32"),
        ({"head_dim": 32}, "takes head sizes from 33 to 256, not 32"),
        ({"head_dim": 264}, "takes head sizes from 33 to 256, not 264"),
    ],
    ids=["Ampere", "Blackwell", "fp32", "narrow", "wide"],
)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_calls_that_the_hopper_kernels_lack_are_refused_on_path_hopper_and_go_to_plain_on_auto(
    other, reason, backward, hopper_gpu
):
    with pytest.raises(UnsupportedAttention, match=rf'path="hopper" {reason}.*choose path="auto"'):
        choose_path(along("hopper", **other), backward)
    assert {choose_path(along(path, **other), backward) for path in ("auto", "plain")} == {"plain"}


def test_a_path_that_does_not_support_a_layer_is_refused_when_the_model_is_built(hopper_gpu):
    every = Score(window=64, soft_cap=30.0, alibi=True, sinks=True)
    flash().check(shape(scores=(Score(), Score(causal=False), every), documents=True))
    with pytest.raises(UnsupportedAttention, match=r'path="hopper" takes bf16 or fp16, not torch.float32'):
        flash().check(shape(torch.float32))


@pytest.mark.parametrize(
    ("spec", "lacks"),
    [
        (Spec(Score(formula="s * log(n + 1)"), scale=1.0), "formulas"),
        (Spec(Score(alibi=True), scale=1.0, slopes=True), "learned slopes"),
    ],
)
def test_wide_heads_have_no_gradients_of_formulas_and_learned_slopes(spec, lacks, hopper_gpu):
    problem = PROBLEM._replace(head_dim=192, spec=spec)
    assert choose_path(along("hopper", problem), backward=False) == "hopper"
    assert choose_path(along("auto", problem), backward=True) == "plain"
    with pytest.raises(UnsupportedAttention, match=f"has no gradients of {lacks} at head sizes above 128"):
        choose_path(along("hopper", problem), backward=True)
    assert choose_path(along("hopper", problem, head_dim=128), backward=True) == "hopper"


def test_a_named_path_is_taken_in_both_directions_at_every_length(hopper_gpu):
    for path in ("plain", "hopper"):
        assert {describe_path(along(path, queries=n, keys=n)) for n in EVERY_LENGTH} == {path}


@pytest.mark.parametrize(
    "spec",
    [
        Spec(Score(), scale=1.0),
        Spec(Score(window=64), scale=1.0),
        Spec(Score(sinks=True), scale=1.0, documents=True),
        Spec(Score(alibi=True), scale=1.0),
        Spec(Score(soft_cap=50.0, window=64), scale=1.0),
    ],
    ids=["causal", "window", "documents_sinks", "alibi", "soft_cap_window"],
)
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 192])
@pytest.mark.parametrize("dropout", [False, True], ids=["exact", "dropout"])
def test_auto_changes_to_the_hopper_kernels_once_as_sequences_grow(head_dim, dropout, spec, hopper_gpu):
    problem = PROBLEM._replace(head_dim=head_dim, spec=spec._replace(threshold=26 * dropout))
    for backward in (False, True):
        chosen = [choose_path(problem._replace(queries=n, keys=n), backward) for n in EVERY_LENGTH]
        assert chosen == sorted(chosen, reverse=True)  # plain, then hopper


def test_the_paths_of_all_layers_are_named(hopper_gpu):
    attend = build("flash")
    assert attend.path(shape(), 4096) == "hopper"
    assert attend.path(shape(head_dim=64), 16384) == "hopper"
    assert attend.path(shape(head_dim=64, documents=True), 1024) == "hopper"
    assert attend.path(shape(head_dim=256), 4096) == "hopper"
    assert (
        attend.path(shape(head_dim=256, scores=(Score(formula="s * sigmoid(i - j)"),)), 4096)
        == "hopper forward, plain backward"
    )
    assert attend.path(shape(scores=(Score(window=64), Score())), 4096) == "hopper"
    layers = (Score(), Score(window=64))
    assert attend.path(shape(head_dim=128, scores=layers), 512) == "hopper and hopper forward, plain backward"


@INTERPRETED
@pytest.mark.parametrize(("in_products", "keys_biased"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("rows", "part"), [(64, 64), (128, 64)])
def test_rows_beyond_the_end_get_no_weight_however_steep_alibi_is(rows, part, in_products, keys_biased):
    """Their scores are zero, and the bias, relative to the part's first query, overflows exp2 at slopes above 1.5."""
    B, H, T, D = 2, 3, 150, 64
    torch.manual_seed(0)
    out, do = torch.randn(2, B, H, T, D)
    lse2 = rows_like(out)
    lse2.normal_()
    slopes = torch.tensor([0.5, 2.0, 3.0])
    n_m, scale_log2 = math.ceil(T / rows), 0.18
    stored = DeltaRows(torch.empty(B, H, n_m * rows), rows_like(out), None)
    if in_products:
        stored = DeltaRows(None, None, torch.empty(B * H * n_m * rows, 16 if keys_biased else 8, dtype=torch.bfloat16))
    counters = Counters(*(torch.ones(n, dtype=torch.int32) for n in (B * H * n_m, 1, 1)))
    blocks = backward_blocks(PROBLEM._replace(head_dim=D))._replace(q=rows, part=part)
    delta_kernel[(B * H * n_m,)](
        tiles(out, rows, D), tiles(do, rows, D), lse2, stored, counters, slopes, scale_log2, H, T, n_m,
        BLOCKS=blocks, CONSTANTS=DeltaConstants(0.9, keys_biased),
    )  # fmt: skip
    biased, delta = stored.lse2, stored.delta
    if in_products:  # in bf16, as sums of three parts each
        parts = stored.parts[:, :8].float().view(B, H, n_m * rows, 4, 2).sum(3)
        biased, delta = -parts[..., 0] * scale_log2, -parts[..., 1]
    if keys_biased:  # what the parts of the keys' bias are multiplied by
        assert torch.equal(stored.parts[:, 8:], torch.tensor([1.0, 0.0] * 4).bfloat16().expand(len(stored.parts), 8))
    torch.testing.assert_close(delta[..., :T], 0.9 * (out * do).sum(-1))
    bias = slopes[:, None] / math.log(2) * (torch.arange(T) % part)
    torch.testing.assert_close(biased[..., :T], lse2[..., :T] + bias)
    assert (biased[..., T:] > 1e20).all()
    assert not any(x.any() for x in counters)


@INTERPRETED
def test_a_keys_number_is_the_sum_of_its_parts_and_minus_infinity_stays():
    x = -torch.randn(2, 1, 150).exp().cumsum(-1)  # the same for all heads
    x[1, 0, 3] = -math.inf
    parts = torch.empty(2 * 3 * 256, 8, dtype=torch.bfloat16)
    parts_kernel[(2, 6)](x, parts, x.stride(0), 0, 0.125, 3, 150, ROWS=128)
    assert torch.equal(parts.float().sum(-1).view(2, 3, 256)[..., :150], (x / 0.125).expand(2, 3, 150))
    assert not parts.view(2, 3, 256, 8)[:, :, 150:].any()
