"""The Hopper kernels on a Hopper GPU, forced: the grid of shapes, the mask, races and deadlocks."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from attention import AttentionConfig, AttentionOutput, KernelPath, Score, build_attention, keep_mask
from attention.flash.hopper.configs import forward_blocks
from tests.attention.operators import assert_operators_keep_torchs_rules
from tests.attention.reference import KEY, Case, assert_accurate, formula
from tests.equal import assert_equal
from tests.gpu.needs import A_HOPPER_GPU, EACH_SIZE
from tests.gpu.test_flash import memory_of, name_of

pytestmark = A_HOPPER_GPU

HEAD_SIZES = (40, 59, 64, 80, 96, 111, 128)
WIDE = (136, 192, 256)  # two backward kernels, with tiles of 64 keys
# Around the edges of one, two and three tiles of 64 queries, and of 128 keys; few queries; few keys.
LENGTHS = (
    (113, 203), (108, 256), (1023, 1024), (1, 239), (799, 3), (63, 64), (64, 65), (127, 129), (128, 128), (129, 127),
    (191, 193), (192, 255), (257, 257), (300, 5), (300, 1),
)  # fmt: skip

HEADS = ((4, 4), (4, 2), (3, 1))
# At head sizes above 64 and from 1,024 keys on, lse2 and delta come with the backward's products.
LONG = [Case(2, 4, 2, 1100, 1187, 111), Case(1, 3, 1, 1500, 1029, 128), Case(2, 2, 2, 65, 1024, 80)]
LONG_WIDE = Case(2, 4, 2, 1100, 1187, 256)
DROPOUT = pytest.mark.parametrize("dropout", [0.0, 0.17])
# Of head sizes and lengths, one for each forward kernel.
EACH_FORWARD_KERNEL = pytest.mark.parametrize(
    ("D", "length"), [(64, 512), (64, 1024), (64, 4096), (64, 32768), (128, 1024)]
)


def flash(dropout=0.0, path=KernelPath.hopper):
    return build_attention(AttentionConfig("flash", dropout=dropout, path=path))


def take_kernels_of(length, monkeypatch):
    """Calls of every length get the forward kernel of this one."""
    monkeypatch.setattr(
        "attention.flash.hopper.forward.forward_blocks",
        lambda x: forward_blocks(x._replace(queries=length, keys=length)),
    )


def grid(lengths=LENGTHS, head_sizes=HEAD_SIZES):
    """Each pair of lengths causal and full, of which one drops, with two head sizes and numbers of heads in turn."""
    cases = []
    for n, (T, S) in enumerate(lengths):
        for m in range(2):
            D, (H, H_kv) = head_sizes[(2 * n + m) % len(head_sizes)], HEADS[(n + m) % len(HEADS)]
            cases.append(Case(2, H, H_kv, T, S, D, causal=m == 0, dropout=0.17 * ((n + m) % 2)))
    return cases


def run(attend, q, k, v, do):
    """out, dq, dk, dv."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = attend(q, k, v).out
    return out.detach(), *torch.autograd.grad(out, (q, k, v), do)


def assert_repeats(results):
    """500 repeats, launched without a pause, in memory full of NaN and beside other work on the GPU, are equal."""
    first, other = tuple(results()), torch.cuda.Stream()
    x = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    differs = torch.zeros((), dtype=torch.bool, device="cuda")
    for n in range(500):
        if n % 3 == 0:
            with torch.cuda.stream(other):
                x @ x
        for a in first:  # freed at once, so that the kernels are given this memory
            torch.full_like(a, torch.nan, dtype=torch.bfloat16)
            torch.full_like(a, torch.nan, dtype=torch.float32)
            torch.full_like(a[..., 0], torch.nan, dtype=torch.float32)
        for a, b in zip(results(), first, strict=True):
            differs |= (a != b).any()
    assert not differs


@pytest.mark.parametrize("case", [*grid(), *grid(LENGTHS[::2], WIDE)], ids=name_of)
def test_errors_are_rounding(case):
    assert_accurate(flash(case.dropout), case, torch.bfloat16, "cuda", lse=True)


@DROPOUT
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("case", [*LONG, LONG_WIDE], ids=name_of)
def test_errors_of_long_sequences_are_rounding(case, causal, dropout):
    case = replace(case, causal=causal, dropout=dropout)
    assert_accurate(flash(dropout), case, torch.bfloat16, "cuda", lse=True)


@DROPOUT
@pytest.mark.parametrize("length", [1024, 4096, 32768])
def test_kernels_for_one_length_at_head_size_64_are_right_for_all(length, dropout, monkeypatch):
    take_kernels_of(length, monkeypatch)
    for T, S in ((1, 239), (64, 65), (191, 193), (300, 5), (799, 300), (1023, 1024)):
        assert_accurate(flash(dropout), Case(2, 4, 2, T, S, 64, dropout=dropout), torch.bfloat16, "cuda", lse=True)


