"""The Triton kernels on a GPU: the full grid of shapes, and properties that only a GPU can show."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from attention import AttentionConfig, DropoutKey, KernelPath, Score, build_attention, documents, gpu
from tests.attention.reference import KEY, Case, assert_accurate, formula, gradients, results_of
from tests.equal import assert_equal
from tests.gpu.graphs import captured
from tests.gpu.needs import A_HOPPER_GPU, COMMON_SIZES, EACH_SIZE, TWO_GPUS

HEAD_SIZES = (16, 32, 40, 59, 64, 80, 111, 128, 192, 256)
LENGTHS = ((113, 203), (128, 217), (108, 256), (1023, 1024), (1, 239), (799, 3))
HEADS = ((4, 4), (4, 2), (3, 1))


EACH_PATH = pytest.mark.parametrize(
    "path", [KernelPath.plain, pytest.param(KernelPath.hopper, marks=A_HOPPER_GPU)], ids=str
)


# Nearly all of the time goes into compiling. Each pair of a head size, a kind of score, a mask and dropout is tested,
# but not each combination; rates of dropout and windows are few, because kernels are compiled for these numbers.
def alternating(first, second):
    """Each pair, with dropout in every second."""
    return [(x, y, 0.17 * ((n + m) % 2)) for n, x in enumerate(first) for m, y in enumerate(second)]


def flash(dropout=0.0, path=KernelPath.plain, **options):
    """The plain kernels, unless another path is named; tests/gpu/test_hopper.py tests the Hopper ones."""
    return build_attention(AttentionConfig("flash", dropout=dropout, path=path, **options))


def grid():
    """Every head size with every pair of lengths, swapped in half of the cases unless that leaves a single key; of
    causal or not and dropout or not, each head size with two combinations and each pair of lengths with all four.

    (With one key dP = delta, and in 16 bits their difference is nothing but the rounding of the output.)
    """
    cases = []
    for n, D in enumerate(HEAD_SIZES):
        for m, (T, S) in enumerate(LENGTHS):
            H, H_kv = HEADS[(n + m) % len(HEADS)]
            T, S = (S, T) if (n + m) % 2 and T > 1 else (T, S)
            drops = (n + m // 2) % 2
            causal = (drops + (n + 1) // 2) % 2 == 1
            cases.append(Case(2, H, H_kv, T, S, D, causal=causal, dropout=0.17 * drops))
    return cases


def name_of(case):
    return f"{case.H}:{case.H_kv}-{case.T}x{case.S}-{case.D}"


SOME_CASES = pytest.mark.parametrize("case", grid()[::7], ids=name_of)


@pytest.mark.parametrize("case", grid(), ids=name_of)
def test_error_in_bf16(case):
    assert_accurate(flash(case.dropout), case, torch.bfloat16, "cuda")


@SOME_CASES
def test_error_in_fp16(case):
    assert_accurate(flash(case.dropout), case, torch.float16, "cuda")


@pytest.mark.parametrize(
    ("T", "S", "D", "dropout"), [(150, 203, 64, 0.17), (203, 150, 111, 0.0), (150, 203, 256, 0.17), (150, 1, 64, 0.0)]
)
def test_error_in_fp32(T, S, D, dropout):
    assert_accurate(flash(dropout), Case(1, 4, 2, T, S, D, dropout=dropout), torch.float32, "cuda")


SCORES: dict[str, Any] = {
    "window": {"window": 100},
    "soft_cap": {"soft_cap": 3.0, "spread": 4.0},
    "alibi": {"alibi": True},
    "sinks": {"sinks": True},
    "documents": {"documents": (200, 1, 129, 70, 64, 48)},
    "documents_full": {"documents": (200, 1, 129, 70, 64, 48), "causal": False},
    "everything": {"window": 100, "soft_cap": 3.0, "alibi": True, "sinks": True, "documents": (212, 300)},
}


@pytest.mark.parametrize(("score", "D", "dropout"), alternating(SCORES, [64, 111, 128, 256]))
def test_error_of_changed_scores_in_bf16(score, D, dropout):
    T = 300 if D == 111 and "documents" not in SCORES[score] else 512
    assert_accurate(flash(dropout), Case(2, 4, 2, T, 512, D, dropout=dropout, **SCORES[score]), torch.bfloat16, "cuda")


@pytest.mark.parametrize("score", ["alibi", "everything"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_error_of_changed_scores_in_fp16_and_fp32(score, dtype):
    assert_accurate(flash(0.17), Case(1, 4, 2, 200, 512, 64, dropout=0.17, **SCORES[score]), dtype, "cuda")


@pytest.mark.parametrize("score", ["window", "everything"])
def test_changed_scores_are_right_through_pointers(score, monkeypatch):
    monkeypatch.setattr(gpu, "capability", lambda device: (8, 0))
    assert_accurate(flash(0.17), Case(2, 4, 2, 512, 512, 64, dropout=0.17, **SCORES[score]), torch.bfloat16, "cuda")


@EACH_PATH
def test_a_replayed_graph_follows_its_documents_and_draws_the_masks_of_its_key(path):
    q, k, v, do = Case(2, 2, 2, 300, 300, 64).tensors(torch.bfloat16, "cuda")
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    starts = torch.zeros(2, 300, dtype=torch.int32, device="cuda")
    step = torch.zeros((), dtype=torch.int64, device="cuda")
    attend = flash(0.17, path)

    def run(step):
        out = attend(q, k, v, layout=documents(starts), dropout_key=DropoutKey(1, step, 0, 0)).out
        return [out, *torch.autograd.grad(out, (q, k, v), do)]

    graph, results = captured(lambda: run(step))
    for n, bound in enumerate((128, 77, 250)):
        starts.zero_()[:, bound:] = bound
        step.fill_(n)
        graph.replay()
        assert_equal(results, run(n))


def test_tf32_is_used_where_asked_for_alone():
    tensors = Case(1, 2, 2, 256, 256, 64).tensors(torch.float32, "cuda")
    exact = gradients(formula, *(x.double() for x in tensors))
    for tf32, low, high in ((False, 0.0, 5e-6), (True, 5e-6, 1e-2)):
        got = gradients(flash(allow_tf32=tf32), *tensors)
        for name, x in exact.items():
            assert low < (got[name] - x).abs().max() / x.abs().max() < high, (tf32, name)


@SOME_CASES
def test_pointers_give_what_descriptors_give(case, monkeypatch):
    """GPUs older than Hopper use pointers, with other block sizes."""
    monkeypatch.setattr(gpu, "capability", lambda device: (8, 0))
    assert_accurate(flash(case.dropout), case, torch.bfloat16, "cuda")


@EACH_PATH
@EACH_SIZE
@pytest.mark.parametrize("T", [1, 2, 5, 17, 128])
def test_large_inputs_do_not_overflow(T, D, path):
    assert_accurate(flash(path=path), Case(2, 2, 2, T, T, D, spread=25.0), torch.bfloat16, "cuda")


@EACH_PATH
@pytest.mark.whole_gpu
@pytest.mark.parametrize("D", [64, 256])
def test_tensors_of_more_than_two_to_the_31_elements(D, path):
    B, H, T = 24, 32, 45056 * 64 // D
    assert B * H * T * D > 2**31
    tensors = [torch.randn(B, T, H, D, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(4)]
    *inputs, do = tensors
    leaves = [x.requires_grad_() for x in inputs]
    out = flash(path=path)(*leaves).out
    got = (out, *torch.autograd.grad(out, leaves, do))
    alone = gradients(flash(path=path), *(x[-1:, -1:].detach() for x in tensors))
    for x, expected in zip(got, alone.values(), strict=True):
        torch.testing.assert_close(x[-1:, -1:].double(), expected)


CHANGED: Any = SCORES["everything"] | {"documents": (1500, 500), "window": 700}


@pytest.mark.parametrize(
    "case",
    [
        Case(4, 4, 2, 1000, 1000, 64, dropout=0.17),
        Case(1, 4, 2, 4096, 4096, 128),
        Case(1, 4, 2, 16384, 16384, 64, dropout=0.17),
        Case(2, 4, 2, 2000, 2000, 64, **CHANGED),
        Case(2, 4, 2, 2000, 2000, 128, dropout=0.17, **CHANGED),
    ],
    ids=lambda case: f"{case.T}-{case.D}",
)
def test_hundreds_of_repeats_are_bitwise_equal(case):
    tensors, attend = case.tensors(torch.bfloat16, "cuda"), flash(case.dropout)
    first = results_of(attend, case, tensors)
    for _ in range(300):
        assert_equal(results_of(attend, case, tensors), first)


@EACH_PATH
def test_a_compiled_function_is_one_graph_for_every_step(path):
    q, k, v, do = Case(2, 2, 2, 200, 200, 64).tensors(torch.bfloat16, "cuda")
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    attend = flash(0.17, path)

    def loss(step):
        return attend(2 * q, k, v, dropout_key=DropoutKey(1, step, 0, 0)).out.mul(do).sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for n in (1, 2, 3):
            step = torch.tensor(n, device="cuda")
            got, expected = (torch.autograd.grad(f(step), (q, k, v)) for f in (compiled, loss))
            torch.testing.assert_close(got, expected)


def memory_of(attend, D):
    """The bytes that a call with 16,384 tokens of 2,048 channels and its backward pass allocate at most."""
    shape = (1, 2048 // D, 16384, D)
    q, k, v, do = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(4))
    torch.autograd.grad(attend(q, k, v).out, (q, k, v), do)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(attend(q, k, v).out, (q, k, v), do)
    return torch.cuda.max_memory_allocated() - before


@COMMON_SIZES
def test_memory_at_16k_tokens(D):
    """Output and gradients take 256 MiB; only two log-sum-exps and delta may be added."""
    assert memory_of(partial(flash(0.17), dropout_key=KEY), D) <= 270 * 2**20


@pytest.mark.whole_gpu
@EACH_PATH
def test_first_step_compiles_in_less_than_10_seconds(path, tmp_path):
    """Measured in a new process with an empty cache of compiled kernels, at the head size that takes longer."""
    script = f"""
