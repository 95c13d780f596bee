"""The Hopper kernels on a Hopper GPU, forced: windows, documents, biases, soft cap, sinks and offsets."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from attention import AttentionConfig, KernelPath, Layout, Score, build_attention
from tests.attention.reference import (
    KEY,
    Case,
    assert_accurate,
    assert_far_tiles_are_never_read,
    assert_unseen_tiles_are_never_read,
    formula,
    gradients,
    gradients_with_slopes,
    make_loud,
)
from tests.equal import assert_equal
from tests.gpu.graphs import captured
from tests.gpu.needs import A_HOPPER_GPU, COMMON_SIZES, EACH_SIZE
from tests.gpu.test_flash import SCORES, alternating
from tests.gpu.test_hopper import DROPOUT, assert_repeats, flash, run

pytestmark = A_HOPPER_GPU


@pytest.mark.parametrize(
    ("score", "D", "dropout"), alternating([*SCORES.values(), {"T": 700, "sinks": True}], [64, 111, 128, 192]), ids=str
)
def test_error_of_changed_scores(score, D, dropout):
    """The log-sum-exp of capped scores is not judged: the hardware's tanh is off by up to 2^-11 of itself."""
    T = 300 if D == 111 and "documents" not in score else 512
    case = Case(**{"B": 2, "H": 4, "H_kv": 2, "T": T, "S": 512, "D": D, "dropout": dropout} | score)
    assert_accurate(flash(dropout), case, torch.bfloat16, "cuda", lse=case.soft_cap is None)


@EACH_SIZE
@pytest.mark.parametrize(
    ("score", "layout", "S"),
    [
        (Score(sinks=True), Layout(), 0),
        (Score(causal=False, sinks=True), Layout(), 0),
        (Score(window=33, sinks=True), Layout(q_start=900), 200),
        (Score(sinks=True), Layout(q_start=0, k_start=900), 200),
    ],
    ids=["no_keys", "no_keys_full", "behind_the_window", "before_the_keys"],
)
def test_where_no_row_sees_a_key_the_sink_is_all_there_is(score, layout, S, D):
    case = Case(2, 4, 2, 130, S, D, sinks=True)
    (q, k, v, do), sinks = case.tensors(torch.bfloat16, "cuda"), case.sink_logits("cuda")
    assert sinks is not None

    def attend(q, k, v, sinks, return_lse=False):
        return flash()(q, k, v, score=score, layout=layout, sinks=sinks, return_lse=return_lse)

    lse = attend(q, k, v, sinks, return_lse=True).lse
    assert lse is not None
    torch.testing.assert_close(lse, sinks[:, None].expand(2, 4, 130))
    assert not any(x.any() for x in gradients(attend, q, k, v, do, sinks=sinks).values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "score",
    [
        {"alibi": True},
        {"window": 1050, "alibi": True, "sinks": True},
        {"soft_cap": 2.0, "window": 700},
        {"soft_cap": 2.0, "alibi": True, "sinks": True},
    ],
    ids=str,
)
def test_error_of_changed_scores_of_long_sequences(score, dtype):
    assert_accurate(flash(), Case(1, 4, 2, 1100, 1187, 128, **score), dtype, "cuda")


@EACH_SIZE
def test_weights_of_capped_scores_stay_in_range(D):
    """Capped scores need no running maximum: their weights lie between 2^-72 and 2^88, which is in range."""
    case = Case(2, 2, 2, 300, 300, D, spread=1e4, soft_cap=10.0)  # scores of 10, -10, and very few between
    q, k, v, do = case.tensors(torch.bfloat16, "cuda")
    out = run(partial(flash(), score=case.score), q, k, v, do)[0]
    exact, plain = formula(q.double(), k.double(), v.double(), case=case), formula(q, k, v, case=case)
    assert (out - exact).abs().max() <= 2 * (plain - exact).abs().max()

    q = torch.full_like(q, 300.0)
    k = torch.where(torch.arange(300, device="cuda")[:, None] < 100, 1.0, -1.0).expand_as(k).to(k)
    out, *found = run(partial(flash(), score=Score(soft_cap=50.0)), q, k, v, do)
    seen = torch.arange(1, 301, device="cuda").clamp(max=100)[:, None]
    expected = v.float().cumsum(2)[:, :, seen[:, 0] - 1] / seen  # the mean of the first hundred that a query sees
    torch.testing.assert_close(out.float(), expected, rtol=1e-2, atol=1e-2)
    assert all(x.isfinite().all() for x in found)


