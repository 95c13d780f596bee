"""Windows, documents, ALiBi, soft caps and sinks in the Triton kernels, at small sizes, as in test_flash.py."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from attention import AttentionConfig, Layout, Score
from attention.flash.call import Problem
from attention.flash.formula import numbers_of_keys
from attention.flash.op import run_horizons
from attention.spec import Spec
from tests.attention.contract import SCORE_CASES
from tests.attention.operators import assert_operators_keep_torchs_rules
from tests.attention.reference import (
    KEY,
    Case,
    assert_accurate,
    assert_far_tiles_are_never_read,
    assert_unseen_tiles_are_never_read,
    build,
    gradients,
    gradients_with_slopes,
    make_loud,
)
from tests.attention.test_flash import DEVICE, flash, projected
from tests.equal import assert_equal

CAPPED: Any = {"soft_cap": 1.5, "dropout": 0.17}


@pytest.mark.parametrize(
    "case",
    [
        replace(SCORE_CASES["documents"], B=1, window=40, **CAPPED),
        Case(1, 2, 1, 100, 61, 24, documents=(21, 40), **CAPPED),
    ],
    ids=["window_documents", "more_queries"],
)
def test_one_maximum_for_all_tiles_is_as_accurate(case):
    """In fp32, because fp16 uses the running maximum."""
    assert_accurate(flash(0.17), case, torch.float32, DEVICE)


@pytest.mark.parametrize("soft_cap", [60.0, 61.0], ids=["one_maximum", "running_maximum"])
@pytest.mark.parametrize("n_low", [2, 70], ids=["in_the_first_tile", "after_it"])
def test_scores_at_the_soft_cap_neither_overflow_nor_vanish(n_low, soft_cap):
    """The first keys score -c, later ones c or -c: a row is the mean of its keys at c, or of all if it sees none."""
    T = 150
    high = torch.rand(T, generator=torch.Generator().manual_seed(0)) < 0.5
    high[:n_low], high[n_low] = False, True
    q = torch.full((1, 1, T, 16), 100.0, device=DEVICE)
    k = torch.where(high, 100.0, -100.0).to(DEVICE)[:, None].expand(1, 1, T, 16).contiguous()
    v = torch.randn(1, 1, T, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    out, lse = flash()(q, k, v, score=Score(soft_cap=soft_cap), return_lse=True)
    counts = torch.tril(high.double().expand(T, T))
    best = torch.where(high.cummax(0).values, soft_cap, -soft_cap).double()
    counts[:n_low] = torch.tril(torch.ones(T, T, dtype=torch.double))[:n_low]
    expected = (counts @ v[0, 0].double().cpu()) / counts.sum(1, keepdim=True)
    assert_close(out[0, 0].double().cpu(), expected, rtol=1e-5, atol=1e-5)
    assert_close(lse[0, 0].double().cpu(), best + counts.sum(1).log(), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("T", [64, 65, 129])
def test_windows_that_end_at_the_edge_of_a_tile(T):
    case = Case(1, 1, 1, T, T, 16)
    for window in (1, 63, 64, 65, T):
        assert_accurate(flash(), replace(case, window=window), torch.float16, DEVICE)


@pytest.mark.parametrize(
    "case",
    [
        Case(1, 1, 1, 128, 192, 16, window=40),
        Case(1, 1, 1, 192, 192, 16, documents=(64, 128)),
        Case(1, 1, 1, 192, 192, 16, causal=False, documents=(128, 64)),
    ],
    ids=lambda c: f"{c.T}-{c.window}-{c.documents}-{c.causal}",
)
def test_tiles_in_which_nothing_is_seen_are_never_read(case):
    assert_unseen_tiles_are_never_read(flash(), case, torch.float16, DEVICE, {"out": 64, "dq": 64}, 64)


@pytest.mark.parametrize("score", [Score(), Score(causal=False), Score(window=33), Score(alibi=True)], ids=str)
@pytest.mark.parametrize(("q_start", "k_start"), [(100, 20), (10, 100), (200, 0)])
def test_queries_and_keys_that_stand_anywhere(score, q_start, k_start, horizons):
    q, k, v, do = Case(1, 1, 1, 70, 80, 16).tensors(torch.float32, DEVICE)
    layout = Layout(q_start=q_start, k_start=k_start)
    got, expected = (
        gradients(lambda q, k, v, a=attend: a(q, k, v, score=score, layout=layout), *tensors)
        for attend, tensors in ((flash(), (q, k, v, do)), (build("naive"), [x.double() for x in (q, k, v, do)]))
    )
    assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_operator_keeps_torchs_rules_with_all_its_tensors():
    q, k, v = projected(torch.randn(1, 40, 4, 16, device=DEVICE), 1, 40)
    starts = torch.zeros(1, 40, dtype=torch.int32, device=DEVICE)
    attend = partial(
        flash(dropout=0.1),
        score=Score(window=30, soft_cap=2.0, alibi=True, sinks=True),
        layout=Layout(q_start=0, document_starts=starts, document_ends=starts + 40),
        slopes=torch.tensor([0.5, 0.25], device=DEVICE),
        dropout_key=KEY.pack(torch.device(DEVICE)),
    )
    sinks = torch.tensor([0.5, -0.5], device=DEVICE)
    assert assert_operators_keep_torchs_rules(attend, q, k, v, q, sinks=sinks) == ["flash_forward", "flash_backward"]


# Of these slopes the first leaves a query nothing but its neighbours, and the last two have no horizon.
SLOPES = (40.0, 4.0, 0.02, -0.01)
FAR = Case(1, 4, 4, 192, 192, 16, alibi=True)
THREE_TILES = replace(FAR, H_kv=2, T=140, S=140)
FAR_CASES = {
    "more_queries_dropout_soft_cap_sinks": replace(THREE_TILES, S=100, dropout=0.17, soft_cap=2.0, sinks=True),
    "more_keys_window_documents_large_scores": replace(
        THREE_TILES, B=2, H=2, H_kv=2, T=70, window=100, documents=(115, 25), spread=20.0
    ),
}


def run_far(case: Case, tensors: tuple[Tensor, ...], name: str = "flash") -> dict[str, Tensor]:
    return gradients_with_slopes(case, AttentionConfig(name), tensors, SLOPES[: case.H])


@pytest.mark.parametrize("loud", ["key", "query"])
def test_alibis_horizon_reaches_a_key_whose_score_outweighs_its_bias(loud, horizons):
    """One of a row's scores is 10,000, at a distance at which all others have no weight; of two sequences, in one."""
    case = replace(FAR, B=2, H=2, H_kv=2)
    q, k, v, do = case.tensors(torch.float32, DEVICE)
    make_loud(q[1:], k[1:], 190, loud)
    found, exact = run_far(case, (q, k, v, do)), run_far(case, tuple(x.double() for x in (q, k, v, do)), "naive")
    assert_close(found["out"][1, :, 190], v[1, :, 3].double(), rtol=0, atol=1e-5)
    for name, x in exact.items():
        assert_close(found[name], x, rtol=1e-3, atol=1e-3 * x.abs().max().item())


