"""What the host does for a call, done once for all calls alike.

A short call takes the host longer than the GPU: it chooses kernels, lays out their arguments, and Triton looks at each
of them. All of that but the addresses follows from what the call is like: its arguments that are not tensors, and the
shapes, strides and dtypes of its tensors. So the second of such calls is recorded: what it allocates, and what it
launches. Later ones run a function that was written for them: it allocates, by the allocator of compiled code, and
hands the addresses to the compiled kernels. Tensors are compared by torch's TensorGuards, in C++, as for a compiled
function: in a model each line of Python takes the host five times as long as in a loop.

A call that does more than allocate and launch is not replayed. What is private to Triton (3.6 to 3.9), TensorGuards and
that allocator stand in this file alone; where a release has other names, nothing is replayed.
"""

import inspect
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..gpu import ALIGNMENT
from .tiles import Strided

try:
    from torch._C._dynamo.guards import TensorGuards, _empty_strided_cuda  # type: ignore[attr-defined]
except ImportError:  # private to torch: without them no call is known
    TensorGuards = None  # type: ignore[assignment,misc]

aten = torch.ops.aten
ZEROS = (aten.zeros.default, aten.new_zeros.default)
ALLOCATIONS = (aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default, *ZEROS)
UNIT = triton.language.constexpr(128)  # keys: decode has no more splits than these fill
RUNTIME = triton.knobs.runtime
get_device: Any = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)  # which takes longer
GRAIN = 512  # bytes, as torch's allocator aligns tensors
Replay = Callable[[Sequence[Tensor]], Any]  # None for tensors that it cannot take

MOST_KNOWN, MOST_ALIKE = 1024, 8  # kinds of calls, and calls of a kind, so that nothing grows for ever


class UnrecordedError(Exception):
    """A call cannot be replayed."""


class Launch(NamedTuple):
    """The launch of a kernel. So many constants follow its arguments."""

    compiled: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    n_constants: int


class Recording(TorchDispatchMode):
    """The tensors that a call allocates, which of them are zero, and its launches.

    does_more  whether it also does something else
    """

    def __init__(self) -> None:
        super().__init__()
        self.rooms: list[tuple[Tensor, bool]] = []
        self.launches: list[Launch] = []
        self.does_more = False

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = operator(*arguments, **(keywords or {}))
        if operator in ALLOCATIONS:
            self.rooms.append((result, operator in ZEROS))
        elif not operator.is_view:
            self.does_more = True
        return result


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """kernel[grid](*arguments, **constants), with Triton's options. All kernels are launched by this function."""
    compiled = kernel[grid](*arguments, **constants)
    modes = _get_current_dispatch_mode_stack()
    if modes and isinstance(modes[-1], Recording):
        modes[-1].launches.append(Launch(compiled, grid, arguments, len(kernel.arg_names) - len(arguments)))


class Known:
    """What is known of calls, by their arguments that are not tensors and by what their tensors are like.

    A call is like another if its tensors have the same shapes, strides, dtypes and devices, and if they need gradients
    and are watched by torch's modes, autocast among them, in the same way. A copy knows nothing.
    """

    def __init__(self) -> None:
        self.found: dict[Hashable, list[Any]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Known, ()

    def get(self, arguments: Hashable, tensors: Sequence[Tensor], grows: bool = False) -> Any:
        """The value of a call that is like this one; None where there was none.

        grows  whether tensors[1] and [2] grow from call to call, (B, H, T, D): launches have them as `strided` gives
               them, and depend on T besides by the number of units alone
        """
        for is_like, value in self.found.get(likeness(arguments, tensors, grows), ()):
            if is_like(*tensors):
                return value
        others = distinct(tensors)
        return None if others is tensors else self.get(arguments, others, grows)

    def put(self, value: Any, arguments: Hashable, tensors: Sequence[Tensor], grows: bool = False) -> None:
        """Note the value for calls that are like this one."""
        if TensorGuards is None:
            return
        if len(self.found) >= MOST_KNOWN:
            self.found.clear()
        alike = self.found.setdefault(likeness(arguments, tensors, grows), [])
        alike.insert(0, (self.guard(tensors, grows), value))
        del alike[MOST_ALIKE:]

    @staticmethod
    def guard(tensors: Sequence[Tensor], grows: bool = False) -> Callable[..., bool]:
        """A function of other tensors that tells whether they are like these."""
        tensors = distinct(tensors)
        sizes, strides = [[*x.shape] for x in tensors], [[*x.stride()] for x in tensors]
        for i in (1, 2) if grows else ():
            sizes[i][2], strides[i][:3] = None, [None] * 3  # type: ignore[list-item]
        guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)  # type: ignore[arg-type]
        check = guards.check  # which does not see tangents
        return lambda *others: forward_ad._current_level < 0 and check(*others)


