"""Scores by formula: the language and its refusals, derivatives, and the implementations in torch."""

import mmap
import random
import time
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from attention import AttentionConfig, Cache, Layout, Score, UnsupportedAttention, build_attention
from attention.check.run import interpreting
from attention.errors import FormulaError
from attention.flash.formula import written
from attention.formula import tanh, where
from attention.formula.describe import idle
from attention.formula.parse import parse, show
from attention.formula.trace import trace
from tests.attention.formulas import FORMULAS, KINDS, assert_right, draw
from tests.attention.operators import Calls, check_calls, compiled
from tests.attention.reference import build

OURS = pytest.mark.parametrize("name", ["naive", "tiled", "flash"])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ["naive", "tiled", "flex"])
def test_a_formula_gives_what_python_gives_of_its_text_with_all_gradients(name):
    """flex has no dropout, takes no sinks beside a formula, and has no gradients on a CPU."""
    rng, options = random.Random(name), AttentionConfig(name)
    if name == "tiled":
        options = replace(options, block_q=32, block_k=32)
    for number, text in list(enumerate(FORMULAS))[:: 5 if name == "flex" else 1]:
        problem = draw(rng, text, KINDS[number % len(KINDS)], longest=33)
        if name == "flex":
            problem = replace(problem, dropout=0.0, sinks=None, score=replace(problem.score, sinks=False))
        assert_right(problem, build_attention(replace(options, dropout=problem.dropout)), backward=name != "flex")


@pytest.mark.parametrize("text", ["s + bias[h, i, j]", "tanh(s) * bias[h, i, j]"])
def test_the_kernels_read_a_tensor_of_more_than_2_to_the_31_numbers(text):
    """Heads lie so far apart in memory that is reserved and mostly never touched."""
    H, T, step = 12, 17, 2**31 // 10
    no_reserve = 0x4000  # MAP_NORESERVE of Linux, which mmap does not name
    memory = mmap.mmap(-1, 4 * (H - 1) * step + 4 * T * T, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    bias = torch.frombuffer(memory, dtype=torch.float32).as_strided((H, T, T), (step, T, 1))
    bias.copy_(torch.randn(H, T, T, generator=torch.Generator().manual_seed(0)))
    q, k, v = torch.randn(3, 1, H, T, 16, generator=torch.Generator().manual_seed(1))
    naive, flash = (
        build(name)(q, k, v, score=Score(formula=text), tensors={"bias": bias}).out for name in ("naive", "flash")
    )
    assert_close(flash, naive, rtol=1e-5, atol=1e-5)


def test_the_kernels_give_what_python_gives_of_a_formulas_text_with_all_gradients():
    """One formula for each way in which its values are stored and their gradients are summed."""
    rng = random.Random(0)
    kinds = [
        ("s + c[h, i] - c[h, j]", "documents"),
        ("a[h] * s", "more keys"),
        ("s + g[h, j] * tanh(s) + row[h, i]", "documents"),
        ("s + bias[h, min(abs(i - j), 31)]", "full"),
        ("s + bias[h, min(abs(i - j), 31)]", "more keys"),
        ("s - slope[h] * (i - j)", "more keys"),
        ("2 * tanh(s / 2) - slope[h] * (i - j)", "documents"),
        ("s + grid[max(i // 7 - j // 7, -40) + 40, h]", "more queries"),
        ("s + x[b, h, i] * y[b, h, j]", "offset"),
        ("s + pair[h, i, j]", "window"),
        ("s * sqrt(i + 1) - log(i - j + 1) * d[h]", "square"),
        ("s * log(n)", "square"),
    ]
    for text, kind in kinds:
        problem = draw(rng, text, kind, longest=33)
        assert_right(problem, build("flash", dropout=problem.dropout))


def test_the_kernels_recognise_a_soft_cap_and_alibi():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 40, 16)
    attend, slopes = build("flash"), torch.tensor([0.25, 0.5])
    by_option = attend(q, k, v, score=Score(soft_cap=2.0, alibi=True), slopes=slopes).out
    by_formula = attend(q, k, v, score=Score(formula="2 * tanh(s / 2) - m[h] * (i - j)"), m=slopes).out
    assert torch.equal(by_formula, by_option)
    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    score = Score(formula="2 * tanh(s / 2) - m[h] * (i - j)")
    assert torch.equal(compiled(q, k, v, score=score, m=slopes).out, by_option)


