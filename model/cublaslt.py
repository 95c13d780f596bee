"""Matrix products of cuBLASLt: with GELU or its derivative before the result is written, and by the fastest algorithm.

PyTorch offers neither: its products take the algorithm that the library expects to be the fastest, and write their
result, which a second kernel reads again. The functions are described in NVIDIA's "cuBLAS Library", section "Using the
cuBLASLt API"; they are called in the library that PyTorch has loaded.

The fastest is chosen among the algorithms that write the same bits, compared on random numbers that are the same on
every rank. So a result depends neither on what was measured nor on whether it was, and ranks that choose differently
agree.
"""

from __future__ import annotations

import ctypes
import statistics
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from attention.gpu import DeviceOf, capability, constant_when_compiled

Pointer = ctypes.c_void_p
Way = TypeVar("Way")

# From cublasLt.h and library_types.h
COMPUTE_32F, R_32F = 68, 0
HALF = {torch.float16: 2, torch.bfloat16: 14}
DTYPES = {**HALF, torch.float8_e4m3fn: 28}
TRANSPOSE_A, EPILOGUE, BIAS, AUX, AUX_STRIDE, AUX_DTYPE = 3, 7, 8, 11, 12, 22
PLAIN, GELU_AUX, GELU_AUX_BIAS, DGELU = 1, 160, 164, 192
MAX_WORKSPACE = 1
ALGORITHM, SPLITS = 0, 2
WORKSPACE_BYTES = 32 << 20  # NVIDIA's recommendation for Hopper
ALIGNMENT = 256  # bytes: the library expects every matrix to start at a multiple, unless it is told otherwise

CANDIDATES = 16  # algorithms that the library is asked for
REPEATS = 7  # of each measurement
WORTHWHILE = 1 << 32  # multiplications of the smallest product that is measured: 12 us or more
REMEMBERED = 128  # products; where shapes vary more, further ones are not measured
COMPARED = 1 << 22  # words of 8 bytes that are compared at a time


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
    dtype: torch.dtype  # of a and b
    written: torch.dtype  # of d
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
    c: Pointer  # of what could be added; in 8 bits the library asks for it, in half precision
    d: Pointer


PLANS: dict[Product, Plan | None] = {}  # None: torch.mm


@constant_when_compiled  # the compiler cannot look into a library
def has_fast_products(device: torch.device) -> bool:
    """Whether these products are faster on this device than PyTorch's: measured on sm_90 alone."""
    return device.type == "cuda" and capability(device) == (9, 0) and is_loadable()


def is_trained_in_half(x: Tensor, width: int) -> bool:
    """Whether these products are faster for x (..., C) and a layer from C to `width` channels, or back.

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


def multiply(b: Tensor, a: Tensor, out: Tensor) -> Tensor:
    """out (n, m) = b (n, k) a (k, m), contiguous, by the fastest way to the bits of torch.mm."""
    (k, m), n = a.shape, len(b)
    fits = (
        has_fast_products(out.device)
        and out.dtype in HALF
        and n * m * k >= WORTHWHILE
        and m % 8 == k % 8 == 0
        and b.is_contiguous()
        and (a.is_contiguous() or a.T.is_contiguous())
        and all(x.data_ptr() % ALIGNMENT == 0 for x in (b, a, out))
    )
    if not fits:
        return torch.mm(b, a, out=out)
    multiply_then(PLAIN, b, a, out)
    return out


def multiply_then(
    epilogue: int,
    b: Tensor,
    a: Tensor,
    d: Tensor,
    aux: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float = 1.0,
) -> None:
    """d (n, m) = scale b (n, k) a (k, m), then the epilogue.

    b, a   `aligned`, in half precision, where a may be the transpose of such a matrix; or in e4m3, where it must be
    d      contiguous, in their dtype; of matrices in e4m3 in e4m3 or half precision
    aux    (n, m), in half precision; GELU writes the sum before GELU there, GELU's derivative reads it there
    bias   (m,), added before GELU
    """
    if not d.numel():
        return
    (k, m), n = a.shape, len(b)
    product = Product(d.device, b.dtype, d.dtype, epilogue, not a.is_contiguous(), m, n, k)
    is_torchs = epilogue == PLAIN and b.dtype in HALF  # torch.mm computes it too
    with DeviceOf(d), description(product, aux, bias) as described:

        def run(plan: Plan | None, b: Tensor = b, a: Tensor = a) -> None:
            if plan is None:
                torch.mm(b, a, out=d)
            else:
                launch(plan, described, b, a, d, scale)

        if product not in PLANS:
            is_measured = not torch.cuda.is_current_stream_capturing() and len(PLANS) < REMEMBERED
            if is_torchs and not is_measured:
                return run(None)
            ways = [*([None] if is_torchs else []), *plans(product, described)]
            if not ways:
                raise RuntimeError(f"cuBLASLt has no algorithm for this product: {product}.")
            if not is_measured:
                return run(ways[0])
            if n * m * k >= WORTHWHILE:
                generator = torch.Generator(d.device).manual_seed(0)
                drawn = [torch.empty_like(x, dtype=torch.bfloat16).normal_(generator=generator) for x in (b, a)]
                numbers = [x.to(b.dtype) for x in drawn]
                written = [d] if aux is None or epilogue == DGELU else [d, aux]
                ways = fastest_first(same_bits(ways, lambda way: run(way, *numbers), written), run)
            PLANS[product] = ways[0]
        run(PLANS[product])


def same_bits(ways: Sequence[Way], run: Callable[[Way], None], written: Sequence[Tensor]) -> list[Way]:
    """The ways that write the same bits as the first one, into contiguous tensors of whole 8 bytes."""
    alike = list(ways)
    for tensor in written:
        for words in tensor.view(-1).view(torch.int64).split(COMPARED):
            run(ways[0])
            right, others, alike = words.clone(), alike[1:], alike[:1]
            for way in others:
                run(way)
                if torch.equal(words, right):
                    alike.append(way)
    return alike


def fastest_first(ways: Sequence[Way], run: Callable[[Way], None]) -> list[Way]:
    """The ways by their median time on the current GPU."""

    def milliseconds(way: Way) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        run(way)  # so that the GPU does not wait for the launch of the next
        start.record()
        run(way)
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    rounds = [[milliseconds(way) for way in ways] for _ in range(REPEATS)]
    medians = [statistics.median(times) for times in zip(*rounds, strict=True)]
    return [ways[i] for i in sorted(range(len(ways)), key=medians.__getitem__)]


def launch(plan: Plan, described: Pointer, b: Tensor, a: Tensor, d: Tensor, scale: float) -> None:
    """Run an algorithm on the current stream."""
    factor, zero = ctypes.c_float(scale), ctypes.c_float(0)
    workspace = torch.empty(plan.heuristic.workspace_bytes, dtype=torch.uint8, device=d.device)
    status = load().cublasLtMatmul(
        handle(d.device),
        described,
        ctypes.byref(factor),
        *(Pointer(a.data_ptr()), plan.a),
        *(Pointer(b.data_ptr()), plan.b),
        ctypes.byref(zero),
        *(Pointer(), plan.c),  # times zero
        *(Pointer(d.data_ptr()), plan.d),
        ctypes.byref(plan.heuristic),  # begins with the algorithm
        *(Pointer(workspace.data_ptr()), ctypes.c_size_t(workspace.numel())),
        Pointer(torch.cuda.current_stream(d.device).cuda_stream),
    )
    check(status)


@contextmanager
def description(product: Product, aux: Tensor | None, bias: Tensor | None) -> Iterator[Pointer]:
    """A product's description for one call, with the addresses of its further tensors."""
    library, made = load(), Pointer()
    check(library.cublasLtMatmulDescCreate(ctypes.byref(made), COMPUTE_32F, R_32F))
    attributes: dict[int, Any] = {
        TRANSPOSE_A: ctypes.c_int(product.transpose_a),
        EPILOGUE: ctypes.c_int(product.epilogue),
    }
    if aux is not None:
        attributes |= {AUX_STRIDE: ctypes.c_int64(product.m), AUX: Pointer(aux.data_ptr())}
        if aux.dtype != product.written:
            attributes[AUX_DTYPE] = ctypes.c_int32(DTYPES[aux.dtype])
    if bias is not None:
        attributes[BIAS] = Pointer(bias.data_ptr())
    try:
        for attribute, value in attributes.items():
            size = ctypes.c_size_t(ctypes.sizeof(value))
            check(library.cublasLtMatmulDescSetAttribute(made, attribute, ctypes.byref(value), size))
        yield made
    finally:
        check(library.cublasLtMatmulDescDestroy(made))