def distinct(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Tensors as objects that differ: TensorGuards finds no call alike that has one of them twice."""
    return tensors if len({*map(id, tensors)}) == len(tensors) else [x.view_as(x) for x in tensors]


def likeness(arguments: Hashable, tensors: Sequence[Tensor], grows: bool) -> Hashable:
    """The same for calls that are alike, see `Known`; few others have it too."""
    grown = grows and growth(tensors[1].shape, tensors[1].stride(), tensors[2].shape, tensors[2].stride())
    return arguments, torch.is_grad_enabled(), len(tensors), tensors[0].shape, grown


@lru_cache(maxsize=1024)
def growth(*layouts: tuple[int, ...]) -> Hashable:
    """What launches depend on of two tensors that grow, given their shapes and strides: besides T's units, all that
    Triton compiles a kernel for."""
    k, k_strides, v, v_strides = layouts
    lengths = *k[2:3], *v[2:3]
    kinds = ((x == 1, x % 16 == 0, x >= 2**31) for x in (*lengths, *k_strides, *v_strides))
    return *(T // -UNIT.value for T in lengths), *kinds


def replayed(
    function: Callable[..., Any],
    tensors: Sequence[Tensor],
    rest: tuple[Any, ...],
    replays: Any = None,
    also: Hashable = None,
    grows: bool = False,
) -> Any:
    """function(tensors, *rest), whose results are tensors that it allocates.

    replays  those of calls alike, where they are known: all but `also` follows from it
    grows    see `Known.get`
    """
    if not tensors[0].is_cuda:
        return function(tensors, *rest)
    if replays is None and (replays := CALLS.get(rest, tensors, grows)) is None:
        CALLS.put(replays := {}, rest, tensors, grows)
    key = function, also
    replay = replays.get(key)
    if replay and (results := replay(tensors)):
        return results
    # A call that comes once is not worth a recording, and tensors at odd addresses, or on another GPU, are rare.
    others = (has_hooks(), tensors[0].get_device() != get_device(), *(x.data_ptr() % ALIGNMENT for x in tensors))
    if replay is not False or any(others):
        replays.setdefault(key, False)
        return function(tensors, *rest)
    with Recording() as recording:
        results = function(tensors, *rest)
    try:
        replays[key] = Writer(recording, tensors, results).replay()
    except (UnrecordedError, ImportError, AttributeError, KeyError, StopIteration):  # Triton has other names
        replays[key] = lambda _: None
    return results


def same(x: Tensor, room: Tensor) -> bool:
    """Whether x is all of a tensor that was allocated; torch's objects for it may be several."""
    return x.data_ptr() == room.data_ptr() and x.shape == room.shape and x.stride() == room.stride()


def has_hooks() -> Any:
    """Whether a profiler is to hear of each launch."""
    enter, leave = RUNTIME.launch_enter_hook, RUNTIME.launch_exit_hook
    return getattr(enter, "calls", enter) or getattr(leave, "calls", leave)


CALLS = Known()  # (function, also) -> Replay of each; False: one such call was seen


class Writer:
    """Writes the function that does with other tensors what was recorded with these.

    names         of values in its source
    lines         of its source
    descriptors   expressions of its tensor descriptors, which depend on `described`, addresses, alone
    """

    def __init__(self, recording: Recording, tensors: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        self.recording, self.tensors, self.results = recording, tensors, results
        self.driver = triton.runtime.driver.active
        self.names: dict[str, Any] = {"empty": _empty_strided_cuda, "cache": lru_cache(128)}
        self.names |= {"get_device": get_device, "has_hooks": has_hooks}
        self.lines: list[str] = []
        self.descriptors: list[str] = []
        self.described: dict[str, None] = {}

    def replay(self) -> Replay:
        """Raises UnrecordedError; another exception where Triton has other names."""
        if self.recording.does_more:
            raise UnrecordedError
        self.lines += [f"p{i} = tensors[{i}].data_ptr()" for i in range(len(self.tensors))]
        addresses, device = " | ".join(f"p{i}" for i in range(len(self.tensors))), self.tensors[0].get_device()
        self.lines.append(f"if ({addresses}) % {ALIGNMENT} or get_device() != {device} or has_hooks(): return")
        self.allocate()
        self.lines.append(f"stream = {self.value(self.driver.get_current_stream)}({device})")
        launches = [self.launch(call) for call in self.recording.launches]
        described = ", ".join(self.described)
        # To encode them takes longer than a launch, and layers have the same addresses each step. They need a context,
        # which a thread of autograd's lacks before its first launch: a question to the driver brings it.
        context = self.value(torch.cuda.is_current_stream_capturing)
        describe = f"@cache\ndef describe({described}):\n {context}()\n return {', '.join(self.descriptors)},\n"
        if self.descriptors:
            self.lines.append(f"d = describe({described})")
        self.lines += [*launches, f"return {', '.join(map(self.result, self.results))},"]
        exec(describe * bool(described) + "def replay(tensors):\n " + "\n ".join(self.lines), self.names)
        return self.names["replay"]

    def allocate(self) -> None:
        """The results and zeros are tensors; all others are parts of one."""
        size, parts = 0, []
        for i, (room, is_zero) in enumerate(self.recording.rooms):
            if is_zero or any(same(room, x) for x in self.results):
                layout = f"{tuple(room.shape)}, {room.stride()}, {self.value(room.dtype)}"
                self.lines.append(f"t{i} = empty({layout}){'.zero_()' * is_zero}")
                self.lines.append(f"r{i} = t{i}.data_ptr()")
            else:
                parts.append(f"r{i} = start + {size}")
                size += -(-room.nbytes // GRAIN) * GRAIN
        if size:
            self.lines.append(f"rest = empty(({size},), (1,), {self.value(torch.uint8)})")
            self.lines += ["start = rest.data_ptr()", *parts]

    def launch(self, call: Launch) -> str:
        """A line that launches a kernel without Triton's look at its arguments."""
        compiled, grid, arguments, n_constants = call
        run, descriptions = compiled.run, iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
        if run.global_scratch_size or run.profile_scratch_size or getattr(run, "gsan_enabled", False):
            raise UnrecordedError
        parts = []
        for x in arguments:
            is_descriptor = isinstance(x, TensorDescriptor | GluonDescriptor)
            parts += self.descriptor(x, next(descriptions)) if is_descriptor else [self.argument(x)]
        parts += ["None"] * n_constants
        head = [*map(str, (*grid, 1, 1)[:3]), "stream", str(compiled.function)]
        head += [str(run.launch_cooperative_grid), str(run.launch_pdl)]
        metadata, none = self.value(compiled.packed_metadata), ["None"]
        if hasattr(run, "arg_annotations"):  # since Triton 3.7
            head += [metadata, *none * 5, self.value(run.arg_annotations), self.value(run.kernel_signature)]
            parts = [f"({', '.join(parts)},)"]
        else:
            head += [*none * 2, metadata, *none * 3]
        self.value(compiled)  # which would be unloaded without a reference
        function = run.launch  # in C; where there are descriptors, within a function that makes them
        if inspect.isfunction(function):
            function = inspect.getclosurevars(function).nonlocals["launcher"]
        return f"{self.value(function)}({', '.join(head + parts)})"

    def descriptor(self, x: Any, description: dict[str, Any]) -> list[str]:
        """The arguments of the kernel in C for a tensor descriptor."""
        from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST as DTYPES

        utils = self.driver.utils
        fill = getattr(utils, "fill_tma_descriptor_tiled", None) or utils.fill_tma_descriptor  # before Triton 3.7
        shape, strides = [*map(str, x.shape)], [*map(str, x.strides)]
        numbers = f"{description['swizzle']}, {description['elem_size']}, {DTYPES[description['elem_type']]}"
        layout = f"{self.value(description['block_size'])}, ({', '.join(shape)},), ({', '.join(strides)},)"
        address = self.address(x.base)
        self.described[address.split()[0]] = None
        self.descriptors.append(f"{self.value(fill)}({address}, {numbers}, {layout}, 0)")
        return [f"d[{len(self.descriptors) - 1}]", *shape, *strides]

    def argument(self, x: Any) -> str:
        """A kernel's argument."""
        if isinstance(x, Tensor):
            return self.address(x)
        if isinstance(x, Strided) and (i := self.place(x.pointer)) in (1, 2):  # which may grow, see `likeness`
            return f"(p{i}, *tensors[{i}].stride()[:3], (0, *tensors[{i}].shape[1:]))"
        if isinstance(x, tuple):
            return f"({''.join(f'{self.argument(y)}, ' for y in x)})"
        return self.value(x)

    def place(self, x: Tensor) -> int | None:
        """Of a tensor among those of the call; None for others."""
        return next((i for i, y in enumerate(self.tensors) if x is y), None)

    def address(self, x: Tensor) -> str:
        """Of a tensor of the call, or in a tensor that it allocates. Raises UnrecordedError for others."""
        if (i := self.place(x)) is not None:
            return f"p{i}"
        for i, (room, _) in enumerate(self.recording.rooms):
            if 0 <= (offset := x.data_ptr() - room.data_ptr()) < room.nbytes:
                return f"r{i} + {offset}"
        raise UnrecordedError

    def result(self, x: Tensor) -> str:
        """Raises UnrecordedError for a tensor that is no whole one that the call allocates."""
        for i, (room, _) in enumerate(self.recording.rooms):
            if same(x, room):
                return f"t{i}"
        raise UnrecordedError

    def value(self, x: Any) -> str:
        """A value that is the same in all calls."""
        if x is None or isinstance(x, int):
            return str(x)
        name = f"value{len(self.names)}"
        self.names[name] = x
        return name