def test_the_log_sum_exp_counts_what_is_the_same_along_a_row():
    problem = replace(draw(random.Random(5), "s + c[h, i] - c[h, j]", "square", longest=33), dropout=0.0)
    for name in ("naive", "tiled", "flash"):
        attend = build(name)
        lse = attend(
            problem.q,
            problem.k,
            problem.v,
            score=problem.score,
            sinks=problem.sinks,
            tensors=problem.tensors,
            return_lse=True,
        ).lse
        doubles = (x.double() for x in (problem.q, problem.k, problem.v))
        expected = problem.evaluated(*doubles, **{name: x.double() for name, x in problem.learned().items()})["lse"]
        assert_close(lse, expected.float(), rtol=1e-5, atol=1e-5)


@OURS
def test_the_gradient_of_a_slope_is_as_accurate_for_positions_far_into_a_text(name):
    """Rows of ds sum to zero only up to rounding: a sum of ds times i less one of ds times j would lose all digits."""
    problem = replace(draw(random.Random(0), "s - slope[h] * (i - j)", "square", longest=19), dropout=0.0)
    problem = replace(problem, first=10**6, layout=Layout(q_start=10**6, k_start=10**6))
    for dtype in (torch.float32, torch.bfloat16):
        with interpreting():
            assert_right(problem, build(name), dtype)


def test_two_formulas_of_one_shape_have_functions_of_different_names():
    """Triton's cache on disk knows a nested function by its name alone."""
    codes = [written(Score(formula=text)).code for text in ("s + sin(s)", "s + cos(s)")]
    assert len({code.value.__name__ for code in codes if code is not None}) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_formula_is_as_accurate_in_every_precision(dtype):
    rng = random.Random(1)
    for text in ("s * log(n + 1)", "s + bias[h, min(abs(i - j), 31)]", "s + g[h, j] * tanh(s) + row[h, i]"):
        problem = draw(rng, text, "square", longest=33)
        assert_right(problem, build("naive", dropout=problem.dropout), dtype)


LEARNED: dict[str, dict[str, tuple[str, ...]]] = {
    "s - slope[h] * (i - j)": {"slope": ("H",)},  # is ALiBi with learned slopes
    "s": {},  # with learned sinks
    "s - slope[h] * (i - j) + where(i - j < 99, 2 * x[i], c[h, j]) + w[h, min(i - j, 9)] * tanh(s)": {
        "slope": ("H",),
        "x": ("L",),
        "c": ("H", "L"),
        "w": ("H", "K"),
    },
    "(1 + 0.3 * x[h, i]) * s + max(y[j, i], 0.1 * z)": {"x": ("H", "L"), "y": ("L", "L"), "z": ()},
}


@pytest.mark.parametrize("name", ["tiled", "flash"])
@pytest.mark.parametrize(("text", "dropout"), [*((text, 0.0) for text in LEARNED), (list(LEARNED)[2], 0.25)])
def test_gradients_of_learned_tensors_from_16_bits_have_the_accuracy_of_fp32(text, dropout, name):
    """Their sums over a row nearly cancel; roundings of out and of the weights in it would leave an error of 1 %."""

    def tensors(B, H, L):
        sizes = {"H": H, "L": L, "K": 10}
        return {name: 0.2 * torch.randn([sizes[axis] for axis in axes]) for name, axes in LEARNED[text].items()}

    problem = draw(random.Random(4), text, "square", longest=33, tensors=tensors)
    sinks = torch.randn(problem.q.shape[1]) if text != "s - slope[h] * (i - j)" else None
    score = replace(problem.score, sinks=True) if text != "s" else Score(sinks=True)
    problem = replace(problem, dropout=dropout, sinks=sinks, score=replace(score, sinks=sinks is not None))
    exact = problem.results(torch.float64, torch.bfloat16)
    with interpreting():
        got = problem.computed(build(name, dropout=dropout), torch.bfloat16)
    for learned in (*(f"d{tensor}" for tensor in LEARNED[text]), *(["dsinks"] if sinks is not None else [])):
        assert_close(got[learned], exact[learned], rtol=1e-4, atol=1e-4)


