"""The layers around the recurrence, as they were published: projections, a short convolution, norms and output gates.

A row of KINDS says what a layer has; the layers are those of flash-linear-attention's fla/layers, with the same sizes
and initial values, but for the rates of gdn: A begins between 1 and 16 here, between 0 and 16 there.

    q, k, v = convolution(x W_q), convolution(x W_k), convolution(x W_v)
    q, k = q / |q|, k / |k|                             keys=l2
    log a = -exp(A) softplus(x W_a + dt)                rates: Dao and Gu 2024
    b = sigmoid(x W_b)                                  with the delta rule
    out = norm(mix(q, k, v)) activation(x W_g) W_o      gate
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import mix
from .fla import check_device, convolution, gated_norm, step_decays
from .recurrence import Decay, MixerError, Recurrence, document_starts

TAPS = 4  # tokens that a short convolution sees
EPS = 1e-5  # of the norms


class MixerState(NamedTuple):
    """What a layer has to know of the tokens before.

    recurrent  (B, H, K, V), the recurrence's state; None before the first token
    inputs     (B, TAPS - 1, channels), the convolution's last inputs; None without a convolution
    tokens     (B,) how many tokens came before
    """

    recurrent: Tensor | None
    inputs: Tensor | None
    tokens: Tensor


@dataclass(frozen=True)
class Kind:
    """A published layer.

    recurrence        what it computes
    keys              what becomes of queries and keys: elu + 1, rotated, of length 1, or nothing
    key_width         channels of all keys together, over the model's
    value_width       the same of the values
    convolution       whether q, k and v pass a short causal convolution and SiLU
    gate              of the normalised output
    """

    recurrence: Recurrence
    keys: Literal["elu", "rotary", "l2", "plain"]
    key_width: float
    value_width: float
    convolution: bool
    gate: Literal["silu", "sigmoid", "none"]


KINDS = {
    "linear": Kind(Recurrence(), "elu", 1, 1, False, "none"),
    "retnet": Kind(Recurrence(Decay.fixed), "rotary", 1, 2, False, "silu"),
    "gla": Kind(Recurrence(Decay.channel), "plain", 0.5, 1, False, "silu"),
    "deltanet": Kind(Recurrence(Decay.none, True), "l2", 1, 1, True, "none"),
    "gdn": Kind(Recurrence(Decay.head, True), "l2", 0.75, 1.5, True, "silu"),
    "kda": Kind(Recurrence(Decay.channel, True), "l2", 1, 1, True, "sigmoid"),
}
MIXERS = (*KINDS, "mamba2")


class ShortConvolution(nn.Module):
    """A causal convolution of each channel over TAPS tokens, and SiLU (as in Mamba-2). No tap crosses a document."""

    def __init__(self, channels: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, TAPS))
        nn.init.uniform_(self.weight, -(TAPS**-0.5), TAPS**-0.5)  # as nn.Conv1d
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None

    def forward(
        self, x: Tensor, documents: Tensor | None, before: Tensor | None, fused: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The output for x (B, T, channels), and the last TAPS - 1 inputs, zeros where they are of another document
        than the last; before: those before x, of its document.

        fused  whether flash-linear-attention's kernel computes it where nothing is before x
        """
        inputs, numbers = x, documents
        if fused and before is None:
            out = convolution(x, self.weight, self.bias, documents)
        else:
            if before is None:
                before = x.new_zeros(len(x), TAPS - 1, x.shape[-1])
            inputs = torch.cat([before.to(x), x], dim=1)
            weight = self.weight.to(x.dtype)
            out = x * weight[:, -1] if self.bias is None else torch.addcmul(self.bias.to(x.dtype), x, weight[:, -1])
            numbers = None if documents is None else F.pad(documents, (TAPS - 1, 0), mode="replicate")
            for back in range(1, TAPS):
                at = slice(TAPS - 1 - back, -back)
                earlier = inputs[:, at]
                if numbers is not None:
                    earlier = earlier.where(numbers[:, at].eq(numbers[:, TAPS - 1 :])[..., None], 0)
                out = torch.addcmul(out, earlier, weight[:, -1 - back])
            out = F.silu(out)
        last = inputs[:, 1 - TAPS :]
        if numbers is not None:
            last = last.where(numbers[:, 1 - TAPS :].eq(numbers[:, -1:])[..., None], 0)
        return out, last