@pytest.mark.parametrize("offset", [-300.0, 300.0])
@pytest.mark.parametrize("D", [64, 256])
def test_scores_may_be_far_from_zero(D, offset):
    assert_accurate(flash(), Case(1, 2, 2, 200, 200, D, offset=offset), torch.bfloat16, "cuda", lse=True)


@pytest.mark.parametrize(
    ("dtype", "dropout"), [(torch.bfloat16, 0.0), (torch.bfloat16, 0.17), (torch.float16, 0.0)], ids=str
)
@pytest.mark.parametrize(
    "score",
    [{}, {"causal": False}, {"sinks": True, "alibi": True}, {"window": 600}, {"documents": (471, 300, 30)}],
    ids=str,
)
@EACH_FORWARD_KERNEL
def test_maxima_that_grow_from_tile_to_tile(D, length, score, dtype, dropout, monkeypatch):
    """The walk over keys begins at the last. Each tile's scores are far above those before, some so far that their
    weights overflow with the maximum so far; and the first queries of a tile see no key of the last tile."""
    take_kernels_of(length, monkeypatch)
    case = Case(2, 4, 2, 790, 801, D, dropout=dropout, **score)
    q, k, v, _ = case.tensors(dtype, "cuda")
    k = (k * torch.linspace(40, 0.1, case.S, device="cuda")[:, None]).to(dtype)
    k[:, :, [100, 600]] *= 10
    keep = keep_mask(KEY, dropout, 2, 4, 790, 801, device="cuda") if dropout else None
    sinks = case.sink_logits("cuda")
    options = {"score": case.score, "layout": case.layout("cuda"), "sinks": sinks, "dropout_key": KEY}
    (out, lse), (_, plain_lse) = (
        flash(dropout, path)(q, k, v, **options, return_lse=True) for path in (KernelPath.hopper, KernelPath.plain)
    )
    sinks64 = None if sinks is None else sinks.double()
    rate = round(256 * dropout) / 256
    exact = formula(q.double(), k.double(), v.double(), sinks64, case=case, keep=keep, rate=rate)
    assert (out - exact).norm() < torch.finfo(dtype).eps / 2 * exact.norm()
    torch.testing.assert_close(lse, plain_lse, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("case", [*grid()[::5], LONG[0], replace(LONG_WIDE, dropout=0.17), LONG_WIDE], ids=name_of)
def test_error_in_fp16(case):
    assert_accurate(flash(case.dropout), case, torch.float16, "cuda")


@pytest.mark.parametrize(
    ("p", "D"),
    [(1 / 256, 64), (0.5, 64), (255 / 256, 64), (1 / 256, 128), (0.75, 128), (255 / 256, 128), (0.5, 256), (0.75, 256)],
)
def test_every_rate_drops_the_weights_of_keep_mask(p, D):
    q, k, _, _ = Case(1, 2, 2, D, D, D).tensors(torch.bfloat16, "cuda")
    unit = torch.eye(D, device="cuda", dtype=torch.bfloat16).expand(1, 2, D, D).contiguous()
    seen = torch.ones(D, D, device="cuda", dtype=torch.bool).tril()
    out, _, _, dv = run(partial(flash(p), dropout_key=KEY), q, k, unit, unit)
    kept = keep_mask(KEY, p, 1, 2, D, D, device="cuda") & seen
    assert torch.equal(out != 0, kept)
    assert torch.equal(dv != 0, kept.mT)


@pytest.mark.parametrize("scale", [0.0, -0.3, 0.3])
def test_scale_may_have_any_sign(scale):
    q, k, v, do = Case(1, 2, 2, 150, 150, 64).tensors(torch.bfloat16, "cuda")
    got = run(partial(flash(), scale=scale), q, k, v, do)
    exact = run(lambda q, k, v: AttentionOutput(formula(scale * 8 * q, k, v)), *(x.double() for x in (q, k, v, do)))
    for a, b in zip(got, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0.02, atol=0.02 * max(1.0, b.abs().max().item()))


def test_the_operator_keeps_torchs_rules():
    tensors = Case(2, 4, 2, 150, 150, 64).tensors(torch.bfloat16, "cuda")
    attend = partial(flash(0.1), dropout_key=KEY.pack(tensors[0].device))
    assert assert_operators_keep_torchs_rules(attend, *tensors) == ["flash_forward", "flash_backward"]


@pytest.mark.parametrize(("D", "T"), [(64, 300), (128, 300), (256, 300), (64, 16400)])
def test_the_mask_is_that_of_the_plain_kernels_also_in_the_backward(D, T):
    """With v and do made of unit vectors, out and dv are the kept weights of D keys or queries: zero where dropped."""
    q, k, _, _ = Case(1, 3, 3, T, T, D).tensors(torch.bfloat16, "cuda")
    seen = torch.ones(T, T, device="cuda", dtype=torch.bool).tril()
    for start in range(0, T, D * max(1, T // 1000)):
        part = slice(start, min(start + D, T))
        n = part.stop - start
        unit = torch.eye(T, D, device="cuda", dtype=torch.bfloat16).roll(start, 0).expand(1, 3, T, D).contiguous()
        columns, rows = (
            keep_mask(KEY, 0.17, 1, 3, T, T, **{cut: (start, part.stop)}, device="cuda") for cut in ("columns", "rows")
        )
        for path in (KernelPath.hopper, KernelPath.plain):
            out, _, _, dv = run(partial(flash(0.17, path), dropout_key=KEY), q, k, unit, unit)
            assert torch.equal(out[..., :n] != 0, columns & seen[:, part]), path
            assert torch.equal(dv[..., :n] != 0, (rows & seen[part]).mT), path


@DROPOUT
@pytest.mark.parametrize(
    "case",
    [
        Case(4, 6, 2, 1000, 1000, 64),
        Case(2, 4, 2, 2200, 2100, 64),
        Case(1, 3, 1, 16400, 16400, 64),
        Case(2, 4, 4, 2100, 1990, 128),
        Case(2, 4, 2, 2100, 1990, 256),
    ],
    ids=lambda c: f"{c.T}x{c.S}-{c.D}",
)
def test_five_hundred_repeats_are_bitwise_equal_beside_other_work(case, dropout):
    tensors = case.tensors(torch.bfloat16, "cuda")
    assert_repeats(lambda: run(partial(flash(dropout), dropout_key=KEY), *tensors))


@EACH_SIZE
def test_two_streams_at_once_do_not_share_counters(D):
    tensors = Case(2, 8, 8, 1500, 1500, D).tensors(torch.bfloat16, "cuda")
    first = run(flash(), *tensors)
    torch.cuda.synchronize()
    streams, results = (torch.cuda.Stream(), torch.cuda.Stream()), []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(run(flash(), *tensors))
    torch.cuda.synchronize()
    for result in results:
        assert_equal(result, first)


@EACH_SIZE
def test_long_sequences_use_the_whole_mask(D):
    """The last rows of 2 x 32768 x 32768 (2**31) scores, and all gradients compared with the plain kernels'."""
    T, rows, p = 32768, 48, 0.17
    q, k, v, do = Case(1, 2, 1, T, T, D).tensors(torch.bfloat16, "cuda")
    out, *gradients = run(partial(flash(p), dropout_key=KEY), q, k, v, do)
    keep = keep_mask(KEY, p, 1, 2, T, T, rows=(T - rows, T), device="cuda")
    expected = formula(q[:, :, -rows:].float(), k.float(), v.float(), keep=keep, rate=round(256 * p) / 256)
    torch.testing.assert_close(out[:, :, -rows:].float(), expected, rtol=2e-2, atol=2e-3)
    plain = run(partial(flash(p, KernelPath.plain), dropout_key=KEY), q, k, v, do)
    for a, b in zip((out, *gradients), plain, strict=True):
        assert (a.float() - b.float()).norm() < 1e-2 * b.float().norm()


@EACH_SIZE
def test_views_give_what_copies_give(D):
    """Views of one projection, and each tensor misaligned in turn: the same bits as from copies."""
    fused = torch.randn(2, 300, 8, D, device="cuda", dtype=torch.bfloat16)
    q, k, v = (x.transpose(1, 2) for x in fused.split([4, 2, 2], dim=2))
    do = torch.randn(2, 300, 4, D, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    copies = run(flash(), *(x.contiguous() for x in (q, k, v, do)))

    def shifted(x):
        return torch.empty(x.numel() + 1, device="cuda", dtype=x.dtype)[1:].view(x.shape).copy_(x)

    for moved in (None, 0, 1, 2, 3):
        views = (shifted(x) if n == moved else x for n, x in enumerate((q, k, v, do)))
        assert_equal(run(flash(), *views), copies, msg=f"with {moved} moved")


@EACH_SIZE
@pytest.mark.parametrize(("score", "dropout"), [(Score(), 0.17), (Score(alibi=True), 0.0)], ids=["dropout", "alibi"])
def test_memory_at_16k_tokens(score, dropout, D):
    """Output and gradients take 256 MiB, dq in fp32 another 128 MiB where one kernel computes all gradients, and a row
    at most six values: lse2, delta, and lse2 with ALiBi, or lse2 and both as operands of a product."""
    rows = 6 * 4 * 2048 // D * 16384
    attend = partial(flash(dropout), score=score, dropout_key=KEY)
    assert memory_of(attend, D) <= (256 + 128 * (D <= 128)) * 2**20 + rows
