"""What attention/flash/launch.py writes for a recorded call does with other tensors what the call does."""

import copy
import ctypes
import inspect
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch
from torch import Tensor, nn
from torch._C._dynamo.guards import _empty_strided_cpu  # type: ignore[attr-defined]
from torch.autograd import forward_ad
from triton.backends.nvidia import driver as nvidia
from triton.compiler import CompiledKernel

from attention.flash import launch as module
from attention.flash.launch import Known, Recording, UnrecordedError, Writer, launch
from attention.flash.tiles import Descriptor, strided


def add(x: int, y: int, out: int, n: int) -> None:
    """out = x + y of n fp32 numbers at these addresses."""
    a, b, c = ((ctypes.c_float * n).from_address(address) for address in (x, y, out))
    for i in range(n):
        c[i] = a[i] + b[i]


class Kernel:
    """`add` as Triton's kernels are called: its arguments are (x, (y,), out, n) and a constant."""

    arg_names = ("x", "ys", "out", "n", "CONSTANT")

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def start(x, ys, out, n, CONSTANT):
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
def driver(monkeypatch):
    active = SimpleNamespace(get_current_stream=lambda device: "stream", utils=None)
    monkeypatch.setattr(module.triton.runtime, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(module, "_empty_strided_cuda", _empty_strided_cpu)
    monkeypatch.setattr(module, "get_device", Mock(return_value=-1))  # of a CPU
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
    assert replay([same, torch.randn(9)[1:].view(2, 4)]) is None  # which is not aligned
    module.get_device.return_value = 1
    assert replay([same, same]) is None


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


def noted(*meta: Any) -> tuple[Any, Mock]:
    """A kernel with a function that stands for its launch; meta: of its tensor descriptors."""
    run, kernel = SimpleNamespace(**vars(Run)), MagicMock(arg_names=("x", "out"))
    run.launch = Mock()
    compiled = SimpleNamespace(run=run, metadata=SimpleNamespace(tensordesc_meta=meta), function=7, packed_metadata=())
    kernel.__getitem__.return_value.return_value = compiled
    return kernel, run.launch


def test_descriptors_are_encoded_once_for_an_address(monkeypatch):
    fill = Mock(side_effect=lambda address, *_: ("descriptor", address))
    monkeypatch.setattr(module.triton.runtime.driver.active, "utils", SimpleNamespace(fill_tma_descriptor=fill))
    kernel, started = noted({"swizzle": 0, "elem_size": 4, "elem_type": 8, "block_size": [2, 4]})

    def described(tensors):
        (x,) = tensors
        launch(kernel, (3,), Descriptor(x, [*x.shape], [*x.stride()], [2, 4]), out := torch.empty_like(x))
        return (out,)

    tensors = torch.randn(3, 2, 4).unbind()
    replay = replay_of(described, tensors[:1])
    for x in tensors * 2:
        (out,) = replay([x])
        assert started.call_args.args[13:] == (("descriptor", x.data_ptr()), 2, 4, 4, 1, out.data_ptr())
    layout = (0, 4, nvidia.TMA_DTYPE_DEVICE_TO_HOST[8], [2, 4], (2, 4), (4, 1), 0)
    assert [call.args for call in fill.call_args_list] == [(x.data_ptr(), *layout) for x in tensors]


def test_keys_that_grow_are_passed_with_the_strides_and_the_length_that_they_have():
    kernel, started = noted()

    def attend(tensors):
        launch(kernel, (3,), strided(tensors[1]), out := torch.empty_like(tensors[0]))
        return (out,)

    q, k = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 300, 8)
    replay = replay_of(attend, [q, k[:, :, :130]])
    for x in (k[:, :, :131], k[:, :, :255].clone(), k.transpose(1, 2).contiguous().transpose(1, 2)):
        (out,) = replay([q, x])
        strides, shape = x.stride()[:3], (0, *x.shape[1:])
        assert started.call_args.args[13:] == ((x.data_ptr(), *strides, shape), out.data_ptr())


@pytest.mark.parametrize(
    ("T", "S", "D", "same"),
    [(129, 255, 64, True), (129, 132, 20, False), (128, 129, 64, False), (143, 144, 64, False), (1, 2, 64, False)],
    ids=["one unit", "strides that 16 does not divide", "two units", "a length that 16 divides", "a length of 1"],
)
def test_keys_of_other_lengths_share_a_replay_where_the_kernel_is_the_same(T, S, D, same):
    known, q = Known(), torch.zeros(2, 4, 1, D)
    a, b = ((q, x, x, q) for x in (torch.zeros(2, 2, T, D), torch.zeros(2, 2, S, D)))
    known.put("known", (), a, grows=True)
    assert (known.get((), b, grows=True) == "known") == same
    known.put("fixed", "", a)
    assert known.get("", b) is None


def test_a_call_is_known_by_all_that_launches_depend_on():
    known, (x, y) = Known(), torch.zeros(2, 4, 8, 16)
    known.put("known", "causal", (x, x))
    assert known.get("causal", (x, x)) == known.get("causal", (y, x)) == "known"
    for other in (x[1:], x.transpose(0, 1), x.mT.contiguous().mT, x.double(), nn.Parameter(x)):
        assert known.get("causal", (y, other)) is None
    for one, arguments, tensors in ((known, "full", (x, y)), (copy.copy(known), "causal", (x, y))):
        assert one.get(arguments, tensors) is None
    for watching in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu"), Recording()):
        with watching:
            assert known.get("causal", (x, y)) is None
    with forward_ad.dual_level():
        assert known.get("causal", (x, forward_ad.make_dual(y, y))) is None


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