def test_naive_rounds_no_factor_of_the_scores():
    """At head size 16 it does what `Problem.results` does: another rounding, of queries times factors, would show."""
    problem = draw(random.Random(3), "s * log(n + 1)", "square", longest=33, head_dim=16)
    want = problem.results(torch.bfloat16, torch.bfloat16)
    got = problem.computed(build("naive", dropout=problem.dropout), torch.bfloat16)
    for name, x in want.items():
        assert (got[name] - x).square().mean().sqrt() < 1e-4 * x.square().mean().sqrt(), name


@pytest.mark.parametrize("text", FORMULAS)
def test_a_formula_is_written_as_it_is_read(text):
    assert parse(show(parse(text))) is parse(text)


def test_a_function_is_the_formula_that_it_computes():
    def near(s, i, j, h, slope):
        distance = i - j
        return where(distance < 64, tanh(s), s - slope[h] * distance)

    assert parse(trace(near)) is parse("where(i - j < 64, tanh(s), s - slope[h] * (i - j))")
    assert Score(formula=near) == Score(formula=trace(near))
    with pytest.raises(FormulaError, match=r"cannot branch with if"):
        Score(formula=lambda s, i, j: s if i > j else 2 * s)
    with pytest.raises(FormulaError, match=r"Tensor, not Traced; its functions are those of attention\.formula"):
        Score(formula=lambda s: torch.tanh(s))


REFUSED = {
    "s + bias[h, i - j": r"the formula is not an expression:\n    s \+ bias\[h, i - j\n",
    "s + cosh(i)": r"has no function cosh; .*:\n    s \+ cosh\(i\)\n        \^\^\^\^$",
    "s.real": r"\^\^\^\^\^\^",
    "s + (lambda: 1)()": r"is made of",
    "s + 9 ** 9 ** 9": r"a whole exponent lies between",
    "((((s ** 8) ** 8 + s) ** 8 + s) ** 8 + s) ** 8": r"no finite value",
    "(" * 40 + "tanh(s)" + ") ** 8" * 40: r"^the formula or its derivative .* a constant is too large[^\n]*$",
    "(" * 40 + "s" + ") ** 8" * 40: r"a constant is too large",
    "i + j": r"does not depend on s",
    "i < j": r"is a comparison",
    "s - |i - j|": r"has no \|x\|; write abs\(x\)",
    "s + t[s]": r"an index of t must be a whole number",
    "s + t[i - j - 1]": r"reads t\[.*can be as low as -1; write max\(",
    "s - slope[h] * i + slope[h] * j": r"multiplies i and j by slope\[h\] apart; write slope\[h\] \* \(i - j\)\.",
    "tanh(s + j * slope[h] / 4 - slope[h] * (i + 2) / 4)": r"multiplies i and j by slope\[h\] apart",
    "s / (i - j)": r"no finite value for the query at position 0 and the key at 0",
    "s + q[i]": r"cannot call a tensor q",
    "s + b[h, i - j]": r"b is the number of the sequence; choose another name:\n    s \+ b\[h, i - j\]\n        \^$",
    "s + 1 / 0": r"divides by zero",
    "-".join(["s"] * 300): r"1 to 500 characters",
    "+".join(f"sin(s+{x})" for x in range(40)): r"take \d+ operations for each score, of which there may be 64",
}


