"""The implementations as `attn_implementation=` of Hugging Face's transformers.

>>> import gpt_attention.transformers
>>> gpt_attention.transformers.register()
>>> model = AutoModelForCausalLM.from_pretrained("gpt2", attn_implementation="gpt_attention_flash")
>>> with gpt_attention.transformers.dropout_key(seed=1337, step=step):
...     model(tokens, labels=tokens).loss.backward()

transformers describes a mask as a composition of functions. Their names and closures are read; no mask is evaluated for
every pair of a query and a key. A mask that an implementation does not support is refused.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils

from .. import build_attention
from ..decode.cache import Cache
from ..dropout import DropoutKey
from ..errors import Option, UnsupportedAttention, in_python
from ..interface import ONE_DOCUMENT, Attention, AttentionShape
from ..layout import Layout, documents
from ..options import AttentionConfig
from ..score import Score

PREFIX = "gpt_attention_"
REFUSED = frozenset({"position_bias", "cache", "cu_seq_lens_q", "output_attentions"})  # arguments of transformers
NAMES = tuple(PREFIX + name for name in ("naive", "tiled", "flash"))

# Set by `dropout_key` for the whole process: a backward pass recomputes activations in other threads.
_key: DropoutKey | None = None
# The key of an implementation: its name, dropout, head size, dtype and device.
Asked = tuple[str, float, int, torch.dtype, torch.device]
_built: dict[Asked, Attention] = {}


@functools.cache
def register() -> None:
    """Make gpt_attention_naive, gpt_attention_tiled and gpt_attention_flash known to transformers."""
    for name in NAMES:
        AttentionInterface.register(name, functools.partial(attend, name))
        AttentionMaskInterface.register(name, visible)
    # transformers takes every name that contains "flash" for a build of flash-attn: it looks for the package, or falls
    # back to a name that the model lists. The names registered here skip that check.
    check = PreTrainedModel._check_and_adjust_attn_implementation

    @functools.wraps(check)
    def keep_ours(self: PreTrainedModel, attn_implementation: str | None, *rest: Any, **options: Any) -> str:
        if attn_implementation in NAMES:
            return attn_implementation
        return check(self, attn_implementation, *rest, **options)

    PreTrainedModel._check_and_adjust_attn_implementation = keep_ours


@contextmanager
def dropout_key(seed: int | Tensor, step: int | Tensor, first_sequence: int | Tensor = 0) -> Iterator[None]:
    """Within the block attention drops what this key determines: the same weights in every run and implementation.

    seed, step      of training, below 2**32
    first_sequence  index in the global batch of the first sequence, for gradient accumulation and several ranks

    For a compiled model pass 0-dim int64 tensors, whose new values cause no recompilation. If activations are
    recomputed, run the backward pass inside the block too. Other dropout in the model stays torch's.
    """
    global _key
    before, _key = _key, DropoutKey(seed, step, layer=0, first_sequence=first_sequence)
    try:
        yield
    finally:
        _key = before


@dataclass(frozen=True)
class Visible:
    """A mask of transformers, in the form in which it reaches `attend`.

    found  what layers that share it need not make again: what runs their calls, as `attend` notes it, and `lengths`

    For static caches transformers makes masks before the forward pass and handles them like the tensors they are
    elsewhere: hence `ndim` and `contiguous`.
    """

    causal: bool
    window: int | None = None
    layout: Layout = ONE_DOCUMENT
    found: dict[Any, Any] = field(default_factory=dict, compare=False)

    ndim = 4

    def contiguous(self) -> Visible:
        return self

    def lengths(self, keys: Tensor, is_shared: bool) -> Tensor:
        """(B,) int32: the keys that a single query sees, up to its own. A static cache has room for more."""
        if is_shared and (lengths := self.found.get((keys.shape, keys.device))) is not None:
            return lengths
        length = self.layout.query_start(1, keys.shape[2]) - self.layout.k_start + 1
        lengths = torch.full(keys.shape[:1], length, dtype=torch.int32, device=keys.device)
        if is_shared:
            self.found[keys.shape, keys.device] = lengths
        return lengths


def attend(
    name: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Visible | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers.

    query       (B, H, T, D)
    key, value  (B, H_kv, S, D)
    others      sliding_window, softcap, s_aux (H,), which are sinks, and is_causal; the rest must be None or False

    Returns (B, T, H, D). Raises UnsupportedAttention for what the implementation would have to ignore.
    """
    softcap, s_aux = others.get("softcap"), others.get("s_aux")
    for argument in REFUSED.intersection(others):
        if others[argument] is not None and others[argument] is not False:
            raise UnsupportedAttention(
                f"attn_implementation={name} does not support {argument}; leave it out or choose eager."
            )
    if isinstance(attention_mask, Tensor):
        raise UnsupportedAttention(
            f"attn_implementation={name} takes no mask of shape {tuple(attention_mask.shape)}; pass one of shape "
            "(batch, length) that hides padding, or choose eager."
        )
    compiling = torch.compiler.is_compiling()
    in_graph = compiling or (query.is_cuda and torch.cuda.is_current_stream_capturing())
    is_shared = attention_mask is not None and not in_graph
    if attention_mask is None:  # without a mask these arguments decide, as for sdpa and flash-attn
        is_causal = others.get("is_causal")
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        attention_mask = Visible(causal, others.get("sliding_window"))
    # Rotary positions may have brought queries and keys to fp32.
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(query.device.type):
        query, key, value = (x.to(torch.get_autocast_dtype(query.device.type)) for x in (query, key, value))
    # The layers of a step share its mask, and most are alike: the first notes there what runs the others. To look at a
    # short call takes the host longer than to start it.
    inference = dropout == 0 and not torch.is_grad_enabled()
    asked = name, inference, dropout, scaling, softcap, s_aux is None
    if is_shared and (found := attention_mask.found.get(asked)):
        alike, is_like, lengths = found
        if is_like(query, key, value, *lengths):
            return alike.run((query, key, value, *lengths), by_rows=True)[0], None
    make, layout, tensors = Score if compiling else cached_score, attention_mask.layout, [query, key, value]
    score = make(attention_mask.causal, attention_mask.window, softcap, False, s_aux is not None)
    computed: dict[str, Any] = {"score": score, "scale": scaling, "sinks": s_aux}
    built = implementation(name, dropout, query)
    if decodes := query.shape[2] == 1 and score.causal and layout.document_starts is None and inference:
        tensors.append(attention_mask.lengths(key, is_shared))
        out = built.decode(query, Cache(*tensors[1:]), **computed).out
    else:
        drop = layer_key(name, module, dropout)
        out = built(query, key, value, layout=layout, dropout_key=drop, **computed).out
    known = built.known if is_shared and (decodes or layout is ONE_DOCUMENT) else None
    if known and (alike := known.get((score, scaling), tensors, decodes)):
        attention_mask.found[asked] = alike, known.guard(tensors), tensors[3:]
    return out.transpose(1, 2), None


