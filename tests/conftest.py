"""Settings that must be made before torch and Triton are imported, here and in the processes that tests start.

The slowest files come first, so that the workers finish together: those that compile for minutes, then those most of
which wait for other processes.
"""

import gc
import math
import os
from collections.abc import Callable, Generator

import pytest

gc.disable()  # until the tests are collected: it would visit all that is imported, again and again

# The tests' models are small: threads would wait for each other longer than they work.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
import yaml  # noqa: E402

# Hydra reads its files with this class, hundreds of times. The one in C saves an eighth of those tests' time.
yaml.SafeLoader = yaml.CSafeLoader

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # without a GPU the Triton kernels run in Triton's interpreter


def hasten_the_interpreter() -> None:
    """Skip work whose result Triton's interpreter does not use, which more than halves its time.

    It replaces the functions of tl when a kernel starts, and needlessly again whenever the kernel calls a function. It
    also computes in int64 whether a sum overflows, which it uses in debug mode only, builds a table of all dtypes for
    each lookup, and derives shape and size of a tensor from its type for each result anew.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    replace = interpreter._patch_lang

    def replace_once(fn):
        replaced = not any(tl.core.is_builtin(language.load) for language in (tl, tl.core))
        return interpreter._LangPatchScope() if replaced else replace(fn)

    interpreter._patch_lang = replace_once
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)

    look_up, found = interpreter._get_np_dtype, {}

    def look_up_once(dtype):
        name = dtype.scalar.name
        if name not in found:
            found[name] = look_up(dtype)
        return found[name]

    interpreter._get_np_dtype = look_up_once

    initialise_block, blocks = tl.block_type.__init__, {}

    def initialise_block_once(self, element_ty, shape):
        key = (element_ty.name, *shape)
        if key not in blocks:
            initialise_block(self, element_ty, shape)
            blocks[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = blocks[key]

    tl.block_type.__init__ = initialise_block_once
    initialise_tensor, tensors = tl.tensor.__init__, {}

    def initialise_tensor_once(self, handle, type):
        if type.name not in tensors:
            initialise_tensor(self, handle, type)
            tensors[type.name] = self.shape, self.numel, self.dtype
        self.handle, self.type = handle, type
        self.shape, self.numel, self.dtype = tensors[type.name]

    tl.tensor.__init__ = initialise_tensor_once
    equal = tl.dtype.__eq__
    tl.dtype.__eq__ = lambda self, other: self is other or equal(self, other)


if os.environ.get("TRITON_INTERPRET") == "1":
    hasten_the_interpreter()


@pytest.fixture
def horizons(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Gives ALiBi's calls of every length horizons; called with False, it gives none to any."""
    from attention.flash import call

    def switch(on: bool) -> None:
        monkeypatch.setattr(call, "HORIZONS_FROM", 1 if on else math.inf)

    switch(True)
    return switch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def turn(item: pytest.Item) -> int:
        if item.path.name.startswith("test_compiled_"):
            return 0
        return 1 if item.path.parent.name == "tests" or "training" in item.path.parts else 2

    items.sort(key=turn)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    result = yield
    gc.freeze()  # else every later run of the collector visits all that has been imported
    gc.enable()
    return result