@pytest.mark.parametrize("D", [128, 256])
@pytest.mark.parametrize("score", ["soft_cap", "alibi", "everything"])
def test_error_of_changed_scores_in_fp16(score, D):
    assert_accurate(flash(0.17), Case(1, 4, 2, 200, 512, D, dropout=0.17, **SCORES[score]), torch.float16, "cuda")


@pytest.mark.parametrize(("window", "D"), [(1, 64), (65, 64), (129, 64), (64, 128), (128, 128), (64, 256), (129, 256)])
def test_windows_that_end_at_the_edge_of_a_tile(window, D):
    for T in (129, 256, 400):
        assert_accurate(flash(), Case(1, 2, 1, T, 400, D, window=window), torch.bfloat16, "cuda")


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("lengths", [(128, 256, 64, 64), (127, 1, 129, 255), (1, 511), (64, 63, 65, 192, 128), (512,)])
def test_documents_that_end_at_the_edge_of_a_tile(lengths, causal):
    for D, T in ((64, 512), (128, 512), (128, 333), (256, 333)):
        assert_accurate(flash(), Case(2, 2, 2, T, 512, D, causal=causal, documents=lengths), torch.bfloat16, "cuda")


@EACH_SIZE
@pytest.mark.parametrize(
    "case",
    [
        Case(1, 1, 1, 640, 640, 64, window=40),
        Case(1, 1, 1, 512, 640, 64, window=40),
        Case(1, 1, 1, 640, 640, 64, documents=(128, 384, 128)),
        Case(1, 1, 1, 640, 640, 64, causal=False, documents=(128, 384, 128)),
    ],
    ids=lambda c: f"{c.T}-{c.window}-{c.documents}-{c.causal}",
)
def test_tiles_in_which_nothing_is_seen_are_never_read(case, D):
    rows = {"out": 64, "dq": 128 if D == 64 else 64}
    assert_unseen_tiles_are_never_read(flash(), replace(case, D=D), torch.bfloat16, "cuda", rows, 128)


@pytest.mark.parametrize("score", [Score(), Score(causal=False), Score(window=33)], ids=str)
@pytest.mark.parametrize(("D", "T", "S"), [(64, 200, 300), (128, 330, 140), (256, 200, 300)])
def test_queries_and_keys_that_stand_anywhere(score, D, T, S):
    for offsets in ((64, 0), (0, 64), (100, 20), (10, 100), (200, 0), (0, 0), (900, 0), (0, 900)):
        layout = Layout(*offsets)
        tensors = Case(1, 4, 2, T, S, D).tensors(torch.bfloat16, "cuda")
        results = [
            gradients(partial(build_attention(config), score=score, layout=layout), *(x.to(dtype) for x in tensors))
            for config, dtype in ((HOPPER, torch.bfloat16), (PLAIN, torch.bfloat16), (NAIVE, torch.float64))
        ]
        for name, exact in results[2].items():
            hopper, plain = ((result[name] - exact).abs().max() for result in results[:2])
            assert hopper <= 2 * plain + 1e-6, (name, offsets)


RAGGED = {"documents": (900, 1, 300, 550, 249)}  # in another order in each row


@pytest.mark.parametrize(
    ("changed", "D", "dropout"),
    alternating([RAGGED, SCORES["everything"] | RAGGED | {"window": 700}], [64, 128, 256]),
    ids=str,
)
def test_five_hundred_repeats_of_a_ragged_batch_are_bitwise_equal(changed, D, dropout):
    case = Case(3, 4, 2, 2000, 2000, D, **changed)
    tensors, sinks, layout = case.tensors(torch.bfloat16, "cuda"), case.sink_logits("cuda"), case.layout("cuda")

    def attend(q, k, v, sinks=None):
        return flash(dropout)(q, k, v, score=case.score, layout=layout, sinks=sinks, dropout_key=KEY)

    assert_repeats(lambda: gradients(attend, *tensors, sinks=sinks).values())