cached_score = functools.lru_cache(maxsize=256)(Score)  # to check its fields takes longer than a short call


def implementation(name: str, dropout: float, query: Tensor) -> Attention:
    """The implementation for a name of NAMES and queries (B, H, T, D) like these. It is built once, because a compiled
    model can look it up but cannot build it. Raises UnsupportedAttention."""
    key = (name, dropout, query.shape[-1], query.dtype, query.device)
    return _built.get(key) or build(key)


@torch.compiler.disable
def build(asked: Asked) -> Attention:
    """Make `implementation` know one."""
    name, dropout, head_dim, dtype, device = asked
    try:
        attend = build_attention(AttentionConfig(name.removeprefix(PREFIX), dropout=dropout))
        attend.check(AttentionShape(head_dim, 1, 1, dtype, device))
    except UnsupportedAttention as error:
        raise UnsupportedAttention(error.worded(as_argument)) from error
    _built[asked] = attend
    return attend


def as_argument(option: Option) -> str:
    """An Option as an argument of transformers."""
    if option.name != "attention":
        return in_python(option)
    ours = f"{PREFIX}{option.value}"
    return f"attn_implementation={ours if ours in NAMES else option.value}"


def layer_key(name: str, module: nn.Module, dropout: float) -> DropoutKey | None:
    """The key of the layer `module`; None where nothing is to be dropped."""
    if dropout == 0:
        return None
    if _key is None:
        raise UnsupportedAttention(
            f"attn_implementation={name} drops attention weights (here {dropout:g} of them) by a key, and none is set; "
            "train under `with gpt_attention.transformers.dropout_key(seed, step):`."
        )
    return _key.at_layer(int(module.layer_idx))  # type: ignore[arg-type]


