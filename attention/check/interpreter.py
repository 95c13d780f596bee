"""Makes Triton's interpreter, in which kernels run without a GPU, about four times as fast, and gives it a GPU's bf16.

The tests use `hasten` too, and one of them shows that it changes no bit. The time of an attention's forward and
backward pass, without replacements, with all, and with all but some:

    none 0.53 s   all 0.12 s   all but languages 0.27 s, overflow 0.16 s, blocks, tensors or operands 0.15 s each,
                               dtypes 0.14 s, functions or types 0.13 s each
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from numbers import Number
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

MOST_MATCHES = 1000  # of operands that are remembered, some with a tensor


@cache
def hasten() -> None:
    """Skip work of the interpreter whose result is not used or is known already, until the process ends."""
    replace_language_once()
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    look_dtypes_up_once()
    derive_blocks_once()
    derive_tensors_once()
    match_operands_once()
    compare_types_sooner()
    call_functions_directly()


def replace_language_once() -> None:
    """Replace the functions of tl only when a kernel starts. Triton does it again at every call of a function."""
    replace = interpreter._patch_lang

    def replace_once(fn: Any) -> Any:
        replaced = not any(tl.core.is_builtin(language.load) for language in (tl, tl.core))
        return interpreter._LangPatchScope() if replaced else replace(fn)

    interpreter._patch_lang = replace_once


def look_dtypes_up_once() -> None:
    """Remember numpy's dtypes. Triton builds a table of all of them at each lookup."""
    look_up: Any = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def look_up_once(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = look_up(dtype)
        return known[name]

    interpreter._get_np_dtype = look_up_once


def derive_blocks_once() -> None:
    """Remember the shape and name of block types. Triton checks and formats them for each new type."""
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
    """Remember shape and size by the type of a tensor. Triton derives them for each new tensor."""
    initialise: Any = tl.tensor.__init__
    known: dict[str, tuple] = {}

    def initialise_once(self: Any, handle: Any, type: Any) -> None:
        if type.name not in known:
            initialise(self, handle, type)
            known[type.name] = self.shape, self.numel, self.dtype
        self.handle, self.type = handle, type
        self.shape, self.numel, self.dtype = known[type.name]

    tl.tensor.__init__ = initialise_once


def match_operands_once() -> None:
    """Remember the types of operands that need no cast and no broadcast, the tensors that numbers become beside an
    operand, and the type that two types are cast to."""
    match: Any = TritonSemantic.binary_op_type_checking_impl
    promote: Any = TritonSemantic.computation_type_impl
    cast: Any = TritonSemantic.cast
    matched: dict[tuple, tuple] = {}
    promoted: dict[tuple, Any] = {}

    def kind(operand: Any) -> Any:
        return operand.type.name if type(operand) is tl.tensor else (type(operand), repr(operand))

    def match_once(self: Any, lhs: Any, rhs: Any, *flags: Any, **named: Any) -> tuple[Any, Any]:
        if named:
            return match(self, lhs, rhs, *flags, **named)
        # A number in bf16 is rounded by a cast, which `bf16_of_a_gpu` replaces.
        key = (kind(lhs), kind(rhs), flags, interpreter.InterpreterBuilder.cast_impl)
        if key in matched:
            left, right = matched[key]
            return lhs if left is None else left, rhs if right is None else right
        left, right = match(self, lhs, rhs, *flags)
        if len(matched) == MOST_MATCHES:
            matched.clear()
        if (left is lhs or isinstance(lhs, Number)) and (right is rhs or isinstance(rhs, Number)):
            matched[key] = (None if left is lhs else left, None if right is rhs else right)
        return left, right

    def promote_once(self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, division: bool) -> Any:
        key = (a.name, a_is_scalar, b.name, b_is_scalar, division)
        if key not in promoted:
            promoted[key] = promote(self, a, a_is_scalar, b, b_is_scalar, division)
        return promoted[key]

    def cast_to_another(self: Any, value: Any, to: Any, *rounding: Any) -> Any:
        return value if value.type.scalar is to.scalar else cast(self, value, to, *rounding)

    TritonSemantic.binary_op_type_checking_impl = match_once
    TritonSemantic.computation_type_impl = promote_once
    TritonSemantic.cast = cast_to_another


def compare_types_sooner() -> None:
    """Compare a type with itself, and leave a value that is no constant, without asking for every kind of tuple."""
    equal: Any = tl.dtype.__eq__
    unwrap: Any = tl.core._unwrap_if_constexpr
    plain = {tl.tensor, tl.dtype, bool, int, float, type(None)}

    tl.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    tl.core._unwrap_if_constexpr = lambda value: value if type(value) in plain else unwrap(value)


def call_functions_directly() -> None:
    """Call a function of tl without its wrapper, which checks that the interpreter gives `_semantic`, as it does."""
    wrapper = tl.load.__code__

    def patch(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = member.__wrapped__ if getattr(member, "__code__", None) is wrapper else member

        def call(*arguments: Any, **named: Any) -> Any:
            named["_semantic"] = interpreter.interpreter_semantic
            return function(*arguments, **named)

        scope.set_attr(obj, name, call)

    interpreter._patch_attr = patch


@contextmanager
def bf16_of_a_gpu() -> Iterator[None]:
    """Within the block, bf16 has a GPU's arithmetic.

    The interpreter stores the bits of bf16 as integers. Its arithmetic is that of the integers, and its conversion cuts
    digits off where a GPU rounds to the nearest number.
    """
    builder = interpreter.InterpreterBuilder
    replaced = {name: getattr(builder, name) for name in ("cast_impl", "binary_op", "unary_op", "create_dot")}
    cast, binary, unary, dot = replaced.values()

    def cast_impl(self: Any, x: Any, dst_type: Any) -> Any:
        if x.dtype.scalar == dst_type.scalar or tl.bfloat16 not in (x.dtype.scalar, dst_type.scalar):
            return cast(self, x, dst_type)
        x = in_fp32(x)
        return rounded(x) if dst_type.scalar == tl.bfloat16 else cast(self, x, dst_type)

    def binary_op(self: Any, x: Any, y: Any, op: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return binary(self, x, y, op)
        result = binary(self, in_fp32(x), in_fp32(y), op)
        return result if result.data.dtype == np.bool_ else rounded(result)

    def unary_op(self: Any, x: Any, op: Any) -> Any:
        return unary(self, x, op) if x.dtype.scalar != tl.bfloat16 else rounded(unary(self, in_fp32(x), op))

    def create_dot(self: Any, x: Any, y: Any, *others: Any) -> Any:
        return dot(self, *(in_fp32(z) if z.dtype.scalar == tl.bfloat16 else z for z in (x, y)), *others)

    for replacement in (cast_impl, binary_op, unary_op, create_dot):
        setattr(builder, replacement.__name__, replacement)
    try:
        yield
    finally:
        for name, original in replaced.items():
            setattr(builder, name, original)


def in_fp32(x: Any) -> Any:
    """A tensor of the interpreter in fp32."""
    if x.dtype.scalar == tl.bfloat16:
        data = (x.data.astype(np.uint32) << 16).view(np.float32)
    else:
        data = x.data.astype(np.float32)
    return interpreter.TensorHandle(data, tl.float32)


def rounded(x: Any) -> Any:
    """A tensor of the interpreter in fp32, rounded to the nearest bf16, ties to even."""
    bits = np.ascontiguousarray(x.data).view(np.uint32)
    nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    data = np.where(np.isnan(x.data), 0x7FFF, nearest).astype(np.uint16)
    return interpreter.TensorHandle(data, tl.bfloat16)
