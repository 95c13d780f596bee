"""Triton's interpreter, in which kernels run where there is no GPU, made four times as fast.

Triton chooses between compiler and interpreter when it is imported, so `hasten` comes before any kernel. What it
replaces computes the same: tests/attention/test_interpreter.py compares the bits with those of the interpreter without
it.
The time of an attention, forward and backward, with and without each replacement alone:

    none 3.5 s   all 0.96 s   all but languages 2.3 s, overflow 1.5 s, dtypes, blocks or tensors 1.2 s each
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.runtime import interpreter

ROOT = Path(__file__).parents[1]


def hasten() -> None:
    """Skip work of Triton's interpreter whose result it does not use, or has computed before."""
    replace_language_once()
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    look_dtypes_up_once()
    derive_blocks_once()
    derive_tensors_once()


def replace_language_once() -> None:
    """The functions of tl are replaced when a kernel starts, and again whenever it calls a function: not again."""
    replace = interpreter._patch_lang

    def replace_once(fn: Any) -> Any:
        replaced = not any(tl.core.is_builtin(language.load) for language in (tl, tl.core))
        return interpreter._LangPatchScope() if replaced else replace(fn)

    interpreter._patch_lang = replace_once


def look_dtypes_up_once() -> None:
    """Each lookup of numpy's dtype builds a table of all of them."""
    look_up: Any = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def look_up_once(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = look_up(dtype)
        return known[name]

    interpreter._get_np_dtype = look_up_once


def derive_blocks_once() -> None:
    """A block's type checks its shape and prints its name each time it is made."""
    initialise: Any = tl.block_type.__init__
    known: dict[tuple, tuple] = {}

    def initialise_once(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *shape)
        if key not in known:
            initialise(self, element_ty, shape)
            known[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = known[key]

    tl.block_type.__init__ = initialise_once


def derive_tensors_once() -> None:
    """A tensor derives its shape and size from its type."""
    initialise: Any = tl.tensor.__init__
    known: dict[str, tuple] = {}

    def initialise_once(self: Any, handle: Any, type: Any) -> None:
        if type.name not in known:
            initialise(self, handle, type)
            known[type.name] = self.shape, self.numel, self.dtype
        self.handle, self.type = handle, type
        self.shape, self.numel, self.dtype = known[type.name]

    tl.tensor.__init__ = initialise_once


def run_interpreted(script: str) -> None:
    """Run a script with Triton's interpreter: here if this process interprets kernels, else in a new process."""
    if triton.knobs.runtime.interpret:
        exec(script, {})
        return
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", script]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
