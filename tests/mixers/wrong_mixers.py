"""Mixers with common mistakes, for tests that have to catch them. A docstring describes the mistake."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mixers.check import Mixer
from mixers.chunked import chunked
from mixers.recurrence import Decay, MixerInputs, Recurrence, document_starts
from mixers.recurrent import recurrent

CHUNK = 4
Result = tuple[Tensor, Tensor]
FAULTS: dict[str, Mixer] = {}


def fault(function: Mixer) -> Mixer:
    FAULTS[function.__name__] = function
    return function


def changed(inputs: MixerInputs, recurrence: Recurrence, scale: float, **others: Any) -> Result:
    """A right mixer with chunks, of inputs that a mistake has changed."""
    return chunked(replace(inputs, **others), recurrence, scale, size=CHUNK)


def of(name: str, change: Callable[[Tensor], Tensor | None]) -> Mixer:
    """A right mixer that changes one of its inputs, where it has that."""

    def mixer(inputs, recurrence, scale):
        x = getattr(inputs, name)
        return changed(inputs, recurrence, scale, **{name: None if x is None else change(x)})

    return mixer


def edges(T: int) -> Tensor:
    """(T, 1): whether a token is the first of a chunk that is not the row's first."""
    t = torch.arange(T)[:, None]
    return (t % CHUNK == 0) & (t > 0)


