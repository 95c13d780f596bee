"""Properties of Triton and of this machine's GPU, CUDA graphs, and the namespace of operators registered with torch."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps
from importlib.util import find_spec
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

HAS_TRITON = find_spec("triton") is not None  # available for Linux only
if HAS_TRITON:
    import triton
    import triton.language as tl

    INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)  # kernels run in Triton's interpreter, without a GPU
    LOG2_E = tl.constexpr(1.4426950408889634)

# Custom operators are global: so the checkout's attention and an installed gpt_attention have different namespaces.
NAMESPACE = __name__.partition(".")[0]
Function = TypeVar("Function", bound=Callable[..., Any])
ALIGNMENT = 16  # bytes: Hopper's copy engine needs it for a tensor's start and every stride


def interpreter_refusal() -> str | None:
    """Why Triton's interpreter cannot run kernels here, and what to install; None if it can."""
    import numpy  # which the interpreter needs, and nothing else here

    versions = [tuple(map(int, x.__version__.split(".")[:2])) for x in (triton, numpy)]
    if versions[0] >= (3, 7) or versions[1] < (2, 4):
        return None
    return f"the interpreter of Triton {triton.__version__} fails with NumPy {numpy.__version__}; install 'numpy<2.4'"


capability_of = lru_cache(torch.cuda.get_device_capability)  # torch takes microseconds, and a call asks several times


def capability(device: torch.device) -> tuple[int, int]:
    """The GPU's compute capability; Triton's interpreter stands in for a Hopper GPU.

    A device without a number is the current GPU, which may be another one next time.
    """
    if device.type != "cuda":
        return 9, 0
    return torch.cuda.get_device_capability(device) if device.index is None else capability_of(device)


def multiprocessors(device: torch.device) -> int:
    """The GPU's multiprocessors, each of which runs at least one program at a time; 1 in Triton's interpreter."""
    return 1 if INTERPRET.value else multiprocessors_of(device)


@lru_cache
def multiprocessors_of(device: torch.device) -> int:
    """`multiprocessors` of a GPU with a number, as tensors have it."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class DeviceOf(torch.cuda.device_of):
    """While it is open, x's GPU is the current one, and this thread has its context.

    A thread of autograd's has no context before its first launch. Triton makes a launch's tensor descriptors, which
    need one, earlier. A question to the driver brings the context for less than a launch.
    """

    def __init__(self, x: Tensor) -> None:
        super().__init__(x)
        self.on_gpu = x.is_cuda

    def __enter__(self) -> None:
        super().__enter__()
        if self.on_gpu:
            torch.cuda.is_current_stream_capturing()


def custom_operator(name: str, function: Callable[..., Any], fake: Callable[..., Any] | None) -> Any:
    """A function of tensors as a custom operator that torch.compile does not look into.

    It has no gradient of its own: it is called by an autograd function, or where none is recorded. A gradient, which
    torch.library.custom_op always gives, makes a call take 1.5 times as long.

    fake  its results for tensors without data; None: a compiled graph has what it calls in its place, with gradients
    """
    path, key = f"{NAMESPACE}::{name}", "CompositeExplicitAutograd" if fake else "CompositeImplicitAutograd"
    torch.library.define(path, torch.library.infer_schema(function, mutates_args=()), tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(path, key, function)
    if fake is not None:
        torch.library.register_fake(path, fake)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def constant_when_compiled(function: Function) -> Function:
    """Cache a function that the compiler calls while it traces, and whose result it treats as a constant.

    torch.compiler.assume_constant_result marks it too, but loads the compiler, which doubles the time of an import.
    """
    cached = lru_cache(maxsize=1024)(function)  # whose wrapper the compiler would trace

    @wraps(function)
    def constant(*arguments: Any) -> Any:
        return cached(*arguments)

    vars(constant)["_dynamo_marked_constant"] = True
    return cast(Function, constant)


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> Iterator[None]:
    """Capture what this thread launches on `stream`, while Python's garbage collector pauses.

    A CUDA graph that is destroyed during the capture of another invalidates it, and one in a reference cycle is
    destroyed whenever Python collects garbage. torch stopped collecting before each capture (pytorch/pytorch#158193).
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        # Other threads, which prepare batches, may allocate.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            yield
    finally:
        if enabled:
            gc.enable()
