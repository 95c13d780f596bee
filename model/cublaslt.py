"""Matrix products of cuBLASLt that apply GELU or its derivative before the result is written.

PyTorch offers none for training: its products write their result, which a second kernel reads again. The functions are
described in NVIDIA's "cuBLAS Library", section "Using the cuBLASLt API"; they are called in the library that PyTorch
has loaded.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attention.gpu import DeviceOf, capability, constant_when_compiled

Pointer = ctypes.c_void_p

# From cublasLt.h and library_types.h
COMPUTE_32F, R_32F = 68, 0
HALF = {torch.float16: 2, torch.bfloat16: 14}
TRANSPOSE_A, EPILOGUE, BIAS, AUX, AUX_STRIDE = 3, 7, 8, 11, 12
GELU_AUX, GELU_AUX_BIAS, DGELU = 160, 164, 192
MAX_WORKSPACE = 1
WORKSPACE_BYTES = 32 << 20  # NVIDIA's recommendation for Hopper
ALIGNMENT = 256  # bytes: the library expects every matrix to start at a multiple, unless it is told otherwise


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
    """d (n, m) = b (n, k) times a (k, m), then the epilogue."""

    device: torch.device
    dtype: torch.dtype
    epilogue: int
    transpose_a: bool  # a is stored as (m, k), else as (k, m), row by row
    m: int
    n: int
    k: int


class Plan(NamedTuple):
    """An algorithm for a product, and the layouts of its matrices."""

    heuristic: Heuristic
    a: Pointer
    b: Pointer
    d: Pointer


PLANS: dict[Product, Plan] = {}


@constant_when_compiled  # the compiler cannot look into a library
def has_fast_products(device: torch.device) -> bool:
    """Whether these products are faster on this device than PyTorch's: measured on sm_90 alone."""
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


def aligned(x: Tensor) -> Tensor:
    """x, contiguous, and starting at a multiple of ALIGNMENT."""
    x = x.contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


def multiply_then(epilogue: int, b: Tensor, a: Tensor, d: Tensor, aux: Tensor, bias: Tensor | None = None) -> None:
    """d (n, m) = b (n, k) a (k, m), then the epilogue.

    b, a   `aligned`, in half precision, where a may be the transpose of such a matrix
    d      contiguous, in their dtype
    aux    (n, m), in their dtype; GELU writes the sum before GELU there, GELU's derivative reads it there
    bias   (m,), added before GELU
    """
    if not d.numel():
        return
    (k, m), n = a.shape, len(b)
    product = Product(d.device, b.dtype, epilogue, not a.is_contiguous(), m, n, k)
    with DeviceOf(d), description(product, aux, bias) as described:
        if product not in PLANS:
            PLANS[product] = plan_for(product, described)
        launch(PLANS[product], described, b, a, d)


def launch(plan: Plan, described: Pointer, b: Tensor, a: Tensor, d: Tensor) -> None:
    """Run an algorithm on the current stream."""
    one, zero = ctypes.c_float(1), ctypes.c_float(0)
    workspace = torch.empty(plan.heuristic.workspace_bytes, dtype=torch.uint8, device=d.device)
    status = load().cublasLtMatmul(
        handle(d.device),
        described,
        ctypes.byref(one),
        *(Pointer(a.data_ptr()), plan.a),
        *(Pointer(b.data_ptr()), plan.b),
        ctypes.byref(zero),
        *(Pointer(), plan.d),  # a matrix times zero
        *(Pointer(d.data_ptr()), plan.d),
        ctypes.byref(plan.heuristic),  # begins with the algorithm
        *(Pointer(workspace.data_ptr()), ctypes.c_size_t(workspace.numel())),
        Pointer(torch.cuda.current_stream(d.device).cuda_stream),
    )
    check(status)


@contextmanager
def description(product: Product, aux: Tensor, bias: Tensor | None) -> Iterator[Pointer]:
    """A product's description for one call, with the addresses of its further tensors."""
    library, made = load(), Pointer()
    check(library.cublasLtMatmulDescCreate(ctypes.byref(made), COMPUTE_32F, R_32F))
    attributes: dict[int, Any] = {
        TRANSPOSE_A: ctypes.c_int(product.transpose_a),
        EPILOGUE: ctypes.c_int(product.epilogue),
        AUX_STRIDE: ctypes.c_int64(product.m),
        AUX: Pointer(aux.data_ptr()),
    }
    if bias is not None:
        attributes[BIAS] = Pointer(bias.data_ptr())
    try:
        for attribute, value in attributes.items():
            size = ctypes.c_size_t(ctypes.sizeof(value))
            check(library.cublasLtMatmulDescSetAttribute(made, attribute, ctypes.byref(value), size))
        yield made
    finally:
        check(library.cublasLtMatmulDescDestroy(made))


def plan_for(product: Product, described: Pointer) -> Plan:
    """The library's first choice for a product."""
    library, (m, n, k) = load(), product[-3:]
    a = layout(product.dtype, *((k, m) if product.transpose_a else (m, k)))
    b, d = layout(product.dtype, k, n), layout(product.dtype, m, n)
    preference, workspace = Pointer(), ctypes.c_uint64(WORKSPACE_BYTES)
    check(library.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
    size = ctypes.c_size_t(ctypes.sizeof(workspace))
    check(library.cublasLtMatmulPreferenceSetAttribute(preference, MAX_WORKSPACE, ctypes.byref(workspace), size))
    found, count = Heuristic(), ctypes.c_int()
    results = 1, ctypes.byref(found), ctypes.byref(count)
    state = handle(product.device)
    check(library.cublasLtMatmulAlgoGetHeuristic(state, described, a, b, d, d, preference, *results))
    check(library.cublasLtMatmulPreferenceDestroy(preference))
    if not count.value:
        raise RuntimeError(f"cuBLASLt has no algorithm for this product: {product}.")
    check(found.state)
    return Plan(found, a, b, d)


def layout(dtype: torch.dtype, rows: int, columns: int) -> Pointer:
    """A matrix of columns of `rows` numbers, as BLAS stores it; the library forgets it with the result."""
    made, library = Pointer(), load()
    size = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows)
    check(library.cublasLtMatrixLayoutCreate(ctypes.byref(made), HALF[dtype], *size))
    weakref.finalize(made, library.cublasLtMatrixLayoutDestroy, Pointer(made.value)).atexit = False
    return made


def check(status: int) -> None:
    """Raise RuntimeError for a call that did not succeed."""
    if status:
        raise RuntimeError(f"cuBLASLt failed with status {status} (cublasStatus_t).")