class RecurrentLayer(nn.Module):
    """What the layers share: a recurrence of n_heads states (key_dim, value_dim), and a convolution before it."""

    recurrence: Recurrence
    n_heads: int
    key_dim: int
    value_dim: int
    mixer: str
    conv: ShortConvolution | None

    def is_fused(self, x: Tensor) -> bool:
        """Whether the package's kernels also compute what stands around the recurrence, which a compiler fuses itself.

        Raises MixerError where they cannot run.
        """
        fused = self.mixer == "fla" and x.shape[1] >= TAPS and not torch.compiler.is_compiling()
        if fused:
            check_device(x.device)
        return fused

    def mixed(
        self, q: Tensor, k: Tensor, v: Tensor, before: MixerState, documents: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """`mix` of tokens that follow those of a state."""
        mixer = "recurrent" if q.shape[2] == 1 else self.mixer
        return mix(
            q, k, v, recurrence=self.recurrence, initial=before.recurrent, documents=documents, mixer=mixer, **options
        )

    @property
    def flops_per_token(self) -> int:
        """Operations of the recurrence in a forward pass."""
        return (4 + 2 * self.recurrence.delta) * self.n_heads * self.key_dim * self.value_dim

    def new_state(self, sequences: int, device: torch.device, dtype: torch.dtype) -> MixerState:
        """The state before the first token: zeros in fp32, and the convolution's inputs in `dtype`."""
        inputs = None
        if self.conv is not None:
            inputs = torch.zeros(sequences, TAPS - 1, len(self.conv.weight), device=device, dtype=dtype)
        recurrent = torch.zeros(sequences, self.n_heads, self.key_dim, self.value_dim, device=device)
        return MixerState(recurrent, inputs, torch.zeros(sequences, device=device, dtype=torch.long))


class LinearAttention(RecurrentLayer):
    """A layer of KINDS: x (B, T, C) to (B, T, C)."""

    def __init__(self, kind: Kind, n_embd: int, n_heads: int, mixer: str = "chunked") -> None:
        """Raises MixerError where the widths are no multiples of the heads."""
        super().__init__()
        self.kind, self.recurrence, self.n_heads, self.mixer = kind, kind.recurrence, n_heads, mixer
        keys, values = round(kind.key_width * n_embd), round(kind.value_width * n_embd)
        if keys % n_heads or values % n_heads or (kind.keys == "rotary" and keys // n_heads % 2):
            raise MixerError(
                f"{keys} channels of keys and {values} of values do not divide into {n_heads} heads; choose another "
                "model.n_embd or model.n_heads."
            )
        self.key_dim, self.value_dim = keys // n_heads, values // n_heads
        self.q_proj = nn.Linear(n_embd, keys, bias=False)
        self.k_proj = nn.Linear(n_embd, keys, bias=False)
        self.v_proj = nn.Linear(n_embd, values, bias=False)
        self.o_proj = nn.Linear(values, n_embd, bias=False)
        self.conv = ShortConvolution(2 * keys + values) if kind.convolution else None
        self.b_proj = nn.Linear(n_embd, n_heads, bias=False) if kind.recurrence.delta else None
        self.o_norm = nn.Parameter(torch.ones(self.value_dim))
        rates = DECAYS.get((kind.recurrence.decay, kind.recurrence.delta))
        self.decay = None if rates is None else rates(self, n_embd)
        low = kind.gate == "sigmoid"  # Kimi's: through as many channels as a head has
        self.g_proj: nn.Module | None = low_rank(n_embd, self.value_dim, values) if low else None
        if kind.gate == "silu":
            self.g_proj = nn.Linear(n_embd, values, bias=False)

    def forward(
        self, x: Tensor, documents: Tensor | None = None, state: MixerState | None = None
    ) -> tuple[Tensor, MixerState]:
        """The output, and the state behind the last token.

        documents  (B, T) integers that change where another document begins
        state      of the tokens before, where x goes on with a sequence
        """
        B, T, _ = x.shape
        fused = self.is_fused(x)
        before = state or MixerState(None, None, torch.zeros(B, dtype=torch.long, device=x.device))
        qkv, inputs = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1), None
        if self.conv is not None:
            qkv, inputs = self.conv(qkv, documents, before.inputs, fused)
        qk, v = qkv.split([2 * self.n_heads * self.key_dim, self.n_heads * self.value_dim], dim=-1)
        qk, tokens = qk.unflatten(-1, (-1, self.key_dim)), before.tokens + T  # (B, T, 2 H, K)
        if self.kind.keys == "elu":
            qk = F.elu(qk) + 1
        elif self.kind.keys == "rotary":
            positions = before.tokens[:, None] + torch.arange(T, device=x.device)  # (B, T)
            if documents is not None:
                starts = document_starts(documents)
                starts[:, 0] = False  # it goes on with the state's
                positions = positions - positions.where(starts, 0).cummax(dim=1).values
            qk, tokens = rotated(qk, positions), positions[:, -1] + 1
        v = v.unflatten(-1, (-1, self.value_dim))
        q, k, v = (y.transpose(1, 2) for y in (*qk.chunk(2, dim=2), v))  # (B, H, T, D)
        beta = None if self.b_proj is None else self.b_proj(x).float().sigmoid().transpose(1, 2)
        log_decay = None if self.decay is None else self.decay(x, fused)
        out, recurrent = self.mixed(
            q, k, v, before, documents, log_decay=log_decay, beta=beta, unit=self.kind.keys == "l2"
        )
        out = out.transpose(1, 2)  # (B, T, H, V)
        gate = None if self.g_proj is None else self.g_proj(x).unflatten(-1, (self.n_heads, -1))
        if fused and gate is not None:
            out = gated_norm(out, gate, self.o_norm, self.kind.gate, EPS)
        else:
            out = rms_norm(out, self.o_norm)
            if gate is not None:
                out = out * (F.silu if self.kind.gate == "silu" else F.sigmoid)(gate.float())
        return self.o_proj(out.to(x.dtype).flatten(-2)), MixerState(recurrent, inputs, tokens)


class Rates(nn.Module):
    """log a = -exp(A_log) softplus(x W + dt_bias): Dao and Gu 2024, "Transformers are SSMs", section 6.

    One number for each head, or for each channel of the keys through a product of low rank (Kimi Team 2025).
    """

    def __init__(self, layer: LinearAttention, n_embd: int) -> None:
        super().__init__()
        heads, by_channel = layer.n_heads, layer.kind.recurrence.decay is Decay.channel
        rates = heads * layer.key_dim if by_channel else heads
        self.proj: nn.Module = nn.Linear(n_embd, heads, bias=False)
        if by_channel:
            self.proj = low_rank(n_embd, layer.value_dim, rates, bias=False)
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        self.dt_bias = nn.Parameter(initial_steps(rates))

    def forward(self, x: Tensor, fused: bool = False) -> Tensor:
        """(B, H, T, K or 1); fused: by flash-linear-attention's kernel."""
        steps = self.proj(x).unflatten(-1, (len(self.A_log), -1))
        if fused:
            return step_decays(steps, self.A_log, self.dt_bias).transpose(1, 2)
        steps = F.softplus(steps.float() + self.dt_bias.view(steps.shape[2:]))
        return (-self.A_log.exp()[:, None] * steps).transpose(1, 2)


class LogisticRates(nn.Module):
    """log a = log sigmoid(x W_1 W_2 + c) / 16 for each channel: Yang et al. 2024, "Gated Linear Attention", 4.4."""

    RANK, TEMPERATURE = 16, 16.0

    def __init__(self, layer: LinearAttention, n_embd: int) -> None:
        super().__init__()
        self.heads = layer.n_heads
        self.proj = low_rank(n_embd, self.RANK, layer.n_heads * layer.key_dim)

    def forward(self, x: Tensor, fused: bool = False) -> Tensor:
        """(B, H, T, K); fused changes nothing."""
        return F.logsigmoid(self.proj(x).float().unflatten(-1, (self.heads, -1)).transpose(1, 2)) / self.TEMPERATURE


class FixedRates(nn.Module):
    """a = 1 - 2^(-5 - h) for head h: Sun et al. 2023, "Retentive Network", equation 8."""

    def __init__(self, layer: LinearAttention, n_embd: int) -> None:
        super().__init__()
        self.heads = layer.n_heads

    def forward(self, x: Tensor, fused: bool = False) -> Tensor:
        """(B, H, T, 1); fused changes nothing."""
        heads = torch.arange(self.heads, dtype=torch.float64, device=x.device)
        rates = torch.log1p(-(2.0 ** (-5 - heads))).float()
        return rates[None, :, None, None].expand(x.shape[0], -1, x.shape[1], 1)


# By the decay and whether there is the delta rule; nothing decays without one.
DECAYS: dict[tuple[Decay, bool], Any] = {
    (Decay.fixed, False): FixedRates,
    (Decay.channel, False): LogisticRates,
    (Decay.channel, True): Rates,
    (Decay.head, True): Rates,
}


class Mamba2(RecurrentLayer):
    """Mamba-2 as a linear attention with head decay: Dao and Gu 2024, "Transformers are SSMs", section 7.

    The step size dt of a token ties its decay, exp(-exp(A_log) dt), and its weight, dt. All heads share queries and
    keys (C and B there), and each adds D times its values.
    """

    conv: ShortConvolution

    def __init__(self, n_embd: int, n_heads: int, state: int, mixer: str = "chunked") -> None:
        """n_heads: of 2 n_embd channels; state: channels of the keys. Raises MixerError."""
        super().__init__()
        self.width, self.n_heads, self.mixer = 2 * n_embd, n_heads, mixer
        if self.width % n_heads:
            raise MixerError(f"{self.width} channels do not divide into {n_heads} heads; choose another model.n_heads.")
        self.recurrence, self.key_dim, self.value_dim = Recurrence(Decay.head), state, self.width // n_heads
        self.in_proj = nn.Linear(n_embd, 2 * self.width + 2 * state + n_heads, bias=False)
        self.conv = ShortConvolution(self.width + 2 * state, bias=True)
        self.A_log = nn.Parameter(torch.empty(n_heads).uniform_(1, 16).log())
        self.dt_bias = nn.Parameter(initial_steps(n_heads))
        self.D = nn.Parameter(torch.ones(n_heads))
        self.norm = nn.Parameter(torch.ones(self.width))
        self.o_proj = nn.Linear(self.width, n_embd, bias=False)

    def forward(
        self, x: Tensor, documents: Tensor | None = None, state: MixerState | None = None
    ) -> tuple[Tensor, MixerState]:
        """As LinearAttention's."""
        B, T, _ = x.shape
        before = state or MixerState(None, None, torch.zeros(B, dtype=torch.long, device=x.device))
        gate, inner, dt = self.in_proj(x).split([self.width, self.width + 2 * self.key_dim, self.n_heads], dim=-1)
        inner, inputs = self.conv(inner, documents, before.inputs, self.is_fused(x))
        values, key, query = inner.split([self.width, self.key_dim, self.key_dim], dim=-1)
        v = values.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)  # (B, H, T, V)
        q, k = (y[:, None].expand(B, self.n_heads, T, self.key_dim) for y in (query, key))
        steps = F.softplus(dt.float() + self.dt_bias).transpose(1, 2)  # (B, H, T)
        log_decay = (-self.A_log.exp()[:, None] * steps)[..., None]
        out, recurrent = self.mixed(q, k, v, before, documents, log_decay=log_decay, beta=steps, scale=1.0)
        out = (out + self.D[:, None, None].to(v.dtype) * v).transpose(1, 2).flatten(-2)  # (B, T, 2 C)
        out = rms_norm(out.float() * F.silu(gate.float()), self.norm)
        return self.o_proj(out.to(x.dtype)), MixerState(recurrent, inputs, before.tokens + T)