def plans(product: Product, described: Pointer) -> list[Plan]:
    """The library's choices for a product, best first: those of the first one's kind and number of partial sums."""
    library, (m, n, k), dtype = load(), product[-3:], DTYPES[product.dtype]
    a, b = layout(dtype, *((k, m) if product.transpose_a else (m, k))), layout(dtype, k, n)
    written = product.written if product.written in HALF else torch.bfloat16
    c, d = (layout(DTYPES[kind], m, n) for kind in (written, product.written))
    preference, workspace = Pointer(), ctypes.c_uint64(WORKSPACE_BYTES)
    check(library.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
    size = ctypes.c_size_t(ctypes.sizeof(workspace))
    check(library.cublasLtMatmulPreferenceSetAttribute(preference, MAX_WORKSPACE, ctypes.byref(workspace), size))
    found, count = (Heuristic * CANDIDATES)(), ctypes.c_int()
    results = CANDIDATES, found, ctypes.byref(count)
    state = handle(product.device)
    check(library.cublasLtMatmulAlgoGetHeuristic(state, described, a, b, c, d, preference, *results))
    check(library.cublasLtMatmulPreferenceDestroy(preference))
    usable = [heuristic for heuristic in found[: count.value] if heuristic.state == 0]
    return [Plan(heuristic, a, b, c, d) for heuristic in usable if order_of(heuristic) == order_of(usable[0])]


def layout(dtype: int, rows: int, columns: int) -> Pointer:
    """A matrix of columns of `rows` numbers, as BLAS stores it; the library forgets it with the result."""
    made, library = Pointer(), load()
    size = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows)
    check(library.cublasLtMatrixLayoutCreate(ctypes.byref(made), dtype, *size))
    weakref.finalize(made, library.cublasLtMatrixLayoutDestroy, Pointer(made.value)).atexit = False
    return made


def order_of(heuristic: Heuristic) -> tuple[int, int]:
    """The kind of an algorithm, and the number of parts of a sum that it adds separately."""
    values = ctypes.c_int32(), ctypes.c_int32()
    for attribute, value in zip((ALGORITHM, SPLITS), values, strict=True):
        size, written = ctypes.c_size_t(ctypes.sizeof(value)), ctypes.c_size_t()
        given = ctypes.byref(heuristic), attribute, ctypes.byref(value), size, ctypes.byref(written)
        check(load().cublasLtMatmulAlgoConfigGetAttribute(*given))
    return values[0].value, values[1].value


def check(status: int) -> None:
    """Raise RuntimeError for a call that did not succeed."""
    if status:
        raise RuntimeError(f"cuBLASLt failed with status {status} (cublasStatus_t).")
