"""The peak FLOP/s of GPUs by name, and the share of it that a training step reaches.

Model FLOPs utilisation (Chowdhery et al. 2022, "PaLM", appendix B): the FLOPs of the model's arithmetic over the FLOPs
that the device could have done in the same time. There are two conventions: `full` counts attention as if every query
saw every key, as most published figures do; `causal` counts the visible keys only.
"""

from __future__ import annotations

import torch

# Dense peak in TFLOP/s: bf16, fp16, tf32 and fp32 (outside the tensor cores), by NVIDIA's datasheet or architecture
# whitepaper; half of the figure where a datasheet assumes sparsity. GeForce: fp16 with fp32 accumulation, which
# is what torch uses. None: the device does not have the precision.
_H100_SXM = (989.4, 989.4, 494.7, 66.9)  # H100 whitepaper, H100 SXM5
_H100_PCIE = (756.0, 756.0, 378.0, 51.2)  # H100 whitepaper, H100 PCIe
_HOPPER_NVL = (835.5, 835.5, 417.5, 60.0)  # H100 NVL and H200 NVL datasheets
_A100 = (312.0, 312.0, 156.0, 19.5)  # A100 datasheet, the same for SXM and PCIe
_V100_SXM = (None, 125.0, None, 15.7)  # V100 datasheet
_V100_PCIE = (None, 112.0, None, 14.0)

_PEAKS: dict[str, tuple[float | None, float | None, float | None, float | None]] = {
    "GB200": (2500.0, 2500.0, 1250.0, 80.0),  # GB200 NVL72 datasheet, a GPU's half of the superchip
    "B200": (2250.0, 2250.0, 1125.0, 75.0),  # HGX B200 datasheet, an eighth
    "H200": _H100_SXM,  # H200 datasheet: the H100's chip with more memory
    "H200 NVL": _HOPPER_NVL,
    "GH200 480GB": _H100_SXM,  # GH200 datasheet
    "GH200 96GB HBM3": _H100_SXM,
    "GH200 144G HBM3e": _H100_SXM,
    "H100 80GB HBM3": _H100_SXM,
    "H100 PCIe": _H100_PCIE,
    "H100 NVL": _HOPPER_NVL,
    "A100-SXM4-40GB": _A100,
    "A100-SXM4-80GB": _A100,
    "A100-PCIE-40GB": _A100,
    "A100-PCIE-80GB": _A100,
    "A100 80GB PCIe": _A100,
    "A40": (149.7, 149.7, 74.8, 37.4),  # A40 datasheet
    "A10": (125.0, 125.0, 62.5, 31.2),  # A10 datasheet
    "L4": (121.0, 121.0, 60.0, 30.3),  # L4 datasheet
    "L40": (181.05, 181.05, 90.5, 90.5),  # L40 datasheet
    "L40S": (362.05, 362.05, 183.0, 91.6),  # L40S datasheet
    "RTX A6000": (154.8, 154.8, 77.4, 38.7),  # RTX A6000 datasheet and GA102 whitepaper
    "RTX 6000 Ada Generation": (364.2, 364.2, 182.1, 91.1),  # Ada whitepaper
    "GeForce RTX 3090": (71.0, 71.0, 35.6, 35.6),  # GA102 whitepaper
    "GeForce RTX 4090": (165.2, 165.2, 82.6, 82.6),  # Ada whitepaper
    "GeForce RTX 5090": (209.5, 209.5, 104.8, 104.8),  # RTX Blackwell whitepaper
    "V100-SXM2-16GB": _V100_SXM,
    "V100-SXM2-32GB": _V100_SXM,
    "V100-PCIE-16GB": _V100_PCIE,
    "V100-PCIE-32GB": _V100_PCIE,
    "T4": (None, 65.0, None, 8.1),  # T4 datasheet
}
_COLUMNS = ("bf16", "fp16", "tf32", "fp32")


def peak_flops(device_name: str, precision: str) -> float | None:
    """FLOP/s of one device in `precision` (bf16, fp16, tf32 or fp32), dense; None for a device that is not known.

    The name has to match as a whole: a laptop's RTX 4090, or a MIG slice of an H100, is another device.
    """
    name = device_name.removeprefix("NVIDIA ").removeprefix("Tesla ")
    teraflops = _PEAKS.get(name, (None,) * 4)[_COLUMNS.index(precision)]
    return None if teraflops is None else teraflops * 1e12


def product_precision(precision: str, allow_tf32: bool) -> str:
    """The precision of the peak for MFU, where the model computes in `precision`: tf32 instead of fp32 as soon as some
    products may use it (attention.allow_tf32, or torch's setting), so that MFU is never overstated."""
    rounded = allow_tf32 or torch.get_float32_matmul_precision() != "highest"
    return "tf32" if precision == "fp32" and rounded else precision


def describe_peak(device_name: str, precision: str) -> str:
    """A sentence on the peak that MFU is measured against, or on its absence."""
    peak = peak_flops(device_name, precision)
    if peak is None:
        return f"unknown device for MFU: no peak of {device_name} in {precision} is on record"
    return f"{peak / 1e12:.0f} TFLOP/s ({device_name}, {precision}, dense)"
