"""GPT-2's MLP without separate passes for GELU, which is applied while a matrix product is written.

    h = x W1^T,   g = GELU(h),   y = g W2^T
    dh = (dy W2) GELU'(h),   dW2 = dy^T g,   dW1 = dh^T x,   dx = dh W1

A kernel between two products reads and writes the MLP's largest tensor, (tokens, 4 C), twice each in both passes. The
first product of a line now writes h and g, or dh. Biases are added where there are any.

PyTorch offers no such products for training. cuBLASLt has them (NVIDIA's "cuBLAS Library", section "Using the cuBLASLt
API"); they are called in the library that PyTorch has loaded.
"""

import ctypes
import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
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
    attributes = {
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
    check(library.cublasLtMatmulAlgoGetHeuristic(handle(product.device), described, a, b, d, d, preference, *results))
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


def is_trained_in_half(x: Tensor, width: int) -> bool:
    """Whether these products are faster for x (..., C) and a layer from C to `width` channels.

    True in training, in half precision, on GPUs on which it was measured, if rows begin at multiples of 16 bytes.
    """
    return (
        torch.is_grad_enabled()
        and has_fast_products(x.device)  # first: of other devices torch may not know whether autocast is on
        and torch.is_autocast_enabled(x.device.type)
        and torch.get_autocast_dtype(x.device.type) in HALF
        and x.shape[-1] % 8 == 0
        and width % 8 == 0
    )


def fused_mlp(x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None) -> Tensor:
    """c_proj(GELU(c_fc(x))): x (..., C) to (..., C), in the dtype of autocast.

    w1 (4 C, C), b1 (4 C,) of c_fc; w2 (C, 4 C), b2 (C,) of c_proj; GELU in the tanh approximation
    """
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, w1, w2 = x.to(dtype), w1.to(dtype), w2.to(dtype)
        b1, b2 = None if b1 is None else b1.to(dtype), None if b2 is None else b2.to(dtype)
    with torch.autocast(kind, enabled=False):
        return FusedMLP.apply(x.reshape(-1, x.shape[-1]), w1, b1, w2, b2).view(*x.shape[:-1], len(w2))


class FusedMLP(torch.autograd.Function):
    """The two lines above, for x (N, C)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None) -> Tensor:
        """y (N, C)"""
        g, h = linear_gelu(x, w1, b1)
        ctx.save_for_backward(x, w1, w2, g, h)
        return F.linear(g, w2, b2)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, w1, b1, w2 and b2."""
        x, w1, w2, g, h = ctx.saved_tensors
        of_x, of_w1, of_b1, of_w2, of_b2 = ctx.needs_input_grad
        dw2, db2 = dy.T @ g if of_w2 else None, dy.sum(0) if of_b2 else None
        if not (of_x or of_w1 or of_b1):
            return None, None, None, dw2, db2
        dh = gelu_gradient(dy.contiguous(), w2, h)
        dx, dw1, db1 = dh @ w1 if of_x else None, dh.T @ x if of_w1 else None, dh.sum(0) if of_b1 else None
        return dx, dw1, db1, dw2, db2


@torch.library.custom_op("gpt::linear_gelu", mutates_args=())
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """GELU(h) and h = x weight^T + bias, both (N, width), of x (N, C), weight (width, C) and bias (width,)."""
    if not has_fast_products(x.device):
        h = F.linear(x, weight, bias)
        return F.gelu(h, approximate="tanh"), h
    g, h = (x.new_empty(len(x), len(weight)) for _ in range(2))
    multiply_then(GELU_AUX if bias is None else GELU_AUX_BIAS, aligned(x), aligned(weight).T, g, h, bias)
    return g, h


@torch.library.custom_op("gpt::gelu_gradient", mutates_args=())
def gelu_gradient(dy: Tensor, weight: Tensor, h: Tensor) -> Tensor:
    """(dy weight) GELU'(h), (N, width), of dy (N, C), weight (C, width) and h (N, width)."""
    if not has_fast_products(dy.device):
        return ((dy @ weight) * gelu_derivative(h.to(torch.promote_types(h.dtype, torch.float32)))).to(h.dtype)
    dh = torch.empty_like(h)
    multiply_then(DGELU, aligned(dy), aligned(weight), dh, h)
    return dh


linear_gelu.register_fake(lambda x, weight, _: (x.new_empty(len(x), len(weight)), x.new_empty(len(x), len(weight))))
gelu_gradient.register_fake(lambda dy, weight, h: torch.empty_like(h))


def gelu_derivative(h: Tensor) -> Tensor:
    """GELU'(h) = s + h s (1 - s) 2 u', with s = sigmoid(2 u) and u = sqrt(2 / pi) (h + 0.044715 h^3)."""
    scale, cubic = math.sqrt(8 / math.pi), 0.044715
    s = torch.sigmoid(scale * (h + cubic * h**3))
    return s + h * s * (1 - s) * scale * (1 + 3 * cubic * h**2)
