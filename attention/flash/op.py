"""The kernels as torch custom operators, and the attention that calls them.

torch.compile does not look into custom operators and knows their results' shapes, so a compiled model has no graph
break; the dropout key is a tensor among their arguments, so new steps and replayed CUDA graphs draw new masks.
"""

import operator
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.autograd.function import once_differentiable
from torch.utils import checkpoint
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from .. import gpu
from ..decode.cache import Cache
from ..dropout import drop_threshold
from ..errors import Option, UnsupportedAttention
from ..formula.hoist import scaled_queries as scale
from ..gpu import ALIGNMENT, HAS_TRITON, NAMESPACE, DeviceOf, custom_operator
from ..interface import CAUSAL, FEATURES, ONE_DOCUMENT, Attention, AttentionOutput, AttentionShape, Call
from ..options import AttentionConfig, ProductPrecision
from ..score import Score
from ..scores import OPTIONS
from ..spec import Inputs, Spec
from .call import KernelCall, Problem, as_options, has_code, recognised, with_options

if HAS_TRITON:
    import triton

    from .backward import Gradients, room_for_ds, slopes_gradient
    from .decode import compute_decode, flash_decode, present, run_decode
    from .formula import numbers_of_keys, readable, sums_of, with_row_terms
    from .formula_gradients import learned_gradients
    from .forward import scale_gradient, scaled_queries
    from .horizon import find_horizons, find_key_horizons
    from .launch import Known, replayed
    from .paths import PATHS, choose_path, describe_path, no_fp8_gradients
    from .score import GRAIN
    from .tiles import addressable, rows_like

MAX_HEAD_DIM = 256
KERNEL_TENSORS = {option.tensor.name for option in OPTIONS if option.in_kernels and option.tensor is not None}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLASH, TILED = Option("attention", "flash"), Option("attention", "tiled")