# At head size 64 and normal q and k, the horizons of these slopes are about 20, 150, 600, 3,000 and 15,000 keys.
SLOPES = (8.0, 1.0, 0.25, 0.05, 0.01, 0.0)
FAR = Case(1, 6, 6, 2500, 2500, 64, alibi=True)
FAR_CASES = {
    "alone": FAR,
    "grouped": replace(FAR, B=2, H_kv=2),
    "more_keys": replace(FAR, H_kv=3, T=1000),
    "more_queries": replace(FAR, H_kv=3, S=1100),
    "large_scores": replace(FAR, spread=20.0),
    "soft_cap": replace(FAR, H_kv=2, soft_cap=2.0, sinks=True),
    "documents": replace(FAR, B=2, H_kv=2, window=1800, documents=(2000, 1, 499)),
    "sinks_dropout": replace(FAR, H_kv=2, sinks=True, dropout=0.17),
}
HOPPER, PLAIN = (AttentionConfig("flash", path=path) for path in (KernelPath.hopper, KernelPath.plain))
NAIVE = AttentionConfig("naive")


run_far = partial(gradients_with_slopes, slopes=SLOPES)


@COMMON_SIZES
@pytest.mark.parametrize("case", FAR_CASES.values(), ids=FAR_CASES)
def test_keys_beyond_alibis_horizon_add_nothing(case, D, horizons):
    case = replace(case, D=D)
    tensors = case.tensors(torch.bfloat16, "cuda")
    got = run_far(case, HOPPER, tensors)
    horizons(False)
    plain, exact = (
        run_far(case, PLAIN, tensors),
        run_far(case, NAIVE, tuple(x.double() for x in tensors)),
    )
    assert_equal(run_far(case, HOPPER, tensors), got)
    for name in exact:
        hopper, other = ((result[name] - exact[name]).abs().max() for result in (got, plain))
        # The sinks' gradient is a sum over all rows, in which errors may cancel by chance.
        assert hopper <= 2 * other + (0.01 * exact[name].abs().max() if name == "dsinks" else 1e-6), name


@COMMON_SIZES
@pytest.mark.parametrize("path", [KernelPath.hopper, KernelPath.plain])
def test_tiles_beyond_alibis_horizon_are_never_read(path, D, horizons):
    case, config = replace(FAR, D=D, T=2560, S=2560), AttentionConfig("flash", path=path)
    tensors, far = case.tensors(torch.bfloat16, "cuda"), [slope >= 0.2 for slope in SLOPES]
    assert_far_tiles_are_never_read(partial(run_far, case, config), tensors, 128, far)


@COMMON_SIZES
@pytest.mark.parametrize("loud", ["key", "query"])
def test_alibis_horizon_reaches_a_key_whose_score_outweighs_its_bias(loud, D, horizons):
    """One of a row's scores is 10,000, at a distance at which all others of its head have no weight."""
    case, slopes = replace(FAR, D=D), (1.0, 0.7, 0.25, 0.05, 0.01, 0.0)
    q, k, v, do = case.tensors(torch.bfloat16, "cuda")
    make_loud(q, k, 2400, loud)
    got = run_far(case, HOPPER, (q, k, v, do), slopes=slopes)
    torch.testing.assert_close(got["out"][:, :, 2400], v[:, :, 3].double())
    horizons(False)
    assert_equal(run_far(case, HOPPER, (q, k, v, do), slopes=slopes), got)


@DROPOUT
@COMMON_SIZES
def test_five_hundred_repeats_with_horizons_are_bitwise_equal(D, dropout, horizons):
    case = replace(FAR, B=2, H_kv=3, D=D, dropout=dropout)
    tensors = case.tensors(torch.bfloat16, "cuda")
    assert_repeats(lambda: run_far(case, HOPPER, tensors).values())


@EACH_SIZE
def test_a_graph_replayed_with_other_keys_finds_their_horizons(D, horizons):
    q, k, v, do = replace(FAR, D=D).tensors(torch.bfloat16, "cuda")
    slopes = torch.tensor(SLOPES, device="cuda")
    original = k.clone()
    q, k, v = (x.requires_grad_() for x in (q, k, v))

    def forward_backward():
        out = flash()(q, k, v, score=FAR.score, slopes=slopes).out
        return [out, *torch.autograd.grad(out, (q, k, v), do)]

    graph, results = captured(forward_backward)
    for factor in (1.0, 20.0, 0.1):
        with torch.no_grad():
            k.copy_(original * factor)
        graph.replay()
        assert_equal(results, forward_backward())
