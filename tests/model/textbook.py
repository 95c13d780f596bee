"""The model once more, as its parts' papers write them: plain formulas in fp64, without sharing code with model/."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from model.options import Activation, Gate, GPTConfig, Norm, NormOver, NormPlace, NormScale, Positions, Scaling


class Textbook:
    """Logits of a model with these weights, for causal attention."""

    def __init__(self, config: GPTConfig, weights: Mapping[str, Tensor], vocab_size: int) -> None:
        self.config, self.vocab_size = config, vocab_size
        self.weights = {name: weight.double() for name, weight in weights.items()}

    def norm(self, x: Tensor, name: str, eps: float | None = None) -> Tensor:
        config = self.config
        eps = eps or config.norm_eps or 1e-5
        if config.norm is Norm.layer and not name.endswith(("q_norm", "k_norm")):
            x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + eps).sqrt()
        else:
            x = x / ((x * x).mean(-1, keepdim=True) + eps).sqrt()
        if config.norm_scale is NormScale.none:
            return x
        weight = self.weights[f"{name}.weight"] + (config.norm_scale is NormScale.plus_one)
        return x * weight + self.weights.get(f"{name}.bias", torch.zeros(1))

    def linear(self, x: Tensor, name: str) -> Tensor:
        product = torch.einsum("...i,oi->...o", x, self.weights[f"{name}.weight"])
        return product + self.weights.get(f"{name}.bias", torch.zeros(1))

    def frequency(self, i: int, D: int) -> float:
        """The angle between two positions of channel pair i of D channels."""
        config, scaling = self.config, self.config.rope_scaling
        f = config.rope_base ** (-2 * i / D)
        if scaling.kind is Scaling.none:
            return f
        turns = (scaling.original or 1) * f / (2 * math.pi)
        if scaling.kind is Scaling.linear:
            return f / scaling.factor
        if scaling.kind is Scaling.llama3:  # Meta's code, by wavelengths
            low, high = scaling.slow or 1.0, scaling.fast or 4.0
            if turns > high or turns < low:
                return f if turns > high else f / scaling.factor
            smooth = (turns - low) / (high - low)
            return (1 - smooth) * f / scaling.factor + smooth * f
        ends = []
        for rotations in (scaling.fast or 32.0, scaling.slow or 1.0):  # YaRN's code: the channel with so many turns
            ends.append(
                D * math.log((scaling.original or 1) / (rotations * 2 * math.pi)) / (2 * math.log(config.rope_base))
            )
        first, last = max(math.floor(ends[0]), 0), min(math.ceil(ends[1]), D - 1)
        ramp = min(max((i - first) / (last - first if last > first else 0.001), 0), 1)
        return f * (1 - ramp) + f / scaling.factor * ramp

    def turned(self, x: Tensor) -> Tensor:
        """x (T, D) with its first channels turned, pair by pair."""
        config, x = self.config, x.clone()
        D = int(x.shape[1] * config.rope_fraction)
        scaling = config.rope_scaling
        length = 0.1 * math.log(scaling.factor) + 1 if scaling.kind is Scaling.yarn else 1.0
        for m in range(len(x)):
            for i in range(D // 2):
                angle = m * self.frequency(i, D)
                a, b = x[m, i].item(), x[m, i + D // 2].item()
                x[m, i] = length * (a * math.cos(angle) - b * math.sin(angle))
                x[m, i + D // 2] = length * (b * math.cos(angle) + a * math.sin(angle))
        return x

    def attention(self, x: Tensor, layer: int, first: list[Tensor], embedding: Tensor | None, name: str) -> Tensor:
        """x (T, C) to (T, C); `first` gets the first layer's values, (H_kv, T, D)."""
        config = self.config
        H, H_kv, T = config.n_heads, config.n_kv_heads or config.n_heads, len(x)
        D = config.head_dim or config.n_embd // H
        q, k, v = self.linear(x, f"{name}.c_attn").split([H * D, H_kv * D, H_kv * D], dim=-1)
        if config.qk_norm:
            if config.qk_norm_over is NormOver.head:
                q, k = q.view(T, H, D), k.view(T, H_kv, D)
            eps = config.norm_eps or 1e-6
            q, k = self.norm(q, f"{name}.q_norm", eps), self.norm(k, f"{name}.k_norm", eps)
        q, k, v = (z.reshape(T, -1, D).transpose(0, 1) for z in (q, k, v))  # (heads, T, D)
        pattern = config.rope_layers or [True]
        if config.positions is Positions.rotary and pattern[layer % len(pattern)]:
            q, k = (torch.stack([self.turned(head) for head in z]) for z in (q, k))
        if layer == 0:
            first.append(v)
        if (weights := self.weights.get(f"{name}.value_weights")) is not None:
            others = [first[0]] if config.value_residual and layer else []
            if embedding is not None:
                others.append(embedding.view(T, H_kv, D).transpose(0, 1))
            assert len(weights) == 1 + len(others)
            v = weights[0] * v + sum(w * other for w, other in zip(weights[1:], others, strict=True))
        scale = (config.scale_dim or D) ** -0.5
        out = torch.zeros(T, H, D, dtype=torch.float64)
        for h in range(H):
            of = h // (H // H_kv)
            for i in range(T):
                p = (scale * k[of, : i + 1] @ q[h, i]).softmax(0)
                out[i, h] = p @ v[of, : i + 1]
        if config.gate is not Gate.none:
            out = out * (1 / (1 + (-self.linear(x, f"{name}.c_gate")).exp())).view(T, H, -1)
        return self.linear(out.flatten(1), f"{name}.c_proj")

    def mlp(self, x: Tensor, name: str) -> Tensor:
        def gelu(u):
            return u / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))

        kind, u = self.config.mlp, self.linear(x, f"{name}.c_fc")
        if kind in (Activation.swiglu, Activation.geglu):
            gate = self.linear(x, f"{name}.c_gate")
            u = (gate / (1 + (-gate).exp()) if kind is Activation.swiglu else gelu(gate)) * u
        else:
            exact = u / 2 * (1 + torch.erf(u / math.sqrt(2)))
            u = {Activation.gelu: gelu(u), Activation.gelu_exact: exact, Activation.relu2: u.clamp(min=0) ** 2}[kind]
        return self.linear(u, f"{name}.c_proj")

    def block(self, x: Tensor, layer: int, first: list[Tensor], embedding: Tensor | None, name: str) -> Tensor:
        place = self.config.norm_place
        for i, f in (
            (1, lambda u: self.attention(u, layer, first, embedding, f"{name}.attn")),
            (2, lambda u: self.mlp(u, f"{name}.mlp")),
        ):
            out = f(x if place is NormPlace.after else self.norm(x, f"{name}.ln_{i}"))
            x = x + (out if place is NormPlace.before else self.norm(out, f"{name}.ln_{i}_out"))
        return x

    def embed(self, tokens: Tensor) -> Tensor:
        x = self.weights["wte.weight"][tokens]
        return x * math.sqrt(self.config.n_embd) if self.config.embed_scale else x

    def stream(self, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        """After the last block, (T, C) for tokens (T,); and the first layer's values."""
        config, first = self.config, list[Tensor]()
        x = self.embed(tokens)
        if config.positions is Positions.learned:
            x = x + self.weights["wpe.weight"][: len(tokens)]
        if config.embed_norm:
            x = self.norm(x, "embed_norm")
        for layer in range(config.n_layers):
            x = self.block(x, layer, first, self.value_embedding(tokens, layer), f"h.{layer}")
        return x, first

    def value_embedding(self, tokens: Tensor, layer: int) -> Tensor | None:
        """Those of modded-nanogpt: [a, b, ..., a, b]."""
        n, L = self.config.value_embeddings, self.config.n_layers
        tables = [*range(n), *[None] * (L - 2 * n), *range(n)]
        return None if tables[layer] is None else self.weights[f"value_embeddings.{tables[layer]}.weight"][tokens]

    def head(self, x: Tensor) -> Tensor:
        weight = self.weights["wte.weight" if self.config.tied else "lm_head.weight"]
        logits = (x @ weight.T)[:, : self.vocab_size]
        cap = self.config.logit_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def logits(self, tokens: Tensor) -> Tensor:
        """(T, V) for tokens (T,)."""
        return self.head(self.norm(self.stream(tokens)[0], "ln_f"))

    def further_logits(self, tokens: Tensor) -> Tensor:
        """(T - 1, V): of the token after the next, for all tokens but the last."""
        (h, first), following = self.stream(tokens), self.embed(tokens[1:])
        joined = torch.cat([self.norm(h[:-1], "further.ln_h"), self.norm(following, "further.ln_e")], dim=-1)
        last = self.config.n_layers - 1
        embedding = self.value_embedding(tokens[:-1], last)
        first = [v[:, :-1] for v in first]
        x = self.block(self.linear(joined, "further.c_join"), last, first, embedding, "further.block")
        return self.head(self.norm(x, "further.ln_f"))