def test_a_horizon_follows_the_largest_norm_of_many_rows():
    """Head size 256 has a tile of norms for 64 rows, and more tiles here than are compared at a time."""
    q = torch.ones(1, 1, 4, 256, device=DEVICE)
    k = torch.ones(1, 1, 16_584, 256, device=DEVICE)
    slopes = torch.ones(1, device=DEVICE)
    spec = Spec(Score(alibi=True), scale=1 / 16).text()
    quiet = run_horizons(q, k, slopes, spec)
    k[:, :, 16_500] *= 2
    # Twice the largest score: from 2 x 16 to 2 x 32 in units of the slope, with 2 % of slack.
    assert 32 <= (run_horizons(q, k, slopes, spec) - quiet).item() <= 34


@pytest.mark.parametrize(
    ("T", "S", "given", "expected"),
    [
        (2048, 2048, {}, True),
        (2047, 4096, {}, False),
        (4096, 2047, {}, False),
        (4096, 4096, {"window": 2048}, True),
        (4096, 4096, {"window": 2047}, False),
        (4096, 4096, {"offsets": True}, False),
    ],
)
def test_long_calls_have_horizons(T, S, given, expected):
    window, offsets = given.get("window"), given.get("offsets", False)
    spec = Spec(Score(window=window), scale=1.0, offsets=offsets)
    assert Problem(spec, 64, torch.bfloat16, T, S, (9, 0)).has_horizons is expected
    spec = Spec(Score(causal=False), scale=1.0, offsets=offsets)
    assert not Problem(spec, 64, torch.bfloat16, T, S, (9, 0)).has_horizons


@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_not_finite_leave_no_horizon(bad, soft_cap):
    q, k, _, _ = replace(FAR, B=2, H_kv=2).tensors(torch.float32, DEVICE)
    q[0, 0, 150, 3] = k[1, 1, 20, 5] = bad
    spec = Spec(Score(alibi=True, soft_cap=soft_cap), scale=0.25)
    found = run_horizons(q, k, torch.full((4,), 2.0, device=DEVICE), spec.text())
    unlimited = found == 2**30
    assert unlimited[0].tolist() == [True] + 3 * [False]
    assert unlimited[1].tolist() == 2 * [False] + 2 * [True]


