"""Scores by formula in Triton: source text written from a formula's plan, and the functions that it defines.

A kernel calls the functions of its constant MODE.formula, a `Code`. The text is readable: `kernel_code` returns it, and
the functions' names end in a digest of it, because Triton's cache on disk knows a nested function by its name alone.

    head, row, column   load the hoisted values of a head, of rows and of columns: before a kernel's loops, or in them
    value               the score of q k^T
    slope               value, and its derivative by s
    weights             value, and its derivatives by all inputs of the formula
"""

import hashlib
import linecache
from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..formula import operations as ops
from ..formula.call import visible_distances
from ..formula.derivative import derivatives
from ..formula.graph import Node, is_number, leaf, topological
from ..formula.hoist import steps_of
from ..formula.parse import INFIX, show
from ..formula.plan import Plan, placeholder, plan, subtracted
from ..gpu import ALIGNMENT, INTERPRET, constant_when_compiled
from ..layout import Layout
from ..score import Score
from ..scores.soft_cap import tanh
from ..spec import Inputs, Spec
from .call import KernelCall

LARGEST_TILE = tl.constexpr(128)  # keys
COLUMN_ALIGNMENT = 4  # fp32 values: 16 bytes


class Values(NamedTuple):
    """Values of heads, rows or columns (B or 1, H or 1, ...) as kernels read them; those of columns see `column_input`.

    All integers of such tuples are `unspecialised`. A stride is 0 where there is one value for all.
    """

    pointer: Any
    stride_b: Any
    stride_h: Any


class Distances(NamedTuple):
    """Values of distances, of which there are `size`, from the lowest i - j that is visible."""

    pointer: Any
    stride_b: Any
    stride_h: Any
    size: Any
    lowest: Any


class Pairs(NamedTuple):
    """Values of pairs of a query and a key: so many rows and columns."""

    pointer: Any
    stride_b: Any
    stride_h: Any
    stride_row: Any
    rows: Any
    columns: Any


class Code(NamedTuple):
    """A formula's functions in Triton, as a kernel's constant.

    factor     positive; the score is the factor times `value`
    has_slope  whether the derivative by s is anything but 1
    """

    head: Any
    row: Any
    column: Any
    value: Any
    slope: Any
    weights: Any
    factor: float
    has_slope: bool


class Place(NamedTuple):
    """The place of a tile of scores: sequence, query head, Positions, and rows and columns that broadcast to it."""

    i_b: Any
    i_h: Any
    o_m: Any
    o_n: Any
    pos: Any


class Written(NamedTuple):
    """A formula as kernels compute it.

    code      its functions; None if the kernels' score is s
    text      the text of the functions
    entering  the indices of the inputs on which the kernels' scores depend
    added     the index of the only input, if the score is s plus it; else None
    """

    code: Code | None
    text: str
    entering: frozenset[int]
    added: int | None


def plan_of(score: Score) -> Plan:
    """The plan of a score's formula."""
    return plan(str(score.formula), score.causal, score.window)


def kernel_value(p: Plan, sinks: bool) -> Node:
    """The score without summands that are the same along a row: they cancel in the softmax unless there are sinks."""
    value = p.score
    if p.row is not None and sinks:
        value = ops.add(value, placeholder(p.hoisted[p.row]))
    return value if p.column is None else ops.add(value, placeholder(p.hoisted[p.column]))


@lru_cache(maxsize=1024)
def written(score: Score) -> Written:
    """The functions of a score's formula."""
    assert score.formula is not None
    p = plan_of(score)
    value = kernel_value(p, score.sinks)
    if value is leaf("s"):
        return Written(None, "", frozenset(), None)
    factor = 1.0
    if value.op == "mul" and is_number(value.args[0]) and value.args[0].value > 0:
        factor, value = value.args[0].value, value.args[1]
    inputs = [*map(placeholder, p.hoisted), *p.tables]
    slope, *weights = (ops.multiply(factor, x) for x in derivatives(value, [leaf("s"), *inputs]))
    entering = frozenset(k for k, x in enumerate(weights) if not is_number(x, 0.0))
    writer = Writer(p)
    title = show(p.formula)
    parts = [writer.loads(stage, f"{title}: the hoisted numbers of a {stage}") for stage in ("head", "row", "column")]
    parts += [
        writer.function("value", [value], f"{title}: the score, divided by {factor!r}"),
        writer.function("slope", [value, slope], f"{title}: the score, divided by {factor!r}; its derivative by s"),
        writer.function("weights", [value, *weights], f"{title}: the score, divided by {factor!r}; its derivatives"),
    ]
    text = "\n\n".join(parts)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    functions = compiled(text.replace("@", f"_{digest}"), digest)
    added = next((k for k, x in enumerate(p.hoisted) if value is ops.add(leaf("s"), placeholder(x))), None)
    code = Code(**functions, factor=factor, has_slope=not is_number(slope, 1.0))
    return Written(code, text.replace("@", ""), entering, added)


