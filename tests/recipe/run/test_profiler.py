"""Where a step's time goes: by hand-made traces of a GPU, and by a recording of a real step on the CPU."""

import gzip
import json
from typing import Any

import pytest
import torch

from model.options import GPTConfig
from recipe.run.profiler import (
    CATEGORIES,
    Profiler,
    summarise,
)
from tests.parts import built
from tests.programs import started

CPU = torch.device("cpu")


class Trace:
    """Builds the events of a trace: host events on a thread, and kernels that refer to their launches."""

    def __init__(self, duration: float) -> None:
        self.events: list[dict[str, Any]] = []
        self.host("profiled steps", 0.0, duration, cat="user_annotation")

    def host(self, name: str, ts: float, dur: float, tid: int = 1, cat: str = "cpu_op", **args: int) -> None:
        self.events.append({"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args})

    def launch(self, kernel: str, at: float, ts: float, dur: float, tid: int = 1, cat: str = "kernel") -> None:
        """A launch on the host at `at`, whose kernel runs on the device from `ts`."""
        correlation = len(self.events)
        self.host("cudaLaunchKernel", at, 0.5, tid, "cuda_runtime", correlation=correlation)
        self.host(kernel, ts, dur, 7, cat, correlation=correlation)

    def backward_of(self, forward: tuple[int, float], backward: tuple[int, float]) -> None:
        n = len(self.events)
        for phase, (tid, ts) in (("s", forward), ("f", backward)):
            self.events.append({"ph": phase, "cat": "fwdbwd", "name": "fwdbwd", "id": n, "tid": tid, "ts": ts})


def nonzero(times: dict[str, float]) -> dict[str, float]:
    return {name: time for name, time in times.items() if time}


def test_a_kernel_belongs_to_what_launched_it():
    trace = Trace(100)
    trace.host("attention", 1, 9, cat="user_annotation")
    trace.host("aten::mm", 2, 3)  # within attention: not a linear layer
    trace.launch("nvjet_gemm", 3, 10, 20)
    trace.host("aten::mm", 12, 3)
    trace.launch("nvjet_gemm", 13, 30, 25)
    trace.host("gpt::chunked_cross_entropy", 16, 8)
    trace.launch("nvjet_gemm", 17, 55, 5)
    trace.launch("triton_poi_fused_gelu", 25, 60, 10)
    trace.host("Optimizer.step#AdamW.step", 27, 8, cat="user_annotation")
    trace.launch("elementwise", 28, 70, 12)
    expected = {"attention": 20, "matmul": 25, "loss": 5, "other": 10, "optimizer": 12, "idle": 10 + 18}
    assert nonzero(summarise(trace.events)) == expected


def test_a_backward_kernel_belongs_where_its_forward_operation_did():
    trace = Trace(50)
    trace.host("attention", 1, 9, cat="user_annotation")
    trace.host("aten::mul", 2, 3)
    trace.host("aten::gelu", 12, 3)
    for forward, at in ((2, 20), (12, 30)):
        trace.host("autograd::engine::evaluate_function: Backward", at, 8, tid=2)
        trace.host("Backward", at + 1, 6, tid=2)
        trace.backward_of((1, forward), (2, at + 1))
        trace.launch("elementwise", at + 2, at + 3, 4, tid=2)
    assert nonzero(summarise(trace.events)) == {"attention": 4, "other": 4, "idle": 42}


def test_overlapped_copies_cost_nothing_and_waiting_for_data_is_not_idle():
    trace = Trace(100)
    trace.launch("Memcpy HtoD (Pinned -> Device)", 1, 0, 30, cat="gpu_memcpy")
    trace.launch("sm90_gemm", 2, 10, 40)
    trace.host("data", 45, 25, cat="user_annotation")
    assert nonzero(summarise(trace.events)) == {"data": 10 + 20, "matmul": 40, "idle": 30}


def test_an_exchange_between_ranks_counts_where_no_other_kernel_runs():
    trace = Trace(60)
    trace.launch("nvjet_gemm", 1, 0, 20)
    trace.host("c10d::alltoall_base_", 2, 4)
    trace.launch("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 3, 10, 30)
    assert nonzero(summarise(trace.events)) == {"matmul": 20, "exchange": 20, "idle": 20}


def test_kernels_of_a_replayed_graph_are_known_by_their_names():
    trace, kernels = Trace(100), (
        "flash_backward_dq", "nvjet_tst_128", "softmax_gradient_kernel", "triton_red_fused", "sm90_xmma_gemm_bf16",
        "triton_red_fused__log_softmax_nll_loss_forward", "multi_tensor_apply_kernel<FusedAdam>", "FSDP::all_gather",
    )  # fmt: skip
    for n, kernel in enumerate(kernels):
        trace.launch(kernel, 1, 10 * n, 10)
    assert nonzero(summarise(trace.events)) == {
        "attention": 10, "matmul": 20, "loss": 20, "optimizer": 10, "exchange": 10, "other": 10, "idle": 20
    }  # fmt: skip


def test_a_run_is_recorded_once_and_its_step_is_accounted_for(tmp_path):
    model = built(GPTConfig(n_layers=2), 64, 1000)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(1000, (1, 64))  # few, of many words: no part takes less than a twelfth
    printed: list[str] = []
    profiler = Profiler(tmp_path, CPU, profile=True, start=3, steps=10, print=printed.append)
    assert (profiler.first, profiler.last) == (5, 9)
    metrics: dict[str, float] = {}
    for step in range(3, 10):
        if step == profiler.first:
            profiler.start()
        model(tokens, tokens).backward()
        optimizer.step()
        if step == profiler.last:
            metrics = profiler.stop()
    assert list(metrics) == [f"profile/{name}_percent" for name in CATEGORIES]
    assert sum(metrics.values()) == pytest.approx(100)
    assert all(metrics[f"profile/{name}_percent"] > 1 for name in ("attention", "matmul", "loss", "optimizer", "other"))
    events = json.loads(gzip.decompress((tmp_path / "profile" / "trace.json.gz").read_bytes()))["traceEvents"]
    assert len([e for e in events if e["name"].startswith("Optimizer.step")]) == 5
    assert printed[0].startswith((tmp_path / "profile" / "table.txt").read_text())


@pytest.mark.parametrize(("start", "steps", "window"), [(0, 100, (10, 14)), (40, 100, (50, 54)), (0, 3, (0, 2))])
def test_the_steps_recorded_follow_the_warm_up_where_there_are_enough(tmp_path, start, steps, window):
    profiler = Profiler(tmp_path, CPU, profile=True, start=start, steps=steps)
    assert (profiler.first, profiler.last) == window
    unasked = Profiler(tmp_path, CPU, profile=False, start=start, steps=steps)
    assert (unasked.first, unasked.last) == (None, None)


@pytest.mark.usefixtures("forked")
def test_a_profile_prints_nothing_but_its_table(tmp_path):
    script = """
import sys, torch
from pathlib import Path
from recipe.run.profiler import Profiler
cpu = torch.device("cpu")
wanted = dict(profile=True, start=0, steps=1)
profiler = Profiler(Path(sys.argv[1]), cpu, print=lambda line: None, **wanted)
profiler.start()
torch.ones(9).sum()
profiler.stop()
"""
    done = started("-c", script, tmp_path)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
