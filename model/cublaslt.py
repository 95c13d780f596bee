"""Matrix products of cuBLASLt that apply GELU, or its derivative, to the result before it is written.

PyTorch offers neither: its products write their result, and a second kernel reads it again. The functions are described
in NVIDIA's "cuBLAS Library", section "Using the cuBLASLt API"; they are called in the library that PyTorch has loaded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attention.gpu import capability, constant_when_compiled

Pointer = ctypes.c_void_p

# From cublasLt.h and library_types.h
COMPUTE_32F, R_32F = 68, 0
DTYPES = {torch.float16: 2, torch.bfloat16: 14}
TRANSPOSE_A, EPILOGUE, BIAS, AUX, AUX_STRIDE = 3, 7, 8, 11, 12
GELU_AUX, GELU_AUX_BIAS, DGELU = 160, 164, 192
MAX_WORKSPACE = 1
WORKSPACE_BYTES = 32 << 20  # NVIDIA's recommendation for Hopper


class Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: an algorithm, and the workspace that it needs."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class Product(NamedTuple):
    """d (n, m) = b (n, k) times a, all stored row by row, then the epilogue."""

    device: torch.device
    dtype: torch.dtype
    epilogue: int
    transpose_a: bool  # a is (m, k) and its transpose is multiplied; else a is (k, m)
    m: int
    n: int
    k: int

    def __call__(self, a: Tensor, b: Tensor, d: Tensor, aux: Tensor, bias: Tensor | None = None) -> None:
        """Write d. GELU writes the sum before GELU into aux (n, m); GELU's derivative reads it there."""
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        with description(self, aux, bias) as described:
            plan = PLANS.get(self) or PLANS.setdefault(self, choose(self, described))
            workspace = torch.empty(plan.heuristic.workspace_bytes, dtype=torch.uint8, device=d.device)
            status = load().cublasLtMatmul(
                handle(self.device),
                described,
                ctypes.byref(one),
                *(Pointer(a.data_ptr()), plan.a),
                *(Pointer(b.data_ptr()), plan.b),
                ctypes.byref(zero),
                *(Pointer(d.data_ptr()), plan.d) * 2,
                ctypes.byref(plan.heuristic),  # begins with the algorithm
                *(Pointer(workspace.data_ptr()), ctypes.c_size_t(workspace.numel())),
                Pointer(torch.cuda.current_stream(self.device).cuda_stream),
            )
        check(status)


class Plan(NamedTuple):
    """The algorithm of a product, and the layouts of its matrices."""

    heuristic: Heuristic
    a: Pointer
    b: Pointer
    d: Pointer


PLANS: dict[Product, Plan] = {}


@constant_when_compiled  # the compiler cannot look into a library
def has_gelu_products(device: torch.device) -> bool:
    """Whether products with GELU are faster on this device than a product and a kernel: measured on sm_90 alone."""
    return device.type == "cuda" and capability(device) == (9, 0) and is_loadable()


@cache
def load() -> Any:
    """The cuBLASLt that PyTorch uses. Raises OSError where PyTorch comes without one."""
    return ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '').split('.')[0]}")


@cache
def is_loadable() -> bool:
    """Whether PyTorch comes with a cuBLASLt."""
    try:
        load()
    except OSError:
        return False
    return True


@cache
def handle(device: torch.device) -> Pointer:
    """The library's state for a device, made once."""
    made = Pointer()
    with torch.cuda.device(device):
        check(load().cublasLtCreate(ctypes.byref(made)))
    return made


@contextmanager
def description(product: Product, aux: Tensor, bias: Tensor | None) -> Iterator[Pointer]:
    """A product's description for one call, with the addresses of its further tensors."""
    library, made = load(), Pointer()
    check(library.cublasLtMatmulDescCreate(ctypes.byref(made), COMPUTE_32F, R_32F))
    attributes = {
        TRANSPOSE_A: ctypes.c_int(product.transpose_a),
        EPILOGUE: ctypes.c_int(product.epilogue),
        AUX_STRIDE: ctypes.c_int64(product.m),
        AUX: Pointer(aux.data_ptr()),
        BIAS: Pointer(None if bias is None else bias.data_ptr()),
    }
    try:
        for attribute, value in attributes.items():
            size = ctypes.c_size_t(ctypes.sizeof(value))
            check(library.cublasLtMatmulDescSetAttribute(made, attribute, ctypes.byref(value), size))
        yield made
    finally:
        check(library.cublasLtMatmulDescDestroy(made))


def choose(product: Product, described: Pointer) -> Plan:
    """The library's first choice of algorithm for a product."""
    library, (m, n, k), dtype = load(), product[4:], DTYPES[product.dtype]

    def layout(rows: int, columns: int) -> Pointer:  # columns of `rows` numbers, as BLAS stores a matrix
        made = Pointer()
        size = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows)
        check(library.cublasLtMatrixLayoutCreate(ctypes.byref(made), dtype, *size))
        return made

    a, b, d = layout(*((k, m) if product.transpose_a else (m, k))), layout(k, n), layout(m, n)
    preference, workspace = Pointer(), ctypes.c_uint64(WORKSPACE_BYTES)
    check(library.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
    size = ctypes.c_size_t(ctypes.sizeof(workspace))
    check(library.cublasLtMatmulPreferenceSetAttribute(preference, MAX_WORKSPACE, ctypes.byref(workspace), size))
    heuristic, count = Heuristic(), ctypes.c_int()
    results = 1, ctypes.byref(heuristic), ctypes.byref(count)
    state = handle(product.device)
    check(library.cublasLtMatmulAlgoGetHeuristic(state, described, a, b, d, d, preference, *results))
    check(library.cublasLtMatmulPreferenceDestroy(preference))
    return Plan(heuristic, a, b, d)


def check(status: int) -> None:
    """Raise RuntimeError for a call that did not succeed."""
    if status:
        raise RuntimeError(f"cuBLASLt failed with status {status} (cublasStatus_t).")
