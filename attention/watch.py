"""The attention of a running model, judged against fp64 while it trains.

>>> from gpt_attention import watch
>>> with watch(every=100, log=print):
...     trainer.train()

At steps 1, 101, 201, ... of the optimizer one call of attention is taken from the model, of another layer each time: q,
k, v, the output and, in the backward pass, the gradients. The judge of `gpt-attention check` compares them with fp64
(check/judge.py). Calls of torch's scaled_dot_product_attention are seen, and those of transformers' eager, sdpa and
flex_attention. The model computes the same bits as without watch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType, ModuleType
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from .check.calls import weights_shown
from .check.formula import Problem
from .check.judge import Verdict, judge, worst_of
from .errors import AttentionError, UnsupportedAttention
from .interface import Attention
from .layout import Layout
from .options import AttentionConfig
from .score import Score

# As many sequences and heads are compared at a step as have so many pairs of a query and a key, at least one of each.
PAIRS = 2**20
TF32_EPS = 2**-10
OF_QUERIES, OF_KEYS = ("q", "do", "out", "lse", "dq"), ("k", "v", "dk", "dv")
NO_CALL = (
    "no call of attention with gradients was seen: train without torch.compile and without reentrant checkpoints, by "
    "torch's scaled_dot_product_attention or transformers' eager, sdpa or flex_attention"
)
Attend = Callable[[Tensor, Tensor, Tensor], Any]  # q, k, v to the result of the model's function


def watch(every: int = 100, log: Callable[[dict[str, Any]], object] = print) -> Watch:
    """Within the block the attention of the model that trains is judged at each `every`-th step of its optimizer.

    log  takes a Line for each watched step: a dict for `wandb.log`, which `print` shows as a sentence

    Raises AttentionError if `every` is not positive.
    """
    if every < 1:
        raise AttentionError(f"watch(every={every}) needs a positive number of steps, such as 100.")
    return Watch(every, log)


class Line(dict[str, Any]):
    """What a watched step showed.

    watch/step        of the optimizer, from 1
    watch/layer       the module's name, or the number of the call
    watch/shape       of q, k and v
    watch/error       the largest error of a row, as a share of what rounding explains: above 1 it is wrong
    watch/worst       its place
    watch/wrong       what attention got wrong
    watch/not_finite  the tensors with values that are not finite
    watch/not_judged  what was not compared, with the reason

    What does not apply is left out.
    """

    def __str__(self) -> str:
        parts = []
        if "watch/layer" in self:
            parts.append(f"{self['watch/layer']}, {self['watch/shape']}")
        if "watch/wrong" in self:
            parts.append(f"WRONG: {self['watch/wrong']}")
        if "watch/error" in self:
            error, worst = self["watch/error"], self["watch/worst"]
            parts.append(f"the largest error is {error:.3g} of what rounding explains, {worst}")
        if "watch/not_finite" in self:
            parts.append(f"not finite: {self['watch/not_finite']}")
        if "watch/not_judged" in self:
            parts.append(f"not judged: {self['watch/not_judged']}")
        return f"attention at step {self['watch/step']}: " + "; ".join(parts)


@dataclass(frozen=True)
class Meaning:
    """What a call is to compute.

    mask     broadcasts to (B, H, T, S): True or a number to add where a query sees a key
    causal   query i sees the keys up to i
    pairs    a mask function of FlexAttention, or None
    dropout  the probability of dropping a weight
    """

    scale: float | None
    mask: Tensor | None = None
    causal: bool = False
    pairs: Callable[..., Tensor] | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None
    dropout: float = 0.0

    def problem(self, q: Tensor, k: Tensor, sequences: slice, heads: slice, keep: Tensor | None) -> Problem:
        """The judge's problem for some sequences and query heads of a call; keep, (B, H, T, S) bool, is of all heads of
        these sequences."""
        T, S, shift = q.shape[2], k.shape[2], None
        seen = torch.ones(1, 1, T, S, dtype=torch.bool, device=q.device)
        if self.causal:
            seen = seen.tril()
        if self.mask is not None:
            x = self.mask[(None,) * (4 - self.mask.ndim)][..., :S]
            x = x if x.shape[0] == 1 else x[sequences]
            x = x if x.shape[1] == 1 else x[:, heads]
            if x.dtype is torch.bool:
                seen = seen & x
            else:
                # The lowest number hides a key, unless it stands at all keys of a query: then all weights are equal.
                low = x < torch.finfo(x.dtype).min / 2
                hidden = low & (~low.all(dim=-1, keepdim=True) | x.isinf())
                seen, shift = seen & ~hidden, x.masked_fill(hidden, 0.0)
        if self.pairs is not None:
            ranges = ((sequences.start, sequences.stop), (heads.start, heads.stop), (0, T), (0, S))
            places = (torch.arange(*x, device=q.device).view(-1, *[1] * (3 - axis)) for axis, x in enumerate(ranges))
            seen = seen & self.pairs(*places)
        return Problem(
            scale=1 / math.sqrt(q.shape[-1]) if self.scale is None else self.scale,
            seen=seen,
            soft_cap=self.soft_cap,
            shift=shift,
            sinks=None if self.sinks is None else self.sinks[heads],
            keep=None if keep is None else keep[:, heads],
            keep_scale=1.0 if keep is None else 1 / (1 - self.dropout),
        )


@dataclass
class Taken:
    """A call, to judge. The probe of a training run (recipe/training/parity_layers.py) makes its own.

    values     q, k, v and out, in the backward pass also do, dq, dk and dv, all (B, H, T, D); other results by the
               names of formula.RESULTS
    sequences  those that are compared, and of their key/value heads those of `groups`, with the query heads
    problem    that of some of the query heads that are compared
    needs      the results besides out
    unseen     why it cannot be judged, or None
    tf32       whether products of fp32 may be rounded to TF32
    """

    layer: str
    values: dict[str, Tensor]
    sequences: slice
    groups: slice
    problem: Callable[[slice], Problem] | None = None
    needs: list[str] = field(default_factory=list)
    unseen: str | None = None
    tf32: bool = False

    def heads(self) -> slice:
        """The query heads that are compared."""
        G = self.values["q"].shape[1] // self.values["k"].shape[1]
        return slice(self.groups.start * G, self.groups.stop * G)

    def line(self, step: int) -> Line:
        """The judgement, after the backward pass. Raises OutOfMemoryError."""
        shapes = [f"{name} {tuple(self.values[name].shape)}" for name in "qkv"]
        shape = f"{', '.join(shapes)} {str(self.values['q'].dtype).removeprefix('torch.')}"
        line = Line({"watch/step": step, "watch/layer": self.layer, "watch/shape": shape})
        others = ((name, int((~x.isfinite()).sum())) for name, x in self.values.items() if name != "lse")
        broken = {name: count for name, count in others if count}
        wrong = [f"{name} is not finite" for name in attentions(broken)]
        if broken:
            line["watch/not_finite"] = ", ".join(f"{n} ({c} of {self.values[n].numel()})" for n, c in broken.items())
        unseen = [] if self.unseen is None else [self.unseen]
        if broken.keys() & {"q", "k", "v"}:
            unseen.append("q, k or v is not finite")
        if not unseen:
            verdicts = self.verdicts(broken, unseen)
            worst = worst_of(verdicts)
            line |= {"watch/error": worst.share, "watch/worst": f"{worst.name} of {worst.place()}"}
            wrong += [f"{x.name} of {x.place()} is {x.error:.3g} off" for x in verdicts if not x.passes]
        if wrong:
            line["watch/wrong"] = ", ".join(wrong)
        if unseen:
            line["watch/not_judged"] = "; ".join(unseen)
        return line

    def verdicts(self, broken: dict[str, int], unseen: list[str]) -> list[Verdict]:
        """The verdicts on what can be compared; adds the rest to `unseen`."""
        absent = [name for name in ("do", *self.needs) if name not in self.values]
        if absent:
            unseen.append(f"gradients: the backward pass did not reach {', '.join(absent)}")
        elif "do" in broken:
            unseen.append("gradients: that of the output is not finite")
        names = ["out", *([] if unseen else self.needs)]
        of = dict.fromkeys(OF_QUERIES, self.heads()) | dict.fromkeys(OF_KEYS, self.groups)
        part = {name: x[self.sequences, of[name]] if name in of else x for name, x in self.values.items()}
        # Under autocast the function gets fp32 and computes in 16 bits.
        dtype = max((part["q"].dtype, part["out"].dtype), key=lambda dtype: torch.finfo(dtype).eps)
        q, k, v = (part[name].to(dtype) for name in "qkv")
        do = part["do"].to(dtype) if len(names) > 1 else torch.zeros_like(part["out"], dtype=dtype)
        eps = TF32_EPS if self.tf32 and dtype is torch.float32 else None
        assert self.problem is not None

        def placed(verdict: Verdict) -> Verdict:
            """The same with the sequence and head of its row in the call."""
            if verdict.name not in of:
                return verdict
            sequence, head, *token = verdict.row
            return replace(verdict, row=(sequence + self.sequences.start, head + of[verdict.name].start, *token))

        return [*map(placed, judge(q, k, v, do, self.problem, {name: part[name] for name in names}, eps))]


def attentions(broken: Collection[str]) -> list[str]:
    """Of a call's tensors that are not finite, those that attention made so from finite ones."""
    if {"q", "k", "v"} & set(broken):
        return []
    return [name for name in broken if name == "out" or (name != "do" and "do" not in broken)]


