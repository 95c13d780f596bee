"""The meters' arithmetic, with a clock whose times are given."""

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from recipe.run.meters import Clock, StepMeter, describe_peak, peak_flops, product_precision

CPU = torch.device("cpu")


class Script(Clock):
    """A clock that reads the given seconds, one after the other."""

    def __init__(self, seconds: Iterable[float]) -> None:
        self.marks: Iterator[float] = iter(seconds)
        self.reads = 0

    def mark(self) -> float:
        return next(self.marks)

    def seconds(self, start: Any, end: Any) -> float:
        self.reads += 1
        return end - start


def scripted(marks: Iterable[float], warmup_steps: int = 0, **options: Any) -> StepMeter:
    defaults = {"tokens_per_step": 1000, "flops_per_token_full": 4e9, "flops_per_token_causal": 3e9}
    return StepMeter(CPU, **(defaults | options), precision="bf16", warmup_steps=warmup_steps, clock=Script(marks))


def take_steps(meter: StepMeter, count: int) -> None:
    for _ in range(count):
        meter.step_start()
        meter.step_end()


@pytest.mark.parametrize(
    ("name", "precision", "teraflops"),
    [
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H100 80GB HBM3", "fp16", 989.4),
        ("NVIDIA A100 80GB PCIe", "fp32", 19.5),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
    ],
)
def test_a_known_device_has_its_datasheet_peak(name, precision, teraflops):
    assert peak_flops(name, precision) == pytest.approx(teraflops * 1e12)
    assert name in describe_peak(name, precision)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("cpu", "fp32"),
        ("NVIDIA H300", "bf16"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16"),
        ("Tesla V100-SXM2-16GB", "bf16"),
    ],
)
def test_the_peak_of_an_unknown_device_is_not_guessed(name, precision):
    assert peak_flops(name, precision) is None
    assert describe_peak(name, precision).startswith("unknown device")


def test_products_that_may_use_tf32_are_measured_against_its_peak():
    assert product_precision("fp32", allow_tf32=False) == "fp32"
    assert product_precision("fp32", allow_tf32=True) == "tf32"
    assert product_precision("bf16", allow_tf32=True) == "bf16"
    torch.set_float32_matmul_precision("high")
    try:
        assert product_precision("fp32", allow_tf32=False) == "tf32"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_an_interval_reports_means_and_the_run_medians():
    meter = scripted([0, 1, 3, 4, 14])  # steps of 1, 2, 1 and 10 s
    take_steps(meter, 2)
    first = meter.interval()
    assert not [name for name in first if "mfu" in name], "the peak of this device is unknown"
    assert first["throughput/step_ms"] == pytest.approx(1500)
    assert first["throughput/tokens_per_s"] == pytest.approx(1000 / 1.5)
    take_steps(meter, 2)
    assert meter.interval()["throughput/step_ms"] == pytest.approx(5500)
    assert "throughput/step_ms" not in meter.interval(), "an interval without a step has no time to report"
    assert meter.medians()["throughput/step_ms"] == pytest.approx(1500)
    assert meter.medians()["throughput/tokens_per_s"] == pytest.approx(1000 / 1.5)


def test_mfu_counts_attention_whole_and_causal(monkeypatch):
    monkeypatch.setattr("recipe.run.meters.device_name", lambda device: "NVIDIA A100-SXM4-40GB")
    meter = scripted([0, 0.01], tokens_per_step=780, device_count=2)  # 78,000 tokens/s on two A100 of 312 TFLOP/s
    take_steps(meter, 1)
    metrics = meter.interval()
    assert metrics["throughput/mfu_full"] == pytest.approx(78_000 * 4e9 / 624e12)  # 0.5
    assert metrics["throughput/mfu_causal"] == pytest.approx(0.375)


def test_warm_up_steps_are_not_counted():
    meter = scripted([0, 60, 70, 71], warmup_steps=2)
    take_steps(meter, 2)
    assert "throughput/step_ms" not in meter.interval()
    assert meter.medians() == {}
    take_steps(meter, 1)
    assert meter.interval()["throughput/step_ms"] == pytest.approx(1000)
    assert meter.medians()["throughput/step_ms"] == pytest.approx(1000)


def test_the_time_of_a_pause_is_not_counted_and_all_other_time_is():
    meter = scripted([0, 1, 2, 102, 103])  # two steps, a pause of 100 s, a step
    take_steps(meter, 2)
    with meter.paused():
        pass
    take_steps(meter, 1)
    assert meter.interval()["throughput/step_ms"] == pytest.approx(1000)

    meter = scripted([0, 1, 102])  # the same without saying so
    take_steps(meter, 2)
    assert meter.interval()["throughput/step_ms"] == pytest.approx(51_000)


def test_a_step_with_a_pause_inside_is_left_out():
    meter = scripted([0, 1, 50, 51])
    take_steps(meter, 1)
    meter.step_start()
    with meter.paused():
        pass
    meter.step_end()
    take_steps(meter, 1)
    assert meter.interval()["throughput/step_ms"] == pytest.approx(1000)


def test_the_clock_is_read_at_the_end_of_an_interval_only():
    meter = scripted(range(100), warmup_steps=3)
    clock = meter.clock
    assert isinstance(clock, Script)
    take_steps(meter, 50)
    assert clock.reads == 0
    meter.interval()
    assert clock.reads == 47
    meter.medians()
    assert clock.reads == 47


def test_on_a_cpu_a_step_lasts_as_long_as_its_work_and_its_wait_for_data():
    work: dict[str, Any] = {"tokens_per_step": 100, "flops_per_token_full": 1, "flops_per_token_causal": 1}
    meter = StepMeter(CPU, precision="fp32", warmup_steps=0, **work)
    for _ in range(3):
        meter.step_start()
        for _ in range(2):
            with meter.waiting_for_data():
                time.sleep(0.01)
        time.sleep(0.03)
        meter.step_end()
    metrics = meter.interval()
    # Sleeping takes at least as long as asked; on a busy machine longer.
    assert metrics["throughput/data_ms"] >= 20
    assert metrics["throughput/step_ms"] >= metrics["throughput/data_ms"] + 30
    assert metrics["throughput/tokens_per_s"] == pytest.approx(100 / (metrics["throughput/step_ms"] / 1e3))


def test_on_a_cpu_the_memory_is_the_process_at_its_peak():
    meter = scripted([])
    memory = meter.interval()["memory/peak_allocated_gib"]
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    assert memory * 2**20 == pytest.approx(int(line.split()[1]), rel=0.01)
    assert meter.peaks() == {"memory/peak_allocated_gib": memory}