def compiled(text: str, digest: str) -> dict[str, Any]:
    """The functions that a text defines, by name."""
    file = f"<formula {digest}>"
    text = "\n".join(f"JIT\n{line}" if line.startswith("def ") else line for line in text.splitlines())
    text = text.replace("JIT", "@triton.jit") + "\n"
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    module = ModuleType(f"formula_{digest}")
    vars(module).update(triton=triton, tl=tl, tanh_of=tanh_of, tl_tanh=tanh, clamped=clamped)
    exec(compile(text, file, "exec"), vars(module))
    names = ("head", "row", "column", "value", "slope", "weights")
    return {name: vars(module)[f"{name}_{digest}"] for name in names}


@triton.jit
def tanh_of(x, EXACT: tl.constexpr):
    """tanh in fp32; off by 2^-11 of itself unless EXACT."""
    if INTERPRET or EXACT:
        b_x = tanh(x)
    else:
        asm: tl.constexpr = "tanh.approx.f32 $0, $1;"
        b_x = tl.inline_asm_elementwise(asm, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return b_x


@triton.jit
def clamped(x, size):
    """x between 0 and size - 1, with 64 bits, so that hidden pairs of any distance read an entry of the tensor."""
    return tl.minimum(tl.maximum(x, 0), size - 1).to(tl.int64)


class Writer:
    """Writes functions of a plan. A tensor is (pointer, integers as `unspecialised` has them), see `arguments`."""

    def __init__(self, p: Plan) -> None:
        self.plan = p
        self.numbers = {x.node: k for k, x in enumerate(p.hoisted)}
        self.tables = {x: k for k, x in enumerate(p.tables)}
        self.places: dict[str, list[int]] = {
            stage: [k for k, x in enumerate(p.hoisted) if x.stage == stage] for stage in ("head", "row", "column")
        }

    def loads(self, stage: str, meaning: str) -> str:
        """The function that loads the hoisted values of a stage, in their order.

        Columns are given by the `first` of a tile and their offsets in it. Where `size` is None, whole tiles are
        loaded, several values at a time: see `column_input`.
        """
        extra = {"head": "", "row": ", o, size", "column": ", first, o, size"}[stage]
        lines = [f"def {stage}@(inputs, i_b, i_h{extra}):", f'    """{meaning}."""']
        names = []
        for k in self.places[stage]:
            lines.append(f"    p{k} = {self.first_of_head(k, f' * {COLUMN_ALIGNMENT}' if stage == 'column' else '')}")
            if stage == "column":
                lines += ["    if size is None:", f"        x{k} = tl.load(p{k} + first + o)", "    else:"]
                lines.append(f"        x{k} = tl.load(p{k} + first + o, mask=first + o < size, other=0.0)")
            elif stage == "row":
                # Rows past the end have the last row's number: a formula may divide by it, and 0 times NaN is NaN.
                lines.append(f"    x{k} = tl.load(p{k} + tl.minimum(o, size - 1))")
            else:
                lines.append(f"    x{k} = tl.load(p{k})")
            names.append(f"x{k}")
        # A tuple of one would be taken for its entry; an empty one is no value in Triton.
        return "\n".join([*lines, f"    return ({', '.join([*names, '0', '0'][: max(2, len(names))])})"])

    def function(self, name: str, outputs: Sequence[Node], meaning: str) -> str:
        """A function of q k^T that returns `outputs`, as a tuple if there are several."""
        lines = [
            f"def {name}@(qk, scale, head, row, column, inputs, place, EXACT: tl.constexpr):",
            f'    """{meaning}."""',
        ]
        nodes = topological(outputs)
        if any(x.op in ("leaf", "load") and x is not leaf("s") for x in nodes) or any(
            x.op == "hoisted" and self.plan.hoisted[self.numbers[x.value]].stage in ("distance", "pair") for x in nodes
        ):
            lines.append("    i_b, i_h, o_m, o_n, pos = place")
            lines.append("    i, j = o_m + (pos.offset + pos.k_start), o_n + pos.k_start")
        names: dict[Node, str] = {}
        for n, x in enumerate(nodes):
            if x.op == "mul" and x.args[1] is leaf("s") and is_number(x.args[0]):
                text = f"qk * (scale * {x.args[0].value!r})"
            elif x.op == "div" and x.args[0] is leaf("s") and is_number(x.args[1]):
                text = f"qk * (scale / {x.args[1].value!r})"
            else:
                text = self.expression(x, [names.get(y, "") for y in x.args])
            if x.op in ("number",) or text.isidentifier() or (x.op == "hoisted" and text.endswith("]")):
                names[x] = text
            else:
                names[x] = f"y{n}"
                lines.append(f"    y{n} = {text}")
        results = [names[x] for x in outputs]
        result = results[0] if len(results) == 1 else f"({', '.join(results)})"
        return "\n".join([*lines, f"    return {result}"])

    def expression(self, x: Node, a: list[str]) -> str:
        """One operation of the names of its arguments."""
        match x.op:
            case "number":
                return f"({x.value!r})" if x.value < 0 else repr(x.value)
            case "leaf":
                return {"s": "qk * scale", "h": "i_h", "b": "i_b"}.get(x.value, x.value)
            case "hoisted":
                return self.hoisted(self.numbers[x.value])
            case "load":
                return self.entry(self.tables[x] + len(self.plan.hoisted), x, a)
            case "real":
                return f"tl.cast({a[0]}, tl.float32)"
            case "neg":
                return f"-{a[0]}"
            case "not":
                return f"~({a[0]})"
            case "pow":
                return " * ".join([a[0]] * x.value)
            case "exp" | "log" | "sqrt" | "sin" | "cos" | "abs":
                return f"tl.{x.op}({a[0]})"
            case "tanh":
                return f"tanh_of({a[0]}, EXACT)"
            case "sigmoid":
                return f"1.0 / (1.0 + tl.exp(-{a[0]}))"
            case "floor":
                return f"tl.floor({a[0]}).to(tl.int32)"
            case "mod":  # of the sign that Python gives it
                return f"({a[0]} % {a[1]} + {a[1]}) % {a[1]}"
            case "floordiv":
                return f"({a[0]} - ({a[0]} % {a[1]} + {a[1]}) % {a[1]}) // {a[1]}"
            case "min" | "max":
                return f"tl.{x.op}imum({a[0]}, {a[1]})"
            case "where":
                return f"tl.where({a[0]}, {a[1]}, {a[2]})"
        return f"{a[0]} {SIGNS[x.op]} {a[1]}"

    def first_of_head(self, k: int, times: str = "") -> str:
        """The address of a head's first value among the hoisted ones of number k; strides are multiplied by `times`.

        Offsets have 64 bits: those of pairs exceed 2^31 from 12 heads of 16,384 queries and keys on.
        """
        strides = [f"tl.cast(i_{x}, tl.int64) * (inputs[{k}].stride_{x} >> 2){times}" for x in "bh"]
        return f"inputs[{k}].pointer + ({strides[0]} + {strides[1]})"

    def hoisted(self, k: int) -> str:
        """The number k of the hoisted ones."""
        stage = self.plan.hoisted[k].stage
        if stage in self.places:
            return f"{stage}[{self.places[stage].index(k)}]"
        start, x = self.first_of_head(k), f"inputs[{k}]"
        if stage == "distance":
            return f"tl.load({start} + clamped(i - j - ({x}.lowest >> 2), {x}.size >> 2))"
        row, column = f"clamped(o_m, {x}.rows >> 2)", f"clamped(o_n, {x}.columns >> 2)"
        return f"tl.load({start} + {row} * ({x}.stride_row >> 2) + {column})"

    def entry(self, k: int, x: Node, index: list[str]) -> str:
        """The entry of a table: its pointer, the batch's stride, and the stride and size of each index."""
        text = f"inputs[{k}][0] + tl.cast(i_b, tl.int64) * (inputs[{k}][1] >> 2)"
        for n, y in enumerate(index):
            stride, size = f"inputs[{k}][{2 * n + 2}] >> 2", f"inputs[{k}][{2 * n + 3}] >> 2"
            text += f" + clamped({y}, {size}) * ({stride})"
        return f"tl.load({text}).to(tl.float32)"


SIGNS = {op: sign for op, (sign, _) in INFIX.items()} | {"and": "&", "or": "|"}


def kernel_inputs(call: KernelCall, T: int, S: int, layout: Layout | None = None) -> Inputs:
    """The inputs of a call of T queries and S keys as kernels receive them: for each tensor of a formula a pointer and
    integers. `layout` is that of a cache.

    All of these tensors (B or 1, H or 1, ...) have a contiguous last dimension. One of size 1 has the stride 0.
    """
    score = call.spec.score
    if score.formula is None or written(score).code is None:
        read = call.inputs.formula is None and call.inputs.factors is None
        return call.inputs if read else call.inputs._replace(formula=None, factors=None)
    p = plan_of(score)
    if layout is None:
        layout = Layout(call.q_start, call.k_start) if call.spec.offsets else Layout()
    low = visible_distances(score, layout, T, S)[0]
    result = []
    for k, x in enumerate(call.inputs.formula or ()):
        strides = [0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]
        kind: Any = Values
        if k >= len(p.hoisted):
            kind = None  # a plain tuple: its pointer, the batch's stride, and the stride and size of each index
            first = x.ndim - len(p.tables[k - len(p.hoisted)].args)
            axes = zip(strides[first:], x.shape[first:], strict=True)
            numbers = [strides[0] if first else 0, *(number for axis in axes for number in axis)]
        elif p.hoisted[k].stage == "pair":
            kind, numbers = Pairs, [*strides[:3], x.shape[2], x.shape[3]]
        elif p.hoisted[k].stage == "column":
            x = column_input(x)
            numbers = [0 if x.shape[n] == 1 else x.stride(n) // COLUMN_ALIGNMENT for n in (0, 1)]
        else:
            numbers = strides[:2]
            if p.hoisted[k].stage == "distance":
                kind, numbers = Distances, [*numbers, x.shape[2], low]
        values = (x, *(4 * number + 2 for number in numbers))  # as `unspecialised`
        result.append(values if kind is None else kind(*values))
    return call.inputs._replace(formula=tuple(result), factors=None)


def column_input(x: Tensor) -> Tensor:
    """The values of columns (B or 1, H or 1, S) as kernels read them: without masks, and several at a time.

    The stride of rows is a multiple of COLUMN_ALIGNMENT, and rows are padded to whole tiles of keys.
    """
    excess = -x.shape[2] % LARGEST_TILE.value
    if excess:
        return F.pad(x, (0, excess))
    steps = [stride for size, stride in zip(x.shape[:2], x.stride()[:2], strict=True) if size > 1]
    aligned = x.data_ptr() % ALIGNMENT == 0 and all(stride % COLUMN_ALIGNMENT == 0 for stride in steps)
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


def readable(spec: Spec, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tensors of a formula as kernels read them."""
    score = spec.score
    hoisted = len(steps_of(str(score.expression), score.causal, score.window).hoisted)
    strided = [x.ndim == 0 or k >= hoisted or x.stride(-1) == 1 for k, x in enumerate(tensors)]
    return tuple(x if is_fine else x.contiguous() for x, is_fine in zip(tensors, strided, strict=True))


def added_by(score: Score) -> str | None:
    """The stage of the hoisted value, if a formula only adds one to s; else None."""
    added = None if score.formula is None else written(score).added
    return None if added is None else plan_of(score).hoisted[added].stage


def is_biased(score: Score) -> bool:
    """Whether the kernels' part of a formula only adds a value for each key to s."""
    return added_by(score) == "column"


@constant_when_compiled
def numbers_of_keys(*values: Any) -> tuple[int, ...]:
    """The index of the input that a formula adds to the scores of each key, if it does only that; values: a Score's.

    Two of a sum in parts (model/score_tensors.py), s + max(x_i - y_j, -1e9) + z_j: those of z, and of y, which is
    subtracted.
    """
    score = Score(*values)
    if is_biased(score):
        return (written(score).added,)  # type: ignore[return-value]
    p = plan_of(score)
    taken = subtracted(p.score)
    if p.column is None or taken is None:
        return ()
    return p.column, [placeholder(x) for x in p.hoisted].index(taken)


def sums_of(spec: Spec) -> str | None:
    """What the backward sums along the columns, for the gradients of learned tensors; None if it sums nothing.

    "ds"        for values of keys
    "far"       ds of the pairs that are so far apart that they share a value, for values of distances
    "distance"  ds (i - j), for ALiBi's slopes
    """
    if spec.slopes:
        return "distance"
    added = None if spec.score.formula is None else written(spec.score).added
    if added not in spec.learned:
        return None
    x = plan_of(spec.score).hoisted[added]
    return "ds" if x.stage == "column" else "far" if x.stage == "distance" and x.far is not None else None


def with_row_terms(lse: Tensor, call: KernelCall) -> Tensor:
    """lse (B, H, T) of the kernels, plus the summands that are the same along a row, which the kernels leave out."""
    score = call.spec.score
    if score.formula is None or score.sinks:
        return lse
    p = plan_of(score)
    if p.row is None:
        return lse
    assert call.inputs.formula is not None
    return lse + call.inputs.formula[p.row]