@torch.compiler.disable  # it reads closures, and looks at the values of the padding
def visible(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | Visible | None = None,
    **_: Any,
) -> Visible:
    """A mask function of transformers.

    q_offset, kv_offset  positions of the first query and of the first key
    attention_mask       (B, positions) bool, False for padding

    Raises UnsupportedAttention for a mask that the implementations do not support.
    """
    if isinstance(attention_mask, Visible):
        return attention_mask
    parts = MaskParts.of(mask_function)
    q_offset = int(q_offset)
    q_end, k_end = q_offset + q_length, kv_offset + kv_length
    starts = None if attention_mask is None else padding_starts(attention_mask, q_end, max(q_end, k_end))
    if parts.sequences is not None:
        if starts is not None:
            raise refused("sequences packed in a row together with padding")
        starts = torch.searchsorted(parts.sequences, parts.sequences, out_int32=True)
    if starts is not None and not parts.causal:
        raise refused("padding that is hidden from tokens before it, as in an encoder,")
    layout = ONE_DOCUMENT if starts is None else documents(starts)._replace(k_start=kv_offset)
    if parts.causal and q_end != k_end:  # else the last query stands at the last key, as by default
        layout = layout._replace(q_start=q_offset, k_start=kv_offset)
    return Visible(parts.causal, parts.window, layout)


@dataclass(frozen=True)
class MaskParts:
    """The parts of a mask function of transformers.

    sequences  (B, T) for each token the number of its sequence among those packed in its row
    """

    causal: bool
    window: int | None = None
    sequences: Tensor | None = None

    @classmethod
    def of(cls, function: Callable[..., Any]) -> MaskParts:
        """Raises UnsupportedAttention for a function of unknown meaning."""
        if function is masking_utils.causal_mask_function:
            return cls(causal=True)
        if function is masking_utils.bidirectional_mask_function:
            return cls(causal=False)
        if getattr(function, "__module__", None) != masking_utils.__name__:
            raise refused(f"the mask function {function}")
        kind = function.__qualname__.partition(".<locals>")[0]
        captured = inspect.getclosurevars(function).nonlocals
        if kind == "sliding_window_overlay":
            return cls(causal=False, window=captured["sliding_window"])
        if kind == "packed_sequence_mask_function":
            return cls(causal=False, sequences=captured["packed_sequence_mask"])
        if kind == "remap_positions_for_packed_sequence":  # positions within a sequence differ as those in the row do
            return cls.of(captured["mask_function"])
        if kind != "and_masks":
            raise refused(f"the mask {kind}")
        parts = [cls.of(part) for part in captured["mask_functions"]]
        windows = [part.window for part in parts if part.window is not None]
        sequences = [part.sequences for part in parts if part.sequences is not None]
        causal = any(part.causal for part in parts)
        if windows and not causal and not sequences:
            raise refused("a window that is not causal")
        return cls(causal, min(windows, default=None), sequences[0] if sequences else None)


def padding_starts(mask: Tensor, seen: int, length: int) -> Tensor | None:
    """(B, length) int32: where the run of real or of padding tokens begins that each position belongs to.

    mask    (B, positions) bool, False for padding
    seen    positions that queries see; a cache may have room for more
    length  positions of keys

    Real tokens then see only each other; what padding sees does not matter. None where nothing is padding.
    Waits for the device. Raises UnsupportedAttention for padding among real tokens.
    """
    if (missing := length - mask.shape[1]) > 0:
        mask = F.pad(mask, (0, missing))
    mask = mask[:, :length]
    if mask[:, :seen].all():
        return None
    position = torch.arange(length, device=mask.device)
    first = mask.int().argmax(dim=1, keepdim=True)
    end = first + mask.sum(dim=1, keepdim=True)
    if not torch.equal(mask, (position >= first) & (position < end)):
        raise refused("padding between the tokens of a sequence")
    return torch.where(position < first, 0, torch.where(position < end, first, end)).to(torch.int32)


def refused(what: str) -> UnsupportedAttention:
    """The refusal of a mask."""
    return UnsupportedAttention(
        f"attn_implementation={PREFIX}* does not support {what}; it supports causal masks, sliding windows, padding "
        "before or after a sequence and packed sequences. Choose eager."
    )