import time, torch
from attention import AttentionConfig, DropoutKey, KernelPath, build_attention
q, k, v = (torch.randn(2, 4, 1024, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
torch.cuda.synchronize()
start = time.perf_counter()
attend = build_attention(AttentionConfig("flash", dropout=0.1, path={path}))
out = attend(q, k, v, dropout_key=DropoutKey(1, 2, 3, 4)).out
out.sum().backward()
torch.cuda.synchronize()
print(time.perf_counter() - start)
"""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 10


@EACH_PATH
def test_a_thread_whose_first_work_are_the_kernels_runs_them(path):
    """A thread has no CUDA context before its first launch, and memory that torch has at hand needs none."""
    q, k, v, do = torch.randn(4, 2, 4, 130, 64, device="cuda", dtype=torch.bfloat16)
    factors = {"a": torch.ones(4, device="cuda")}  # the first kernel of each pass then takes tensor descriptors
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def call():
        out = flash(path=path)(q, k, v, score=Score(formula="a[h] * s"), tensors=factors).out
        return out.detach(), *torch.autograd.grad(out, leaves, do)

    with ThreadPoolExecutor(max_workers=1) as first, ThreadPoolExecutor(max_workers=1) as second:
        results = [pool.submit(call).result() for pool in (first, second)]
    assert_equal(*results)


@EACH_PATH
@TWO_GPUS
def test_kernels_run_on_the_gpu_of_their_tensors(path):
    """Tensors on another GPU than the current one give the same results as on the current one."""
    attend, results = flash(0.17, path), []
    for device in ("cuda:0", "cuda:1"):
        generator = torch.Generator().manual_seed(0)
        fused = torch.randn(2, 200, 8, 64, generator=generator).bfloat16().to(device).requires_grad_()
        q, k, v = (x.transpose(1, 2) for x in fused.split([4, 2, 2], dim=2))
        out = attend(q, k, v, dropout_key=KEY).out
        (gradient,) = torch.autograd.grad(out.float().square().sum(), fused)
        assert out.device == gradient.device == torch.device(device)
        results.append((out.detach().cpu(), gradient.cpu()))
    assert torch.cuda.current_device() == 0
    assert_equal(*results)