def test_horizons_compile_with_the_call(horizons):
    case = Case(1, 2, 2, 70, 70, 16, alibi=True)
    attend = partial(flash(), score=case.score, slopes=torch.tensor(SLOPES[:2], device=DEVICE))
    names = assert_operators_keep_torchs_rules(attend, *case.tensors(torch.float32, DEVICE))
    assert names == ["flash_horizons", "flash_forward", "flash_backward"]


def forgetting(S: int) -> Tensor:
    """(4, S): sums of logarithms of gates. The first head forgets all but a token's neighbours, the third nothing,
    and the values of the last are not such sums, because they also rise."""
    rates = torch.tensor([40.0, 4.0, 0.0, 0.0])[:, None]
    c = -rates * (0.5 + torch.rand(4, S, generator=torch.Generator().manual_seed(0))).cumsum(-1)
    c[3] = 400 * torch.sin(torch.arange(S) / 40.0)
    return c.to(DEVICE)


def forget(case: Case, tensors: tuple[Tensor, ...], name: str = "flash") -> dict[str, Tensor]:
    """out and the gradients of attention with forget gates and factors of s, of q, k, v and dout."""
    given = (*tensors[:3], torch.linspace(0.5, 2, 4), forgetting(case.S))
    q, k, v, a, c = (x.to(tensors[0], copy=True).requires_grad_() for x in given)
    score = Score(formula="s * a[h] + c[h, i] - c[h, j]", window=case.window)
    attend = build(name, dropout=case.dropout)
    out = attend(q, k, v, score=score, layout=case.layout(DEVICE), dropout_key=KEY, tensors={"a": a, "c": c}).out
    gradients = torch.autograd.grad(out, (q, k, v, a, c), tensors[3])
    return {"out": out, **dict(zip(("dq", "dk", "dv", "da", "dc"), gradients, strict=True))}


GATED = Case(1, 4, 4, 192, 192, 16)


FORGOTTEN = replace(GATED, H_kv=2, T=70, S=140, dropout=0.17, window=120, documents=(110, 30))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "case"), [*((run_far, case) for case in FAR_CASES.values()), (forget, FORGOTTEN)], ids=[*FAR_CASES, "gates"]
)
def test_keys_beyond_a_horizon_add_nothing(run, case, horizons):
    tensors = case.tensors(torch.float32, DEVICE)
    got, exact = run(case, tensors), run(case, tuple(x.double() for x in tensors), "naive")
    horizons(False)
    atol = 1e-4 if run is forget else 1e-5 * case.spread
    assert_equal(run(case, tensors), got)
    assert_close(got, exact, rtol=1e-4, atol=atol, check_dtype=False)


@pytest.mark.parametrize(
    ("run", "case", "far"),
    [(run_far, FAR, [slope >= 4 for slope in SLOPES]), (forget, GATED, [True, True, False, False])],
    ids=["alibi", "gates"],
)
def test_tiles_beyond_a_horizon_are_never_read(run, case, far, horizons):
    assert_far_tiles_are_never_read(partial(run, case), case.tensors(torch.float32, DEVICE), 64, far)


def test_tiles_that_gates_in_two_parts_forget_are_never_read(horizons):
    """As above, for a sum that is kept as multiples of 16 and the rest."""
    q, k, v, _ = GATED.tensors(torch.float32, DEVICE)
    c = forgetting(GATED.S)
    steps = (c / 16).round() * 16
    a = torch.linspace(0.5, 2, 4).to(DEVICE)
    parts = {"a": a, "c": (c - steps).requires_grad_(), "d": steps}
    score = Score(formula="s * a[h] + c[h, i] - c[h, j] + max(d[h, i] - d[h, j], -1e9)")
    whole = {"a": a, "c": c.clone().requires_grad_()}
    attend, naive = (build(name) for name in ("flash", "naive"))
    out = attend(q, k, v, score=score, tensors=parts).out
    expected = naive(q, k, v, score=Score(formula="s * a[h] + c[h, i] - c[h, j]"), tensors=whole).out
    assert_close(out, expected, rtol=1e-4, atol=1e-4)
    (found,), (right,) = (torch.autograd.grad(x.sum(), y["c"]) for x, y in ((out, parts), (expected, whole)))
    assert_close(found, right, rtol=1e-4, atol=1e-4)
    v[:, :, :64] = math.nan
    far = attend(q, k, v, score=score, tensors=parts).out[:, :, -64:]
    assert far.isnan().any(-1).any(-1)[0].tolist() == [False, False, True, True]
    bounded = replace(score, formula=str(score.formula).replace("-1e9", "-5"))  # no difference of numbers any more
    assert len(numbers_of_keys(*score.values)) == 2
    assert numbers_of_keys(*bounded.values) == ()