def build_mixer(name: str, n_embd: int, n_heads: int, mixer: str = "chunked") -> LinearAttention | Mamba2:
    """The layer of a name of MIXERS, in a model of that width whose attention has n_heads. Raises MixerError."""
    if name == "mamba2":
        return Mamba2(n_embd, 2 * n_heads, 2 * (n_embd // n_heads), mixer)
    if name not in KINDS:
        raise MixerError(f"{name} is no mixer; choose one of {', '.join(MIXERS)}.")
    return LinearAttention(KINDS[name], n_embd, n_heads, mixer)


def low_rank(inputs: int, rank: int, outputs: int, bias: bool = True) -> nn.Sequential:
    """A product of rank `rank`; bias: of the second matrix."""
    return nn.Sequential(nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=bias))


def initial_steps(count: int) -> Tensor:
    """What softplus turns into step sizes drawn log-uniformly from 0.001 to 0.1."""
    steps = torch.exp(torch.rand(count) * math.log(100) + math.log(0.001))
    return steps + torch.log(-torch.expm1(-steps))


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """x over the root of its last axis' mean square, times weight, in fp32."""
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), EPS)


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """x (B, T, H, K) rotated by the angles of positions (B, T): Su et al. 2021, halves of a head as pairs."""
    half = x.shape[-1] // 2
    frequencies = 10_000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = positions[..., None, None].float() * frequencies  # (B, T, 1, K / 2)
    first, second = x.float().split(half, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