def check(head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise UnsupportedAttention unless the kernels support this head size and dtype on this device."""
    if head_dim > MAX_HEAD_DIM:
        raise UnsupportedAttention(
            f"{{}} takes head sizes up to {MAX_HEAD_DIM}, not {head_dim}; choose {{}}, or more heads.", FLASH, TILED
        )
    if dtype not in DTYPES:
        raise UnsupportedAttention(
            f"{{}} takes fp32, bf16 or fp16, not {dtype}; choose one of these, or {{}}.", FLASH, TILED
        )
    if not HAS_TRITON:
        raise UnsupportedAttention("{} needs Triton, which is not installed; choose {}.", FLASH, TILED)
    if triton.knobs.runtime.interpret:
        if refusal := gpu.interpreter_refusal():
            raise UnsupportedAttention(f"{{}} cannot run here: {refusal}, or choose {{}}.", FLASH, TILED)
        return
    if device.type != "cuda" or torch.version.hip:
        raise UnsupportedAttention(
            f"{{}} needs a CUDA GPU and the device is {device}; choose {{}}, or set TRITON_INTERPRET=1 to run the "
            "kernels, slowly, in Triton's interpreter.",
            FLASH,
            TILED,
        )
    if gpu.capability(device) < (8, 0):
        raise UnsupportedAttention(
            f"{{}} needs a GPU of compute capability 8.0 (Ampere) or newer and {device} has "
            f"{'.'.join(map(str, gpu.capability(device)))}; choose {{}}.",
            FLASH,
            Option("attention", "sdpa"),
        )


def check_backward(head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise UnsupportedAttention where the tiles of fp32 do not fit the shared memory of a multiprocessor."""
    if dtype == torch.float32 and head_dim > 128 and gpu.capability(device)[0] not in (9, 10):
        raise UnsupportedAttention(
            f"{{}} has gradients in fp32 at head sizes up to 128 on {device}, not {head_dim}; choose bf16 or fp16, or "
            "{}. Larger ones need a GPU of compute capability 9.x or 10.x.",
            FLASH,
            TILED,
        )


def run_horizons(q: Tensor, k: Tensor, slopes: Tensor, spec: str) -> Tensor:
    """The horizons of a call, as `Inputs` has them."""
    return replayed(compute_horizons, (q, k, slopes), (spec,))[0]


def compute_horizons(tensors: Sequence[Tensor], spec: str) -> tuple[Tensor]:
    """`run_horizons`."""
    q, k, slopes = tensors
    check(q.shape[-1], q.dtype, q.device)
    if q.numel() == 0 or k.numel() == 0:
        return (q.new_zeros(q.shape[:2], dtype=torch.int32),)
    with DeviceOf(q):
        return (find_horizons(addressable(q), addressable(k), slopes, Spec.read(spec)),)


flash_horizons = custom_operator(
    "flash_horizons", run_horizons, lambda q, *_: q.new_empty(q.shape[:2], dtype=torch.int32)
)


def run_key_horizons(q: Tensor, k: Tensor, x: Tensor, factors: Tensor | None, spec: str) -> Tensor:
    """The horizons of a call whose formula adds the values x of keys, as `Inputs` has them."""
    check(q.shape[-1], q.dtype, q.device)
    if q.numel() == 0 or k.numel() == 0:
        return q.new_zeros(key_horizons_shape(q, k), dtype=torch.int32)
    with DeviceOf(q):
        return find_key_horizons(addressable(q), addressable(k), x, factors, Spec.read(spec))


def key_horizons_shape(q: Tensor, k: Tensor) -> tuple[int, int, int]:
    """Of the horizons of a formula."""
    grain = GRAIN.value
    return *q.shape[:2], (q.shape[2] + grain - 1) // grain + (k.shape[2] + grain - 1) // grain


flash_key_horizons = custom_operator(
    "flash_key_horizons",
    run_key_horizons,
    lambda q, k, *_: q.new_empty(key_horizons_shape(q, k), dtype=torch.int32),
)


def horizons(q: Tensor, k: Tensor, inputs: Inputs, spec: Spec, compiling: bool) -> Tensor | None:
    """The horizons of a causal call; None where its scores have none."""
    text = spec.text()
    if spec.score.alibi:
        return (flash_horizons if compiling else run_horizons)(q, k, inputs.slopes, text)
    columns = () if inputs.formula is None else numbers_of_keys(*spec.score.values)
    if inputs.formula is None or not columns:
        return None
    factors = None if inputs.factors is None else inputs.factors.detach()
    x = inputs.formula[columns[0]].detach()
    if len(columns) == 2:
        x = x - inputs.formula[columns[1]].detach()
    return (flash_key_horizons if compiling else run_key_horizons)(q, k, x, factors, text)


def run_forward(
    q: Tensor, k: Tensor, v: Tensor, inputs: Sequence[Tensor], spec: str, q_start: int, k_start: int
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and lse2 as `forward` gives them; inputs, positions and, as text, the Spec are those of a KernelCall."""
    return replayed(compute_forward, (q, k, v, *inputs), (Spec.read(spec), q_start, k_start))


def compute_forward(
    tensors: Sequence[Tensor], spec: Spec, q_start: int, k_start: int, n_results: int = 3
) -> tuple[Tensor, ...]:
    """`run_forward`'s first results, which alone a replay returns."""
    q, k, v, *inputs = tensors
    call = KernelCall(spec, Inputs.of(spec, inputs), q_start, k_start)
    check(q.shape[-1], q.dtype, q.device)
    out = torch.empty_like(q)
    with DeviceOf(q):
        q, k, v = addressable(q), addressable(k), addressable(v)
        name = choose_path(call.problem(q, k), backward=False)
        if call.inputs.factors is not None and name != "hopper":
            q = scaled_queries(q, call.inputs.factors)
        lse, lse2 = PATHS[name].forward(q, k, v, out, call)
        lse = with_row_terms(lse, call)
    return (out, lse, lse2)[:n_results]


def fake_forward(q: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Room for `flash_forward`'s results."""
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32), rows_like(q)


flash_forward = custom_operator("flash_forward", run_forward, fake_forward)


def run_backward(do: Tensor, saved: Sequence[Tensor], spec: str, q_start: int, k_start: int) -> list[Tensor]:
    """The gradients of q, k and v, as `empty_gradients` lays them out, of learned tensors, of slopes that are learned,
    of the sinks, and of factors that are learned.

    do     the gradient of out
    saved  q, k, v, out, lse2 and `Inputs.present`
    """
    return [*replayed(compute_backward, (do, *saved), (Spec.read(spec), q_start, k_start))]


def compute_backward(tensors: Sequence[Tensor], spec: Spec, *positions: int) -> list[Tensor]:
    """`run_backward`."""
    do, q, k, v, out, lse2, *inputs = tensors
    call = KernelCall(spec, Inputs.of(spec, inputs), *positions)
    gradients = empty_gradients(q, k, v)
    sums = q.new_zeros(*q.shape[:2], k.shape[2], dtype=torch.float32) if sums_of(call.spec) else None
    delta = rows_like(q) if call.spec.learned else None
    results = Gradients(*split_qkv_grad(gradients, q, k), sums, room_for_ds(call, q, k), delta)
    factors, dfactors = call.inputs.factors, None
    with DeviceOf(q):
        q, k, v = addressable(q), addressable(k), addressable(v)
        unscaled = q
        if factors is not None:
            q = scaled_queries(q, factors)
        if q.numel() == 0 or k.numel() == 0:
            for gradient in results[:3]:
                gradient.zero_()
            dsinks = None if call.inputs.sinks is None else torch.zeros_like(call.inputs.sinks)
        else:
            path = PATHS[choose_path(call.problem(q, k), backward=True)]
            dsinks = path.backward(do, q, k, v, out, lse2, results, call)
        learned = learned_gradients((q, k, v, addressable(do), lse2), results, call)
        if factors is not None:
            dfactors = scale_gradient(results.dq, unscaled, factors, call.spec.factors == "learned")
    dslopes = slopes_gradient(sums) if sums is not None and call.spec.slopes else None
    return [*gradients, *learned, *(x for x in (dslopes, dsinks, dfactors) if x is not None)]


def fake_backward(do: Tensor, saved: Sequence[Tensor], spec: str, *_: Any) -> list[Tensor]:
    """Room for `flash_backward`'s results."""
    q, k, v, _out, _lse, *inputs = saved
    others = (inputs[place] for place in places_of_gradients(Spec.read(spec)))
    return [*empty_gradients(q, k, v), *(x.new_empty(x.shape) for x in others)]


flash_backward = custom_operator("flash_backward", run_backward, fake_backward)


@lru_cache(maxsize=1024)
def places_of_gradients(spec: Spec) -> tuple[int, ...]:
    """The places, in `Inputs.present`, of the tensors whose gradients follow those of q, k and v."""
    names = spec.inputs()
    asked = {"slopes": spec.slopes, "sinks": "sinks" in names, "factors": spec.factors == "learned"}
    return *spec.learned, *(spec.computed + names.index(name) for name, is_asked in asked.items() if is_asked)


def empty_gradients(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Room for dq, dk and dv: one tensor where q, k, v lie in memory as views of one projection (B, T, H + 2 H_kv, D).

    That tensor is the projection's gradient, so a compiled model copies nothing to assemble it.
    """
    B, H, T, D = q.shape
    row = (H + 2 * k.shape[1]) * D
    if k.shape[2] == T and q.stride() == k.stride() == v.stride() == (T * row, D, row, 1):
        return [q.new_empty(B, T, H + 2 * k.shape[1], D)]
    return [torch.empty_like(x) for x in (q, k, v)]


def split_qkv_grad(gradients: list[Tensor], q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dq (B, H, T, D), dk and dv (B, H_kv, S, D): the tensors of `empty_gradients`, or views of its one tensor."""
    if len(gradients) == 1:
        gradients = [x.transpose(1, 2) for x in gradients[0].split([q.shape[1], k.shape[1], k.shape[1]], dim=2)]
    dq, dk, dv = gradients
    return dq, dk, dv


class Flash(torch.autograd.Function):
    """The forward and the backward pass: by operators where spec is a text, else by the kernels at once.

    torch's dispatcher takes longer for so many arguments than short kernels run.
    """

    @staticmethod
    def forward(
        ctx: Any, call: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        if isinstance(call[0], str):
            out, lse, lse2 = flash_forward(q, k, v, inputs, *call)
        else:
            out, lse, lse2 = replayed(compute_forward, (q, k, v, *inputs), call)
        ctx.save_for_backward(q, k, v, out, lse2, *inputs)
        ctx.call = call
        ctx.mark_non_differentiable(lse, lse2)
        ctx.set_materialize_grads(False)
        return out, lse, lse2

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, *_: None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # refuses second derivatives
            return once_differentiable(Flash.backward)(ctx, do)
        saved = ctx.saved_tensors  # once: activation checkpointing gives them once
        q, k, _, _, _, *inputs = saved
        of_inputs = [None] * len(inputs)
        if do is None:
            return *[None] * 4, *of_inputs
        if isinstance(spec := ctx.call[0], str):
            gradients = flash_backward(do, saved, *ctx.call)
            spec = Spec.read(spec)
        else:
            gradients = replayed(compute_backward, (do, *saved), ctx.call)
        places = places_of_gradients(spec) if inputs else ()
        n_qkv = len(gradients) - len(places)
        for place, gradient in zip(places, gradients[n_qkv:], strict=True):
            of_inputs[place] = gradient
        return None, *split_qkv_grad(gradients[:n_qkv], q, k), *of_inputs


def flash_from_text(
    q: Tensor, k: Tensor, v: Tensor, inputs: Sequence[Tensor], spec: str, q_start: int, k_start: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`Flash` as an operator, so that a compiled block that is recomputed does not keep what it saves.

    torch 2.11 keeps what a bare autograd function saves.
    """
    return Flash.apply((spec, q_start, k_start), q, k, v, *inputs)


flash = custom_operator("flash", flash_from_text, None)


def is_selectively_recomputed() -> bool:
    """Whether torch's selective checkpointing watches this call. It sees operators alone."""
    modes = _get_current_dispatch_mode_stack() if _len_torch_dispatch_stack() else []
    return any(type(mode).__module__ == checkpoint.__name__ for mode in modes)


def asked_alone(given: dict[str, Any]) -> tuple[Score, float | None] | None:
    """The score and the scale of a call that is given nothing else, and that no compiler or mode of torch watches."""
    if torch.compiler.is_compiling() or _len_torch_dispatch_stack() or not HAS_TRITON:
        return None
    for name, x in given.items():
        if x is not None and x is not ONE_DOCUMENT and name not in {"score", "scale", "return_lse"}:
            return None
    return given.get("score", CAUSAL), given.get("scale")


class Plain(torch.autograd.Function):
    """`Flash` for calls Alike, of q, k and v alone. It gives out alone.

    By rows that is (B, T, H, D), for callers who would transpose it: a node of autograd's for that takes longer.
    """

    @staticmethod
    def forward(ctx: Any, alike: Any, by_rows: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # Hooks for saved tensors may give others back.
        replays = None if _top_saved_tensors_default_hooks(False) else alike.replays
        out, _, lse2 = replayed(compute_forward, (q, k, v), alike.rest, replays)
        ctx.save_for_backward(q, k, v, out, lse2)
        ctx.call = alike.rest, by_rows, replays
        return out.transpose(1, 2) if by_rows else out

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            return once_differentiable(Plain.backward)(ctx, do)
        (rest, by_rows, replays), saved = ctx.call, ctx.saved_tensors
        do = do.transpose(1, 2) if by_rows else do
        gradients = replayed(compute_backward, (do, *saved), rest, replays, do.stride())
        return None, None, *(gradients if len(gradients) == 3 else split_qkv_grad(gradients, *saved[:2]))


# Plain.apply, without torch's search for functorch's wrappers: `Known` knows no call that has them.
apply_plain = vars(torch._C._FunctionBase)["apply"].__get__(None, Plain)


class Alike(NamedTuple):
    """What runs calls that are like one that was checked, see `Known`.

    learns    whether they have gradients
    function  compute_forward or compute_decode, for their tensors and the rest of its arguments
    """

    learns: bool
    function: Any
    rest: Any
    replays: Any

    def run(self, tensors: Sequence[Tensor], n_results: int = 1, by_rows: bool = False) -> Sequence[Tensor]:
        """out and, for two results, lse; by rows out alone, (B, T, H, D)."""
        if not self.learns:
            results = replayed(self.function, tensors, (*self.rest, n_results), self.replays, n_results)
            return (results[0].transpose(1, 2),) if by_rows else results
        if n_results > 1:
            return Flash.apply(self.rest, *tensors)[:n_results]
        return (apply_plain(self, by_rows, *tensors),)


class FlashAttention(Attention):
    """FlashAttention-2 in Triton, with dropout that replays (attention/flash/)."""

    name = "flash"
    options = frozenset({"allow_tf32", "path", "precision"})
    supports = FEATURES - {option.name for option in OPTIONS if not (option.in_kernels or option.is_formula)}
    exact = True
    scales_queries = True
    operators = frozenset({f"{NAMESPACE}::flash_forward"})

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        self.known = Known() if HAS_TRITON else None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> AttentionOutput:
        """`Attention.__call__`. A call like an earlier one, of q, k and v alone, is not looked at again."""
        if (asked := asked_alone(given)) is None:
            return Attention.__call__(self, q, k, v, **given)
        if known := self.known.get(asked, (q, k, v)):
            return AttentionOutput(*known.run((q, k, v), 2 if given.get("return_lse") else 1))
        result = Attention.__call__(self, q, k, v, **given)
        self.remember(asked, (q, k, v), False)
        return result

    def decode(self, q: Tensor, cache: Cache, **given: Any) -> AttentionOutput:
        """`Attention.decode`, as `__call__`."""
        if (asked := asked_alone(given)) is None:
            return Attention.decode(self, q, cache, **given)
        tensors, grows = (q, *present(cache)), cache.pages is None
        if known := self.known.get(asked, tensors, grows):
            return AttentionOutput(*known.run(tensors, 2 if given.get("return_lse") else 1))
        result = Attention.decode(self, q, cache, **given)
        self.remember(asked, tensors, grows)
        return result

    def remember(self, asked: tuple[Score, float | None], tensors: Sequence[Tensor], grows: bool) -> None:
        """A call that was checked, where the kernels take its tensors as they are; of no subclass."""
        score, scale = asked
        if score.expression or score.head_tensors or type(self) is not FlashAttention:
            return
        q, *taken = tensors
        decodes = len(taken) > 2
        spec = self.call(q, score, ONE_DOCUMENT, scale, None, {}).spec
        if spec.scale > 0 and all(map(operator.is_, prepared(q, *taken[: 0 if decodes else 2]), tensors)):
            learns = not decodes and torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
            function, rest = (compute_decode, (spec, len(taken))) if decodes else (compute_forward, (spec, 0, 0))
            self.known.put(Alike(learns, function, rest, {}), asked, tensors, grows)

    def check(self, shape: AttentionShape) -> None:
        super().check(shape)
        if shape.training:
            self.check_gradients()
        check(shape.head_dim, shape.dtype, shape.device)
        if shape.training:
            check_backward(shape.head_dim, shape.dtype, shape.device)
        self.path(shape, 0)

    def check_gradients(self) -> None:
        """Raise UnsupportedAttention where the precision has no backward."""
        if self.config.precision is ProductPrecision.fp8:
            raise no_fp8_gradients()

    def path(self, shape: AttentionShape, T: int) -> str:
        return " and ".join(sorted({describe_path(problem) for problem in self.problems(shape, T)}))

    def problems(self, shape: AttentionShape, T: int) -> list[Problem]:
        """The kernels' problem in each of the model's layers."""
        precision, capability = self.config.precision.value, gpu.capability(shape.device)
        drops = self.dropout > 0 and precision == "inputs"  # fp8 only evaluates
        specs = [
            Spec(
                with_options(score),
                scale=1.0,
                documents=shape.documents,
                threshold=drop_threshold(self.dropout) if drops else 0,
                path=self.config.path.value,
                precision=precision,
            )
            for score in shape.scores
        ]
        return [Problem(spec, shape.head_dim, shape.dtype, T, T, capability) for spec in specs]

    def prepare(self, q: Tensor, call: Call, S: int) -> tuple[Tensor, Call]:
        """A formula alone: the kernels have code for some options, and recognise their formulas."""
        score = call.spec.score
        if has_code(score):
            return q, call
        of_kernels, found = as_options(*score.values) or score, recognised(str(score.expression))
        tensors = {} if found is None else {name: call.tensors[theirs] for name, theirs in found.tensors}
        learned = torch.is_grad_enabled() and any(x.requires_grad for x in tensors.values())
        # The kernels of the options give a gradient to slopes alone, and none where a soft cap comes before them.
        if (learned and of_kernels.soft_cap is not None) or any(x.shape != (q.shape[1],) for x in tensors.values()):
            of_kernels = score
        by_options = found is not None and of_kernels.formula is None
        if not by_options:
            tensors = {}
            q, call = super().prepare(q, call, S)
        tensors |= {x.name: call.tensors[x.name] for x in score.head_tensors if x.learned}
        spec = call.spec._replace(score=of_kernels, slopes=learned and by_options)
        return q, call._replace(spec=spec, tensors=tensors)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> AttentionOutput:
        compiling = torch.compiler.is_compiling()
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            self.check_gradients()
            if not compiling:  # the compiler cannot follow it; a model calls it when it is built
                check_backward(q.shape[-1], q.dtype, q.device)
        D, spec, layout = q.shape[-1], call.spec, call.layout
        # The kernels take the maximum before they scale, which only a positive scale allows.
        if spec.scale < 0:
            q, spec = -q, spec._replace(scale=-spec.scale)
        elif spec.scale == 0:
            q, spec = q * 0, spec._replace(scale=1.0)
        positions = (layout.query_start(q.shape[2], k.shape[2]), layout.k_start) if spec.offsets else (0, 0)
        inputs = kernels_inputs(call, spec)
        q, k, v = prepared(q, k, v)
        may_skip = spec.score.alibi or inputs.formula is not None
        if may_skip and Problem(spec, D, q.dtype, q.shape[2], k.shape[2], (0, 0)).has_horizons:
            inputs = inputs._replace(horizons=horizons(q.detach(), k.detach(), inputs, spec, compiling))
        present = inputs.present()
        if compiling or is_selectively_recomputed():
            out, lse, _ = flash(q, k, v, present, spec.text(), *positions)
        elif torch.is_grad_enabled():
            out, lse, _ = Flash.apply((spec, *positions), q, k, v, *present)
        else:
            out, lse, _ = replayed(compute_forward, (q, k, v, *present), (spec, *positions))
        return AttentionOutput(out if out.shape[-1] == D else out[..., :D], lse)

    def attend_cache(self, q: Tensor, cache: Cache, call: Call) -> AttentionOutput:
        if self.config.precision is ProductPrecision.fp8:
            fp8, inputs = (Option("attention.precision", precision) for precision in ("fp8", "inputs"))
            raise UnsupportedAttention("{} does not decode from a cache; choose {}.", fp8, inputs)
        # The compiler cannot follow `check`; a model calls it when it is built.
        compiling = torch.compiler.is_compiling()
        if not compiling:
            check(q.shape[-1], q.dtype, q.device)
        if call.factors is not None:
            q, call = scale(q, call.factors), call._replace(spec=call.spec._replace(factors="none"), factors=None)
        q = q if q.stride(-1) == 1 else q.contiguous()
        tensors = kernels_inputs(call, call.spec).present()
        if compiling:
            return AttentionOutput(*flash_decode(q, [*cache], tensors, call.spec.text()))
        return AttentionOutput(*run_decode(q, present(cache), tensors, call.spec))


def kernels_inputs(call: Call, spec: Spec) -> Inputs:
    """The tensors besides q, k and v, as the kernels read them."""
    return Inputs(
        key=call.dropout_key,
        **{name: fp32(x) for name, x in call.tensors.items() if name in KERNEL_TENSORS},
        starts=bounds(call.layout.document_starts),
        ends=bounds(call.layout.document_ends),
        factors=call.factors,
        formula=readable(spec, call.formula) if call.formula else None,
    )


def fp32(x: Tensor) -> Tensor:
    """x (H,) as the kernels read it."""
    return x.float().contiguous()


def bounds(x: Tensor | None) -> Tensor | None:
    """Bounds of documents (B, L) as the kernels read them."""
    return None if x is None else x.to(torch.int32).contiguous()


def prepared(*tensors: Tensor) -> list[Tensor]:
    """Tensors of one dtype and head size with a contiguous last dimension that spans a multiple of 16 bytes.

    They are copied only where they have none.
    """
    excess = -tensors[0].shape[-1] % (ALIGNMENT // tensors[0].element_size())
    if excess:
        return [F.pad(x, (0, excess)) for x in tensors]
    return [compact(x) for x in tensors]


def compact(x: Tensor) -> Tensor:
    """x with a contiguous last dimension, and no stride of 0 but of a dimension of size 1."""
    strides = x.stride()
    if strides[-1] == 1 and 0 not in strides:
        return x
    expanded = any(size > 1 and stride == 0 for size, stride in zip(x.shape, strides, strict=True))
    return x.contiguous() if expanded or strides[-1] != 1 else x