class Watch(ExitStack):
    """The block of `watch`: counts steps, chooses calls and takes them.

    step        the number of steps made
    judged      for each layer that was seen, how often it was judged
    calls       seen in this step
    taken       the call of this step, or None
    others      the layer, shape of q and finite tensors of its other calls
    inside      whether a function that is watched runs: it may call another
    optimizers  the one whose steps count, then those that stepped after it
    implementation  computes torch's scaled_dot_product_attention instead; None: torch does
    """

    implementation: Attention | None = None

    def __init__(self, every: int, log: Callable[[dict[str, Any]], object]) -> None:
        super().__init__()
        self.every, self.log = every, log
        self.step, self.calls, self.inside = 0, 0, False
        self.judged: dict[str, int] = {}
        self.taken: Taken | None = None
        self.optimizers: list[torch.optim.Optimizer] = []
        self.others: list[tuple[str, str, dict[str, Tensor]]] = []

    def replace(self, name: str) -> Self:
        """Within the block, an implementation of this library computes torch's scaled_dot_product_attention.

        It takes calls without a mask tensor and without dropout. Others raise UnsupportedAttention, and nothing falls
        back.
        """
        choices = {cls.name: cls for cls in Attention.__subclasses__() if hasattr(cls, "name")}
        if name not in choices:
            raise UnsupportedAttention(f"{name} is not known; choose one of {', '.join(sorted(choices))}.")
        self.implementation = choices[name](AttentionConfig(name))
        return self

    def __enter__(self) -> Self:
        self.callback(register_optimizer_step_post_hook(self.stepped).remove)
        for owner, name, function in self.replacements():
            self.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, function)
        return self

    def replacements(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        """Where a module has a name for torch's function, or transformers looks functions up, and what stands in."""
        sdpa = F.scaled_dot_product_attention
        watched = self.sdpa(sdpa)
        for module in list(sys.modules.values()):
            if isinstance(module, ModuleType) and not module.__name__.startswith("torch._"):
                for name, value in list(vars(module).items()):
                    if value is sdpa:
                        yield module, name, watched
        transformers = sys.modules.get("transformers.modeling_utils")
        if transformers is not None:
            interface = transformers.AttentionInterface
            yield interface, "get_interface", self.interface(interface.get_interface)

    def stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """torch's hook after a step of any optimizer. Of several, the steps of one count."""
        if self.optimizers and optimizer not in self.optimizers:
            self.optimizers.append(optimizer)
            return
        self.optimizers = [optimizer]  # if it is not the first, that one is no longer in use
        if self.step % self.every == 0:
            line = Line({"watch/step": self.step + 1, "watch/not_judged": NO_CALL})
            try:
                line = line if self.taken is None else self.taken.line(self.step + 1)
            except torch.OutOfMemoryError:
                line["watch/not_judged"] = "too little memory is free"
            for layer, shape, finite in self.others:
                broken = [name for name, flag in finite.items() if not flag]
                wrong = [f"{name} of {layer}, q {shape}, is not finite" for name in attentions(broken)]
                if wrong:
                    line["watch/wrong"] = ", ".join([*filter(None, [line.get("watch/wrong")]), *wrong])
            self.log(line)
        self.step, self.calls, self.taken, self.others = self.step + 1, 0, None, []

    def sdpa(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """torch's scaled_dot_product_attention, watched."""

        def scaled_dot_product_attention(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attn_mask: Tensor | None = None,
            dropout_p: float = 0.0,
            is_causal: bool = False,
            scale: float | None = None,
            enable_gqa: bool = False,
        ) -> Tensor:
            attend = partial(
                function,
                attn_mask=attn_mask,
                dropout_p=dropout_p,
                is_causal=is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
            if self.implementation is not None:
                attend = partial(self.compute, attn_mask is not None, dropout_p, is_causal, scale)
            if torch.compiler.is_compiling():
                return attend(query, key, value)
            return self.observe(attend, (query, key, value), Meaning(scale, attn_mask, is_causal, dropout=dropout_p))

        return scaled_dot_product_attention

    def compute(
        self, masked: bool, dropout: float, causal: bool, scale: float | None, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """What torch's function computes, by the implementation that stands in for it. Raises UnsupportedAttention."""
        assert self.implementation is not None
        if masked or dropout:
            asked = "attn_mask" if masked else f"dropout_p={dropout:g}"
            raise UnsupportedAttention(
                f'watch(...).replace("{self.implementation.name}") takes no {asked}; leave .replace out for this model.'
            )
        if torch.is_autocast_enabled(q.device.type):
            q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
        # torch's mask begins at the first key.
        layout = Layout(q_start=0 if causal and q.shape[2] != k.shape[2] else None)
        return self.implementation(q, k, v, score=Score(causal=causal), layout=layout, scale=scale).out

    def interface(self, get_interface: Callable[..., Callable[..., Any]]) -> Callable[..., Callable[..., Any]]:
        """transformers' choice of an attention function, which gives watched ones."""

        def get(self_: Any, attn_implementation: str | None, default: Callable[..., Any]) -> Callable[..., Any]:
            function, name = get_interface(self_, attn_implementation, default), attn_implementation or "eager"
            if torch.compiler.is_compiling() or name not in ("eager", "sdpa", "flex_attention"):
                return function

            def attention(
                module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **others: Any
            ) -> Any:
                def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
                    return function(module, q, k, v, attention_mask, **others)

                meaning = meaning_of(name, module, query, attention_mask, others)
                return self.observe(attend, (query, key, value), meaning, module)

            return attention

        return get

    def observe(
        self, attend: Attend, inputs: tuple[Tensor, ...], meaning: Meaning | str, module: nn.Module | None = None
    ) -> Any:
        """The result of attend(q, k, v), and the call if it is the one to take.

        meaning  or the reason why the call cannot be judged
        """
        if self.step % self.every or self.inside:
            return attend(*inputs)
        self.inside = True
        try:
            learns = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
            if not learns or torch._C._current_graph_task_id() != -1:  # evaluation, or activations computed again
                return attend(*inputs)
            self.calls += 1
            layer = layer_of(module) or f"call {self.calls}"
            count = self.judged.setdefault(layer, 0)
            if self.taken is not None or count > min(self.judged.values()):
                finite = {name: x.detach().isfinite().all() for name, x in zip("qkv", inputs, strict=True)}
                self.others.append((layer, str(tuple(inputs[0].shape)), finite))
                return tap(attend, inputs, lambda name, x: finite.update({name: x.isfinite().all()}))
            self.judged[layer] = count + 1
            result, self.taken = take(layer, attend, inputs, meaning, sum(self.judged.values()) - 1)
            return result
        finally:
            self.inside = False


def meaning_of(name: str, module: nn.Module, query: Tensor, mask: Any, others: dict[str, Any]) -> Meaning | str:
    """What an attention function of transformers is to compute, or why that is not known."""
    for argument in ("position_bias", "sinks"):
        if others.get(argument) is not None:
            return f"a call with {argument}"
    dropout = others.get("dropout", 0.0) if module.training or name == "sdpa" else 0.0
    causal, pairs, tensor = False, None, None
    if hasattr(mask, "mask_mod"):
        pairs = mask.mask_mod
    elif isinstance(mask, Tensor):
        tensor = mask
    elif mask is not None:
        return f"a mask of type {type(mask).__name__}"
    elif name == "sdpa" and query.shape[2] > 1:
        asked = others.get("is_causal")
        causal = bool(getattr(module, "is_causal", True) if asked is None else asked)
    return Meaning(others.get("scaling"), tensor, causal, pairs, others.get("softcap"), others.get("s_aux"), dropout)


def layer_of(module: nn.Module | None) -> str | None:
    """The name, in the model whose forward pass runs, of a module, or else of the innermost one in that pass."""
    frame: FrameType | None = sys._getframe(1)
    running = []
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and code.co_varnames[:1] == ("self",):
            running.append(frame.f_locals["self"])
        frame = frame.f_back
    running = [x for x in running if isinstance(x, nn.Module)]
    names = {id(x): name for name, x in running[-1].named_modules()} if running else {}
    return names.get(id(module or running[0])) if names else None


def take(
    layer: str, attend: Attend, inputs: tuple[Tensor, ...], meaning: Meaning | str, number: int
) -> tuple[Any, Taken]:
    """The result of attend(q, k, v), and the call, to which the backward pass will add gradients."""
    q, k, v = inputs
    values = {name: x.detach().clone() for name, x in zip("qkv", inputs, strict=True)}
    meaning = unknown_shapes(q, k, v) or meaning
    if isinstance(meaning, str):
        return attend(*inputs), Taken(layer, values, slice(0), slice(0), unseen=meaning)
    if meaning.sinks is not None:  # a parameter, which the optimizer will change
        meaning = replace(meaning, sinks=meaning.sinks.detach().clone())
    needs = ["d" + name for name, x in zip("qkv", inputs, strict=True) if x.requires_grad]
    B, H, T, _ = q.shape
    pairs, H_kv = T * k.shape[2], k.shape[1]
    n, m = max(1, min(B, PAIRS // (H * pairs))), max(1, min(H_kv, PAIRS // (H // H_kv * pairs)))
    first, group = number % (B - n + 1), number // (B - n + 1) % (H_kv - m + 1)
    taken = Taken(layer, values, slice(first, first + n), slice(group, group + m), needs=needs)
    taken.tf32 = q.is_cuda and torch.get_float32_matmul_precision() != "highest"
    keep = None

    generator = torch.default_generator  # of functions without one
    if q.device.type != "cpu":
        generator = torch.get_device_module(q.device).default_generators[q.device.index or 0]
    before = generator.get_state()
    result = tap(attend, inputs, lambda name, x: values.update({name: x.clone()}))
    if meaning.dropout:
        after = generator.get_state()
        try:
            keep = kept_weights(attend, taken, lambda: generator.set_state(before))
        finally:
            generator.set_state(after)
        if keep is None:
            taken.unseen = "dropout, whose mask does not come back with the generator's state"
    start = taken.heads().start

    def problem(part: slice) -> Problem:
        heads = slice(start + part.start, start + part.stop)
        return meaning.problem(values["q"], values["k"], taken.sequences, heads, keep)

    taken.problem = problem
    return result, taken


def tap(attend: Attend, inputs: tuple[Tensor, ...], see: Callable[[str, Tensor], None]) -> Any:
    """The result of attend(q, k, v); see(name, x) is called with out, in the backward pass with do, dq, dk and dv."""
    # Views, whose gradients are those of this call alone. The backward pass adds them in the order of q, k and v, as
    # without views, because it visits first what was made last.
    views = list(inputs)
    for i in (2, 1, 0):
        if inputs[i].requires_grad:
            views[i] = inputs[i].view_as(inputs[i])
            views[i].register_hook(partial(see, "d" + "qkv"[i]))
    result = attend(*views)
    see("out", out_of(result).detach())
    swapped = isinstance(result, tuple)
    out = result[0] if swapped else result
    if out.requires_grad:
        out.register_hook(lambda x: see("do", x.transpose(1, 2) if swapped else x))
    return result


def unknown_shapes(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why tensors cannot be judged, or None."""
    if any(type(x) not in (Tensor, nn.Parameter) for x in (q, k, v)):
        return f"tensors of type {type(q).__name__}"
    if q.ndim != 4 or k.ndim != 4 or k.shape[:3] != v.shape[:3] or len(q) != len(k) or 0 in (*q.shape, *k.shape):
        return "shapes other than q (B, H, T, D) and k, v (B, H_kv, S, D)"
    return None


def out_of(result: Any) -> Tensor:
    """The output, (B, H, T, D), of torch's function or of one of transformers."""
    return result[0].transpose(1, 2) if isinstance(result, tuple) else result


@torch.no_grad()
def kept_weights(attend: Attend, taken: Taken, rewind: Callable[[], object]) -> Tensor | None:
    """Which weights of the sequences dropout kept, (B, H, T, S) bool; None if the output does not come back.

    With q = 0 no weight that a query sees is zero, and with one-hot rows in v the output shows the weights.
    """
    q, k, v = (taken.values[name] for name in "qkv")
    rewind()
    if not torch.equal(out_of(attend(q, k, v)), taken.values["out"]):
        return None

    def again(v: Tensor) -> Tensor:
        rewind()
        return out_of(attend(torch.zeros_like(q), k, v))[taken.sequences] != 0

    return weights_shown(again, v)