@pytest.mark.parametrize(
    ("text", "sinks", "named"),
    [
        ("s + log(n)", False, ["log(n)"]),
        ("s - a[h] * i + c[h, j] - 2", False, ["-(a[h] * i)", "-2.0"]),
        ("s + c[h, i] - c[h, j]", False, []),
        ("s * log(n)", False, []),
        ("s + log(n)", True, []),
    ],
)
def test_a_summand_that_the_softmax_cancels_is_named(text, sinks, named):
    assert idle(text, sinks) == [f"{x} is the same for all keys of a query: it changes nothing" for x in named]


@pytest.mark.parametrize("text", REFUSED)
def test_mistakes_in_a_formula_are_refused_with_their_place(text):
    start = time.process_time()
    with pytest.raises(FormulaError, match=REFUSED[text]):
        Score(formula=text)
    assert time.process_time() - start < 2


def test_tensors_that_do_not_fit_are_refused():
    q, attend = torch.zeros(1, 2, 9, 8), build("naive")
    for text, given, complaint in (
        ("s + bias[h, min(i - j, 7)]", {}, r"needs the tensor bias \(head, table\)"),
        ("s + bias[h, min(i - j, 7)]", {"bias": torch.zeros(2, 7)}, r"reaches 7, and bias has 7 entries there"),
        ("s + bias[h, min(i - j, 7)]", {"bias": torch.zeros(3, 8)}, r"with 2 along head; got \(3, 8\)"),
        ("s + c[h, j]", {"c": torch.zeros(2, 8)}, r"index j reaches 8, and c has 8 entries"),
        ("s + c[h, j]", {"c": torch.zeros(2, 9, dtype=torch.int64)}, r"torch.int64"),
        ("s + c[h, j]", {"c": torch.zeros(4, 2, 9)}, r"with 1 along batch"),
    ):
        with pytest.raises(FormulaError, match=complaint):
            attend(q, q, q, score=Score(formula=text), tensors=given)


def test_a_formula_beside_an_option_that_it_replaces_is_refused():
    with pytest.raises(ValueError, match=r"formula=.* and alibi=True both change the score"):
        Score(formula="2 * s", alibi=True)
    q, attend = torch.zeros(1, 1, 3, 8), build("sdpa")
    with pytest.raises(UnsupportedAttention, match=r"sdpa.* does not support .*choose"):
        attend(q, q, q, score=Score(formula="s + 1 / (1 + i - j)"))


@OURS
@pytest.mark.parametrize("text", ["s * log(n + 1)", "s + c[h, i] - c[h, j]", "s + bias[h, min(abs(i - j), 31)]"])
def test_a_cache_gives_what_whole_sequences_give(name, text):
    torch.manual_seed(0)
    B, H, T, D = 2, 2, 20, 16
    q, k, v = torch.randn(3, B, H, T, D)
    tensors = {name: x[:1] if x.ndim == 3 else x for name, x in FORMULAS[text](B, H, T).items()}
    attend, score = build(name), Score(formula=text, window=13)
    lengths, last = torch.tensor([T, 9], dtype=torch.int32), q[:, :, -3:]
    got = attend.decode(last, Cache(k, v, lengths), score=score, tensors=tensors).out
    for b, length in enumerate(lengths.tolist()):
        keys, values = (x[b : b + 1, :, :length] for x in (k, v))
        assert_close(got[b : b + 1], attend(last[b : b + 1], keys, values, score=score, tensors=tensors).out)


@pytest.mark.slow
@OURS
def test_a_compiled_call_has_no_break_and_gives_the_same_by_operators_that_keep_torchs_rules(name):
    text = "s + bias[h, min(i - j, 7)] * s" if name == "naive" else "s + g[h, j] * tanh(s) + row[h, i]"
    problem = replace(draw(random.Random(3), text, "square", longest=33), dropout=0.0)
    calls = Calls()
    attend = build(name)
    want, got = (problem.computed(run, torch.float32) for run in (attend, compiled(attend, calls)))
    assert_close(got, want, rtol=1e-5, atol=1e-5)
    expected = {"sum_of_entries"} if name == "naive" else {f"{name}_forward", f"{name}_backward"}
    assert {str(operator.overloadpacket) for operator in calls} == {f"attention.{x}" for x in expected}
    check_calls(calls)
