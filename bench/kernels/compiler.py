"""Compiles Triton kernels without a GPU, and reports the registers and memory that each of them uses.

The launch functions are called on tensors in the CPU's memory. `collect` notes which kernels they would compile, and
`compiled` compiles one of them. Triton chooses between compiler and interpreter when it is imported: TRITON_INTERPRET
must not be set.
"""

import ast
import contextlib
import io
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import DependenciesFinder, JITCallable, JITFunction

from attention import gpu
from bench.kernels.record import Figures, code, short_digest

SHARED = {80: 101_376, 90: 232_448}  # architecture -> bytes of a multiprocessor that a program may have
REGISTERS = 65_536  # of a multiprocessor; a thread's are a multiple of 8


class Launch(NamedTuple):
    """A call of launch functions, and its name in the record."""

    name: str
    call: Callable[[], Any]


class Kernel(NamedTuple):
    """A kernel that a launch needs, before it is compiled.

    name     in the record: the launch's name, and the function's
    sources  digest of everything that the compiled code depends on, besides Triton: see `digest_of`
    source, target, options  as triton.compile takes them
    """

    name: str
    sources: str
    source: ASTSource
    target: GPUTarget
    options: dict[str, Any]


class Report(NamedTuple):
    """A compiled kernel.

    figures   for the record
    threads   of a program
    overlaps  offsets in shared memory of barriers that overlap other data
    """

    figures: Figures
    threads: int
    overlaps: tuple[int, ...]


def collect(architecture: int, launches: Iterable[Launch]) -> Iterator[Kernel]:
    """The kernels that launches on a GPU of an architecture, such as 90, would compile."""
    compilations: list[tuple[JITFunction, ASTSource, dict[str, Any], dict[str, Any]]] = []
    target = GPUTarget("cuda", architecture, 32)
    given: dict[str, Any] = {}

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        given.clear()
        given.update({name: value for name, value in kwargs.items() if name not in self.arg_names})
        launch(self, *args, grid=grid, warmup=True, **kwargs)

    def note(
        self: JITFunction, key: str, signature: Any, device: Any, constants: Any, options: Any, attrs: Any, *_: Any
    ) -> None:
        compilations.append((self, self.ASTSource(self, signature, constants, attrs), dict(given), vars(options)))

    launch = JITFunction.run
    with running(target, run), mock.patch.object(JITFunction, "_do_compile", note):
        for name, call in launches:
            call()
            for function, source, asked, options in compilations:
                label = f"{name}/{function.fn.__name__.removesuffix('_kernel')}"
                yield Kernel(label, digest_of(source, asked, target), source, target, options)
            compilations.clear()


@contextlib.contextmanager
def running(target: GPUTarget, run: Callable[..., None]) -> Iterator[None]:
    """Within this context a launch calls `run`, as if the machine had the GPU."""
    driver = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: target.arch,  # Triton has kernels for each device
        get_current_stream=lambda device: 0,
    )
    triton.runtime.driver.set_active(driver)
    properties = SimpleNamespace(multi_processor_count=132)
    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(gpu, "capability", return_value=divmod(target.arch, 10)),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=properties),
    ):
        yield


def digest_of(source: ASTSource, options: dict[str, Any], target: GPUTarget) -> str:
    """A digest of the functions that a kernel consists of, its constants, its arguments' types and its options.

    A member of an argument that is None does not count: another optional input changes no kernel that goes without it.
    """
    constants = {
        path: code_of(x) if isinstance(x, JITCallable) else str(x)
        for path, x in source.constants.items()
        if len(path) == 1 or x is not None
    }
    content = [
        code_of(source.fn),
        sorted((name, types(x)) for name, x in source.signature.items()),
        sorted(constants.items()),
        sorted((path, str(value)) for path, value in source.attrs.items() if value and path not in source.constants),
        sorted(options.items()),
        target.arch,
    ]
    return short_digest(repr(content))


def types(argument: Any) -> Any:
    """The type of an argument, or the names and types of its members that are no constants."""
    if not isinstance(argument, tuple):
        return argument
    names = getattr(argument, "_fields", range(len(argument)))
    return [(name, types(x)) for name, x in zip(names, argument, strict=True) if x != "constexpr"]


@cache
def code_of(function: JITCallable) -> str:
    """A digest of a function, of the functions that it calls and of the constants that it names.

    Unlike JITCallable.cache_key it ignores comments, docstrings, and a function's place in its file.
    """
    function = getattr(function, "__func__", function)
    source = code(function.src)
    finder = Calls(function.__name__, function.get_capture_scope(), {}, source)
    finder.visit(ast.parse(source))
    constants = {name: str(value) for (name, _), (value, _) in finder.used_global_vals.items()}
    return short_digest(finder.ret, repr(sorted(constants.items())))


class Calls(DependenciesFinder):
    """Adds the functions that a function calls to its digest."""

    def _update_hash(self, func: JITCallable) -> None:
        self.hasher.update(code_of(func).encode())


def compiled(kernel: Kernel) -> Report:
    """Compile a kernel, and read from ptxas's output what it uses."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as log,
        tempfile.TemporaryDirectory() as cache,  # replacing kernels in a larger cache waits for the disk
        mock.patch.object(triton.knobs.cache, "dir", cache),
        mock.patch.object(triton.knobs.compilation, "disable_line_info", True),  # which takes a tenth of the time
        mock.patch.object(triton.knobs.nvidia, "dump_ptxas_log", True),
    ):
        result = triton.compile(kernel.source, target=kernel.target, options=kernel.options)
    report, ptx = log.getvalue(), result.asm["ptx"]
    figures = Figures(
        ptx=short_digest(canonical(ptx)),
        registers=max(map(int, re.findall(r"Used (\d+) registers", report))),
        spilled=sum(map(int, re.findall(r"(\d+) bytes spill stores", report))),
        shared=result.metadata.shared,
        serialised=len(re.findall(r"\(C75\d+\)", report)),
    )
    # Gluon kernels place their barriers themselves; in others Triton's compiler uses the same memory again.
    overlaps = overlapping_barriers(ptx) if kernel.source.fn.is_gluon() else ()
    return Report(figures, 32 * result.metadata.num_warps, overlaps)


def canonical(ptx: str) -> str:
    """PTX without comments, and with registers and labels numbered in the order in which they appear."""
    numbers: dict[str, str] = {}
    lines = (line.partition("//")[0].rstrip() for line in ptx.splitlines())
    text = "\n".join(line for line in lines if line and not line.lstrip().startswith(".reg "))
    return re.sub(r"%[a-z]+\d+\b|\$L\w+", lambda name: numbers.setdefault(name[0], f"%{len(numbers)}"), text)


def overlapping_barriers(ptx: str) -> tuple[int, ...]:
    """Offsets in shared memory at which a kernel initialises a barrier and also stores or loads other data."""
    offsets = {register: int(n) for register, n in re.findall(r"add\.s32\s+(%r\d+), %r\d+, (\d+);", ptx)}
    offsets["global_smem"] = 0
    barriers = {offsets.get(register, 0) for register in re.findall(r"mbarrier\.init\S* \[(%r\d+)\]", ptx)}
    accesses = re.findall(r"(?:st|ld)\.shared\.\S+\s[^;]*?\[\s*(%r\d+|global_smem)(?:\s*\+\s*(\d+))?\s*\]", ptx)
    others = {offsets[where] + int(n or 0) for where, n in accesses if where in offsets}
    return tuple(sorted(barriers & others))
