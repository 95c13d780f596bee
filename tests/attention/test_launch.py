"""What attention/flash/launch.py writes for a recorded call does with other tensors what the call does."""

import ctypes
import inspect
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.backends.nvidia import driver as nvidia
from triton.compiler import CompiledKernel

from attention.flash import launch as module
from attention.flash.launch import Recording, UnrecordedError, Writer, launch


def add(x: int, y: int, out: int, n: int) -> None:
    """out = x + y of n fp32 numbers at these addresses."""
    a, b, c = ((ctypes.c_float * n).from_address(address) for address in (x, y, out))
    for i in range(n):
        c[i] = a[i] + b[i]


class Kernel:
    """`add` as Triton's kernels are called: its arguments are (x, (y,), out, n) and a constant."""

    arg_names = ("x", "ys", "out", "n", "CONSTANT")

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def start(x: Tensor, ys: tuple[Tensor], out: Tensor, n: int, CONSTANT: int) -> SimpleNamespace:
            add(x.data_ptr(), ys[0].data_ptr(), out.data_ptr(), n)
            return SimpleNamespace(
                run=Run(), metadata=SimpleNamespace(), function=7, packed_metadata=(4, 1, 0), CONSTANT=CONSTANT
            )

        return start


class Run:
    """A launcher of Triton 3.6."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False

    def launch(self, *arguments: Any) -> None:
        head, (x, ys, out, n, constant) = arguments[:13], arguments[13:]
        assert head == (3, 1, 1, "stream", 7, False, False, None, None, (4, 1, 0), None, None, None)
        assert constant is None
        add(x, ys[0], out, n)


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    active = SimpleNamespace(get_current_stream=lambda device: "stream", utils=None)
    monkeypatch.setattr(module.triton.runtime, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(Run, "launch", Run().launch)  # not a function, as Triton's in C


def compute(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """((x + y) + x, zeros but for x's second row in the third), by a tensor that is not returned."""
    x, y = tensors
    between, both = torch.empty_like(x), x.new_zeros(3, 4)
    out = x.new_empty(2, 4)
    launch(Kernel(), (3,), x, (y,), between, 8, CONSTANT=1)
    launch(Kernel(), (3,), between, (x,), out, 8, CONSTANT=1)
    launch(Kernel(), (3,), both, (between,), both[1:], 8, CONSTANT=1)
    return out, both


def replay_of(function: Any, tensors: Sequence[Tensor]) -> Any:
    with Recording() as recording:
        results = function(tensors)
    return Writer(recording, tensors, results).replay()


def test_a_replay_computes_what_the_call_computes():
    replay = replay_of(compute, [torch.randn(2, 4), torch.randn(2, 4)])
    for _ in range(3):
        tensors = [torch.randn(2, 4), torch.randn(2, 4)]
        for got, expected in zip(replay(tensors), compute(tensors), strict=True):
            assert got.stride() == expected.stride()
            assert torch.equal(got, expected)
    same = torch.randn(2, 4)
    assert torch.equal(replay([same, same])[0], compute([same, same])[0])


KEPT = torch.randn(2, 4)


def keeps_a_tensor(tensors: Sequence[Tensor]) -> tuple[Tensor]:
    launch(Kernel(), (3,), KEPT, (KEPT,), out := torch.empty_like(KEPT), 8, CONSTANT=1)
    return (out,)


UNRECORDED: dict[str, Any] = {
    "copies": lambda tensors: (compute([tensors[0].clone(), tensors[1]])[0],),
    "keeps a tensor": keeps_a_tensor,
    "returns a part": lambda tensors: (compute(tensors)[0][:1],),
    "returns its arguments": tuple,
}


@pytest.mark.parametrize("function", UNRECORDED.values(), ids=UNRECORDED)
def test_a_call_that_does_more_than_allocate_and_launch_is_not_replayed(function):
    with pytest.raises(UnrecordedError):
        replay_of(function, [torch.randn(2, 4), torch.randn(2, 4)])


def test_this_triton_has_the_names_that_replays_use():
    """As on a GPU: without them every call would go through Triton."""
    source = " ".join(inspect.getsource(nvidia.CudaLauncher).split())
    head = "self.launch(gridX, gridY, gridZ, stream, function, self.launch_cooperative_grid, self.launch_pdl, "
    hooks = "kernel_metadata, launch_metadata, launch_enter_hook, launch_exit_hook, "
    scratch, signature = "global_scratch, profile_scratch, ", "self.arg_annotations, self.kernel_signature, "
    assert head + scratch + "*args)" in source or head + hooks + scratch + signature in source
    assert {"global_scratch_size", "profile_scratch_size"} <= set(re.findall(r"self\.(\w+)", source))
    launcher = nvidia.wrap_handle_tensordesc(print, {0: "tensordesc<fp16[1, 64]>"}, [{}])
    assert inspect.getclosurevars(launcher).nonlocals["launcher"] is print
    assert nvidia.TMA_DTYPE_DEVICE_TO_HOST[8] == 10
    assert "fill_tma_descriptor" in inspect.getsource(nvidia.CudaUtils)
    compiled = inspect.getsource(CompiledKernel)
    assert all(f"self.{name} = " in compiled for name in ("packed_metadata", "function", "metadata"))
