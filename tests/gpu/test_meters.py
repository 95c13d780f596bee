"""The meters on a real GPU: device time without waiting for the device, and peaks that can be reset."""

import time

import pytest
import torch

from recipe.run.meters import GIB, StepMeter, device_name, peak_flops


@pytest.fixture
def device():
    return torch.device("cuda", torch.cuda.current_device())


def meter(device, tokens=1000, flops=2e6):
    """Of steps of so many tokens, each of which takes so many FLOPs, or half of them if hidden keys do not count."""
    return StepMeter(
        device,
        tokens_per_step=tokens,
        flops_per_token_full=flops,
        flops_per_token_causal=flops / 2,
        precision="bf16",
        warmup_steps=2,
    )


@pytest.mark.whole_gpu
def test_steps_are_timed_on_the_device_while_the_host_runs_ahead(device):
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    m = meter(device)
    for _ in range(2):
        m.step_start()
        a @ a
        m.step_end()
    torch.cuda.synchronize()

    start = time.perf_counter()
    for _ in range(20):
        m.step_start()
        for _ in range(5):
            a @ a
        m.step_end()
    asked = time.perf_counter() - start
    torch.cuda.synchronize()
    done = time.perf_counter() - start

    measured = 20 * m.interval()["throughput/step_ms"] / 1e3
    assert asked < done / 2, "the meter made the host wait"
    assert measured == pytest.approx(done, rel=0.15)


def test_mfu_of_a_matrix_product_is_the_share_of_the_peak_that_its_time_makes(device):
    """By the host's clock over all steps, which other processes on the GPU slow down just as much."""
    peak = peak_flops(device_name(device), "bf16")
    if peak is None:
        pytest.skip(f"no peak of {device_name(device)} is on record")
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    flops, steps = 2 * 8192**3, 100
    m = meter(device, 1, flops)

    def run(steps):
        start = time.perf_counter()
        for _ in range(steps):
            m.step_start()
            a @ a
            m.step_end()
        torch.cuda.synchronize(device)
        return time.perf_counter() - start

    run(2)
    with m.paused():
        torch.cuda.synchronize(device)
    seconds = run(steps)
    measured = m.interval()
    assert measured["throughput/mfu_full"] == pytest.approx(steps * flops / seconds / peak, rel=0.15)
    assert measured["throughput/mfu_full"] < 1
    assert measured["throughput/mfu_causal"] == pytest.approx(measured["throughput/mfu_full"] / 2)


def test_memory_peaks_are_of_the_interval_and_leave_pauses_out(device):
    m = meter(device)
    base = torch.cuda.memory_allocated(device) / GIB

    def step(gib):
        m.step_start()
        torch.empty(int(gib * GIB), dtype=torch.uint8, device=device)
        m.step_end()

    def peak():
        return m.interval()["memory/peak_allocated_gib"] - base

    step(1.0)
    assert peak() == pytest.approx(1.0, abs=0.01)
    step(0.25)
    with m.paused():
        torch.empty(2 * GIB, dtype=torch.uint8, device=device)
    step(0.5)
    assert peak() == pytest.approx(0.5, abs=0.01)
    peaks = m.peaks()
    assert peaks["memory/peak_allocated_gib"] - base == pytest.approx(1.0, abs=0.01)
    assert peaks["memory/peak_reserved_gib"] >= peaks["memory/peak_allocated_gib"]