FAULTS |= {
    "decay_left_out_at_chunk_edges": of("log_decay", lambda g: g.masked_fill(edges(g.shape[2]), 0.0)),
    "decay_of_the_next_token": of("log_decay", lambda g: g.roll(-1, dims=2)),
    "decay_in_16_bits": of("log_decay", lambda g: g.bfloat16().to(g.dtype)),
    "decay_clamped": of("log_decay", lambda g: g.clamp(min=-5.0)),
    "decay_of_the_first_head": of("log_decay", lambda g: g[:, :1].expand_as(g)),
    "decay_without_gradient": of("log_decay", Tensor.detach),
    "decay_of_weak_tokens_left_out": of("log_decay", lambda g: g.masked_fill(g > -0.001, 0.0)),
    "beta_without_gradient": of("beta", Tensor.detach),
    # Nothing is reflected.
    "beta_at_most_one": of("beta", lambda beta: beta.clamp(max=1.0)),
    # Although nobody asked.
    "keys_of_length_one": of("k", lambda k: torch.nn.functional.normalize(k, dim=-1)),
    # Documents are ignored.
    "state_crosses_documents": of("documents", lambda documents: None),
    # All rows have these.
    "documents_of_the_first_row": of("documents", lambda x: x[:1].expand_as(x)),
    # A document's first token still sees the one before.
    "documents_begin_a_token_late": of("documents", lambda x: torch.cat([x[:, :1], x[:, :-1]], dim=1)),
    # The state is cut at the next chunk's beginning alone.
    "documents_begin_where_a_chunk_does": of("documents", lambda x: x[:, torch.arange(x.shape[1]) // CHUNK * CHUNK]),
    "no_initial_state": of("initial", lambda state: None),
    "initial_state_without_gradient": of("initial", Tensor.detach),
    # Memory of (V, K) is read as (K, V).
    "initial_state_transposed": of("initial", lambda state: state.mT.reshape(state.shape)),
}


@fault
def chunk_edge_off_by_one(inputs: MixerInputs, recurrence: Recurrence, scale: float) -> Result:
    """The state that the next chunk gets lacks the chunk's last token."""
    key = inputs.k.masked_fill(edges(inputs.k.shape[2] + 1)[1:], 0.0)
    out, state = changed(inputs, recurrence, scale)
    without, _ = changed(inputs, recurrence, scale, k=key)
    first = edges(inputs.k.shape[2])
    return torch.where(first, without, out), state


@fault
def state_lost_after_three_chunks(inputs: MixerInputs, recurrence: Recurrence, scale: float) -> Result:
    """The fourth chunk begins with nothing."""
    B, _, T, _ = inputs.k.shape
    documents = torch.zeros(B, T, dtype=torch.long) if inputs.documents is None else inputs.documents
    return changed(inputs, recurrence, scale, documents=2 * documents + (torch.arange(T) >= 3 * CHUNK))


@fault
def last_state_without_gradient(inputs: MixerInputs, recurrence: Recurrence, scale: float) -> Result:
    """No gradient comes from the last state."""
    out, state = changed(inputs, recurrence, scale)
    return out, state.detach()


@fault
def last_state_decays_by_padding(inputs: MixerInputs, recurrence: Recurrence, scale: float) -> Result:
    """Tokens that fill the last chunk decay as the last one does."""
    out, state = changed(inputs, recurrence, scale)
    if inputs.log_decay is not None:
        state = state * (-out.shape[2] % CHUNK * inputs.log_decay[:, :, -1, :, None]).exp()
    return out, state


@fault
def scale_of_the_head(inputs: MixerInputs, recurrence: Recurrence, scale: float) -> Result:
    """The scale is that of the head's size, whatever the caller says."""
    return changed(inputs, recurrence, inputs.k.shape[-1] ** -0.5)


@fault
def last_key_gradient(inputs: MixerInputs, recurrence: Recurrence, scale: float) -> Result:
    """dk of the last token is 1 % too large."""
    k = inputs.k
    factor = torch.ones(k.shape[2], 1, dtype=k.dtype)
    factor[-1] = 1.01
    return changed(inputs, recurrence, scale, k=k.detach() + (k - k.detach()) * factor)


@fault
def reads_before_it_writes(inputs: MixerInputs, recurrence: Recurrence, scale: float) -> Result:
    """A token does not see itself."""
    out, state = changed(inputs, recurrence, scale)
    beta = 1.0 if inputs.beta is None else inputs.beta[..., None]
    return out - scale * (inputs.q * inputs.k).sum(-1, keepdim=True) * beta * inputs.v, state


@fault
def state_in_16_bits(inputs: MixerInputs, recurrence: Recurrence, scale: float) -> Result:
    """The state between chunks is rounded."""
    return pieces(inputs, recurrence, scale, lambda state: state.bfloat16().to(state.dtype))


@fault
def state_of_other_heads(inputs: MixerInputs, recurrence: Recurrence, scale: float) -> Result:
    """Heads swap their states between chunks."""
    return pieces(inputs, recurrence, scale, lambda state: state.roll(1, dims=1))


def pieces(inputs: MixerInputs, recurrence: Recurrence, scale: float, between: Callable[[Tensor], Tensor]) -> Result:
    """A right mixer, chunk by chunk, but for what happens to the state between two of them."""
    outs, state, T = [], inputs.initial, inputs.k.shape[2]
    starts = None if inputs.documents is None else document_starts(inputs.documents)
    for begin in range(0, T, CHUNK):
        at = slice(begin, begin + CHUNK)
        if state is not None and begin:
            state = between(state)
            if starts is not None:
                state = torch.where(starts[:, begin, None, None, None], 0, state)
        cut: dict[str, Any] = {"documents": None if inputs.documents is None else inputs.documents[:, at]}
        for name in ("q", "k", "v", "log_decay", "beta"):
            cut[name] = None if (x := getattr(inputs, name)) is None else x[:, :, at]
        part = replace(inputs, initial=state, **cut)
        out, state = recurrent(part, recurrence, scale)
        outs.append(out)
    assert state is not None
    return torch.cat(outs, dim=2), state


@fault
def delta_of_the_state_before_the_decay(inputs: MixerInputs, recurrence: Recurrence, scale: float) -> Result:
    """The delta rule reads the state that has not decayed yet."""
    if not recurrence.delta or recurrence.decay is Decay.none:
        return changed(inputs, recurrence, scale)
    return token_by_token(inputs, scale, lambda before, after: before)


@fault
def delta_without_beta(inputs: MixerInputs, recurrence: Recurrence, scale: float) -> Result:
    """beta multiplies the value alone: k (b v - k^T S), not b k (v - k^T S)."""
    if not recurrence.delta:
        return changed(inputs, recurrence, scale)
    return token_by_token(inputs, scale, lambda before, after: after, removes=1.0)


def token_by_token(
    inputs: MixerInputs,
    scale: float,
    read: Callable[[Tensor, Tensor], Tensor],
    removes: float | None = None,
    narrow: bool = False,
) -> Result:
    """The delta rule of the state that `read` chooses, before or after the decay, removed `removes` or beta times;
    narrow: a state in v's precision."""
    q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (inputs.q, inputs.k, inputs.v))
    B, H, T, K = k.shape
    state = v.new_zeros(B, H, K, v.shape[-1]) if inputs.initial is None else inputs.initial
    starts = None if inputs.documents is None else document_starts(inputs.documents)
    outs = []
    for t in range(T):
        if starts is not None and t:
            state = torch.where(starts[:, t, None, None, None], 0, state)
        before = state
        if inputs.log_decay is not None:
            state = inputs.log_decay[:, :, t].exp()[..., None] * state
        beta = torch.ones(B, H, 1) if inputs.beta is None else inputs.beta[:, :, t, None]
        found = (k[:, :, t, None] @ read(before, state))[:, :, 0]
        written = beta * v[:, :, t] - (beta if removes is None else removes) * found
        state = state + k[:, :, t, :, None] * written[:, :, None]
        state = state.to(inputs.v.dtype).to(state.dtype) if narrow else state
        outs.append(scale * (q[:, :, t, None] @ state)[:, :, 0])
    return torch.stack(outs, dim=2).to(inputs.v.dtype), state


def without_borders(inputs: MixerInputs, recurrence: Recurrence, scale: float) -> Result:
    """All pairs of tokens at once, weighted by exp(G_i) exp(-G_j), which overflows where decays are strong."""
    assert inputs.log_decay is not None
    G = inputs.log_decay.cumsum(2)
    q, k = inputs.q * G.exp(), inputs.k * (-G).exp()
    beta = 1.0 if inputs.beta is None else inputs.beta[..., None]
    out = scale * (q @ k.mT).tril() @ (beta * inputs.v)
    return out, (k * G[:, :, -1:].exp()).mT @ (beta * inputs.v)


def state_in_the_inputs_precision(inputs: MixerInputs, recurrence: Recurrence, scale: float) -> Result:
    """No fault in fp32."""
    return token_by_token(inputs, scale, lambda before, after: after, narrow=True)


# Faults of a mixer without the delta rule, documents and initial state.
OF_SUMS: dict[str, Mixer] = {"decay_as_a_quotient": without_borders}
RIGHT: dict[str, Mixer] = {
    "recurrent": recurrent,
    "chunked": chunked,
    "chunks of 4": lambda inputs, recurrence, scale: chunked(inputs, recurrence, scale, size=CHUNK),
    "chunks of 7": lambda inputs, recurrence, scale: chunked(inputs, recurrence, scale, size=7),
    "piece by piece": lambda inputs, recurrence, scale: pieces(inputs, recurrence, scale, lambda state: state),
}
