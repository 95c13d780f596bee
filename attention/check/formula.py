"""An independent formula for attention and its backward pass, and the rounding to expect of each result.

    s   = c tanh(scale q k^T / c) + shift,  -inf where the query does not see the key        raw = scale q k^T
    s   = formula(raw, i, j, ...)           of a score by formula: `Change`
    p   = exp(s) / (exp(sink) + sum of exp(s))                         out = dropout(p) v
    dS  = P (dP - delta),  delta = rowsum(dP P)                        Dao 2023, "FlashAttention-2", algorithm 2

No implementation is called here. Implementations are compared with the formula in fp64; in their precision, the formula
shows the error of rounding alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..formula.derivative import derivatives
from ..formula.evaluate import ProgramInputs, full_index, program, run, sum_of_entries
from ..formula.graph import Node, leaf, topological
from ..formula.parse import parse
from ..precision import accum_dtype

# The formula rounds a sum once. An implementation may round it several times, because it rescales or adds tile by tile.
SEVERAL = 64.0
FURTHEST = 2.0  # scores after rounding, in expected errors
RESULTS = ("out", "lse", "dq", "dk", "dv", "dsinks", "dbias")


class Changed(NamedTuple):
    """Scores by a formula.

    change    the formula
    s, slope  the scores, and their derivatives by the raw ones, (B, H, T, S)
    entries   for each tensor's entry that a score reads: the tensor's name, the entry's indices, and the derivative of
              the score by it, (B, H, T, S)
    """

    change: Change
    s: Tensor
    slope: Tensor
    entries: list[tuple[str, list[Tensor], Tensor]]

    def summed(self, terms: Sequence[Tensor]) -> dict[str, Tensor]:
        """The tensors' gradients, by name, in fp64: the sums of terms (B, H, T, S) at the entries."""
        total = {name: torch.zeros_like(x, dtype=torch.float64) for name, x in self.change.tensors.items()}
        for (name, places, _), x in zip(self.entries, terms, strict=True):
            total[name] += sum_of_entries(x.contiguous(), places, total[name].shape)
        return {name: torch.atleast_1d(x) for name, x in total.items()}


@dataclass(frozen=True)
class Change:
    """A score by formula (docs/formulas.md). Its text is evaluated as it stands; derivatives are those of autograd.

    leaves   i, j, h, b and n, whole numbers that broadcast to (B, H, T, S), with a value for every pair
    seen     (B or 1, 1, T, S) bool: whether the query sees the key; elsewhere derivatives are 0
    tensors  by name
    """

    text: str
    leaves: dict[str, Tensor]
    seen: Tensor
    tensors: dict[str, Tensor]

    def keys_reversed(self) -> Change:
        """The same with its keys in reverse order."""
        return replace(self, leaves=self.leaves | {"j": self.leaves["j"].flip(-1)}, seen=self.seen.flip(-1))

    def run(self, nodes: Sequence[Node], raw: Tensor) -> tuple[list[Any], Tensor, list[Any]]:
        """The values of nodes, s, and the entries that were read with their names and indices, each for every pair."""
        s, read = raw.detach().requires_grad_(), list[Any]()
        leaves = {name: x.expand(raw.shape) for name, x in self.leaves.items()}

        def load(name: str, _: Any, index: list[Any]) -> Tensor:
            x = self.tensors[name].detach().to(raw.dtype)
            places = [y.expand(raw.shape) for y in full_index(x, index, leaves["b"])]
            entry = x[tuple(places)].expand(raw.shape).clone().requires_grad_()
            read.append((name, places, entry))
            return entry

        with torch.enable_grad():
            return run(program(nodes), ProgramInputs(leaves | {"s": s}, raw.dtype, [], [], load)), s, read

    def at(self, raw: Tensor) -> Changed:
        """The scores and derivatives for raw scores (B, H, T, S), in their precision."""
        (value,), s, read = self.run([parse(self.text)], raw)
        wanted = [s, *(entry for *_, entry in read)]
        with torch.enable_grad():
            found = torch.autograd.grad(value.sum(), wanted, materialize_grads=True)
        slope, *weights = (torch.where(self.seen, x, 0.0) for x in found)
        entries = [(name, places, x) for (name, places, _), x in zip(read, weights, strict=True)]
        return Changed(self, value.detach(), slope, entries)

    def noise(self, raw: Tensor) -> tuple[Tensor, Tensor]:
        """The variances of the scores and of their slopes by the rounding of every operation, in units of rounding."""
        root = parse(self.text)
        (slope,) = derivatives(root, [leaf("s")])
        return self._noise_of(root, raw), self._noise_of(slope, raw)

    def _noise_of(self, root: Node, raw: Tensor) -> Tensor:
        nodes = [x for x in topological([root]) if x.args and x.kind == "real" and x.op not in ("load", "real")]
        values = self.run([*nodes, *derivatives(root, nodes)], raw)[0]
        total = torch.zeros_like(raw)
        for x, weight in zip(values[: len(nodes)], values[len(nodes) :], strict=True):
            total += torch.as_tensor(x * weight).detach().nan_to_num(0.0, 0.0, 0.0) ** 2
        return torch.where(self.seen, total, 0.0)


@dataclass(frozen=True)
class Problem:
    """A call of attention, without its q, k and v.

    scale       of the scores
    seen        (B or 1, H or 1, T, S) bool: whether the query sees the key
    soft_cap    c in c tanh(s / c), or None
    shift       added to the scores, broadcast to (B, H, T, S): ALiBi; or None
    bias        added to the scores in the same way, with a gradient; or None
    sinks       (H,), or None
    keep        (B, H, T, S) bool: the weights that dropout keeps; None: all
    keep_scale  the factor of kept weights
    change      of the scores by a formula, or None
    """

    scale: float
    seen: Tensor
    soft_cap: float | None = None
    shift: Tensor | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    keep: Tensor | None = None
    keep_scale: float = 1.0
    change: Change | None = None

    def keys_reversed(self) -> Problem:
        """The problem with its keys in reverse order, which changes only the order of sums."""

        def flip(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.flip(-1)

        change = self.change and self.change.keys_reversed()
        shift, bias, keep = map(flip, (self.shift, self.bias, self.keep))
        return replace(self, seen=self.seen.flip(-1), shift=shift, bias=bias, keep=keep, change=change)


@dataclass(frozen=True)
class Passes:
    """Intermediate and final results of a forward and backward pass, of shape (B, H, T, S) unless noted otherwise.

    tanh       of the raw scores over the soft cap, or None: the cap's derivative is 1 - tanh^2
    p, kept    the weights before and after dropout
    p_sink     (B, H, T, 1) the sink's share, or None
    dp, delta  the gradient of p, and sum(dp p), (B, H, T, 1)
    ds, draw   gradients of the changed and of the raw scores
    parts      dk and dv of each query head, (B, H, S, D)
    results    by the names of RESULTS: out, dq (B, H, T, D); dk, dv (B, H_kv, S, D); lse (B, H, T); dsinks (H,); dbias;
               and the gradient of each tensor of a formula, such as d(bias)
    changed    by a formula
    """

    raw: Tensor
    s: Tensor
    tanh: Tensor | None
    p: Tensor
    kept: Tensor
    p_sink: Tensor | None
    dp: Tensor
    delta: Tensor
    ds: Tensor
    draw: Tensor
    parts: dict[str, Tensor]
    results: dict[str, Tensor]
    changed: Changed | None = None


def evaluate(q: Tensor, k: Tensor, v: Tensor, do: Tensor, problem: Problem) -> Passes:
    """Both passes in the precision of the inputs: q, do (B, H, T, D) and k, v (B, H_kv, S, D).

    Soft caps, shifts and sinks are fp32's or better, as in every implementation that has them.
    """
    H, H_kv, S = q.shape[1], k.shape[1], k.shape[2]
    dtype, wide = q.dtype, accum_dtype(q.dtype)
    k, v = (x.repeat_interleave(H // H_kv, dim=1) for x in (k, v))
    raw = s = (q * problem.scale) @ k.mT  # scaled first: fp16 then holds every score it can
    tanh = changed = None
    if problem.change is not None:
        changed = problem.change.at(s.to(wide))
        s = changed.s
    if problem.soft_cap is not None:
        tanh = torch.tanh(s.to(wide) / problem.soft_cap)
        s = problem.soft_cap * tanh
    for shift in (problem.shift, problem.bias):
        s = s if shift is None else s.to(wide) + shift.to(wide)
    s = s.masked_fill(~problem.seen, -torch.inf)
    joined = s
    if problem.sinks is not None:
        joined = torch.cat([s.to(wide), problem.sinks.to(wide)[:, None, None].expand(*s.shape[:3], 1)], dim=-1)
    weights = joined.softmax(dim=-1).masked_fill(~problem.seen.any(dim=-1, keepdim=True), 0.0)
    p, p_sink = weights[..., :S], None if problem.sinks is None else weights[..., S:]
    kept = p if problem.keep is None else torch.where(problem.keep, p * problem.keep_scale, 0.0)
    out = kept.to(dtype) @ v

    dp = do @ v.mT
    if problem.keep is not None:
        dp = torch.where(problem.keep, dp * problem.keep_scale, 0.0)
    delta = (dp * p).sum(dim=-1, keepdim=True)
    ds = p * (dp - delta)
    slope = 1.0 if tanh is None else 1 - tanh * tanh
    draw = (ds * (slope if changed is None else changed.slope)).to(dtype)
    dk, dv = problem.scale * (draw.mT @ q), kept.to(dtype).mT @ do
    results = {
        "out": out,
        "lse": joined.to(wide).logsumexp(dim=-1),
        "dq": problem.scale * (draw @ k),
        "dk": dk.unflatten(1, (H_kv, -1)).sum(dim=2),
        "dv": dv.unflatten(1, (H_kv, -1)).sum(dim=2),
    }
    if p_sink is not None:
        results["dsinks"] = -(p_sink * delta).sum(dim=(0, 2, 3))
    if problem.bias is not None:
        results["dbias"] = ds.sum_to_size(problem.bias.shape)
    if changed is not None:
        summed = changed.summed([ds * weight for *_, weight in changed.entries])
        results |= {f"d({name})": x for name, x in summed.items()}
    return Passes(raw, s, tanh, p, kept, p_sink, dp, delta, ds, draw, {"dk": dk, "dv": dv}, results, changed)


def expected_rounding(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    problem: Problem,
    exact: Passes,
    dtype: torch.dtype,
    eps: float | None = None,
) -> dict[str, Tensor]:
    """The root mean square error that rounding to `dtype` brings to each row of each result, to first order.

    q, k, v, do  in fp64, and `exact` computed from them
    eps          of the products, where it is not that of dtype

    Every intermediate result is taken to be stored with an independent relative error of one unit of rounding; delta is
    taken from the rounded output, as FlashAttention does. Rows have the shape of their result less its last dimension.
    """
    u = (torch.finfo(dtype).eps if eps is None else eps) / 2
    sums = SEVERAL * (torch.finfo(accum_dtype(dtype)).eps / 2 / u) ** 2  # in units of u^2
    tiny = smallest(dtype, q.device) ** 2 / u**2
    H, H_kv = q.shape[1], k.shape[1]
    k, v = (x.repeat_interleave(H // H_kv, dim=1) for x in (k, v))
    p, kept, ds, out = exact.p, exact.kept, exact.ds, exact.results["out"]
    slope = torch.ones_like(p) if exact.tanh is None else 1 - exact.tanh**2
    changed = exact.changed
    value_noise: Tensor | float = 0.0
    slope_noise: Tensor | float = 0.0
    if changed is not None:
        slope, (value_noise, slope_noise) = changed.slope, changed.change.noise(exact.raw)
    sees = problem.seen.any(dim=-1, keepdim=True)
    scale2, k2, v2, q2, do2 = problem.scale**2, k * k, v * v, q * q, do * do

    # Errors of scores are relative errors of exp(s); beyond 1 a weight is simply wrong.
    chain = sums * (1 + q.shape[-1] / 8)  # a sum over D, term by term
    terms, s2 = scale2 * (q2 @ k2.mT), exact.s.masked_fill(~problem.seen, 0.0) ** 2
    # The factors of a formula may be rounded with the queries.
    var_raw = (1 + (changed is not None) + chain) * terms + exact.raw**2 + tiny
    var_s = slope**2 * var_raw + sums * (1 + s2 + value_noise)
    var_s = torch.where(problem.seen, var_s, 0.0).clamp(max=1 / u**2)
    common = (p * p * var_s).sum(dim=-1, keepdim=True)  # of a row's sum of exponentials
    var_p = (var_s * (1 - 2 * p) + common).clamp(min=0)  # relative
    # The backward pass may compute p once more, from scores summed in another order and the rounded log of their sum.
    lse2 = exact.results["lse"].masked_fill(~sees.squeeze(-1), 0.0).unsqueeze(-1) ** 2
    var_p = (var_p + chain * terms + sums * (exact.raw**2 + s2 + lse2)).clamp(max=1 / u**2)
    stored = tiny * problem.seen
    var_out = (
        ((kept * kept * (var_s + 1) + stored) @ v2)
        - 2 * out * ((kept * p * var_s) @ v)
        + out**2 * (common + 1 + sums * (1 + lse2))  # the weights may be exp(s - lse)
        + tiny * sees
    ).clamp(min=0)
    # Where dp and delta nearly cancel, the order of their sums over D matters: the formula's may cancel exactly.
    var_dp = exact.dp**2 + chain * problem.keep_scale**2 * (do2 @ v2.mT)
    var_delta = (do2 * (var_out + chain * out * out)).sum(dim=-1, keepdim=True)
    var_delta = var_delta + (p * exact.dp).square().sum(dim=-1, keepdim=True)
    # Stored weights lose digits where they are tiny; dp - delta multiplies that.
    var_ds = ds * ds * (var_p + 1) + p * p * (var_dp + var_delta) + stored * (1 + (exact.dp - exact.delta) ** 2)
    var_draw = slope**2 * var_ds + stored
    if exact.tanh is not None and problem.soft_cap is not None:  # 1 - tanh^2 of scores near the cap cancels
        var_draw = var_draw + (2 * exact.tanh * ds) ** 2 * ((slope / problem.soft_cap) ** 2 * var_raw + sums)
    shifted: list[Changed] = []
    if changed is not None:  # derivatives at the ends of the scores that rounding may give
        shifted = [changed.change.at(exact.raw + sign * FURTHEST * u * var_raw.sqrt()) for sign in (-1, 1)]
        spread = ((shifted[1].slope - shifted[0].slope) / (2 * u)) ** 2
        var_draw = var_draw + ds * ds * (spread + sums * slope_noise)
    variances = {
        "out": var_out,
        "lse": common + sums * (1 + lse2),
        "dq": scale2 * (var_draw @ k2 + var_delta * ((p * slope) @ k) ** 2)
        + exact.results["dq"] ** 2 * (common + 1 + sums)
        + tiny * sees,
    }
    some = tiny * problem.seen.any(dim=-2).unsqueeze(-1)
    per_head = {
        "dk": scale2 * (var_draw.mT @ q2) + exact.parts["dk"] ** 2 + some,
        "dv": (kept * kept * (var_p + 1) + stored).mT @ do2 + exact.parts["dv"] ** 2 + some,
    }
    for name, x in per_head.items():
        variances[name] = x.unflatten(1, (H_kv, -1)).sum(dim=2) + exact.results[name] ** 2
    if exact.p_sink is not None and problem.sinks is not None:
        again = sums * (lse2 + problem.sinks.double()[:, None, None] ** 2)
        of_rows = exact.p_sink**2 * (var_delta + exact.delta**2 * (common + 1 + again)) + tiny
        variances["dsinks"] = (of_rows.sum(dim=(0, 2, 3)) + exact.results["dsinks"] ** 2).unsqueeze(-1)
    if problem.bias is not None:
        variances["dbias"] = var_ds.sum_to_size(problem.bias.shape) + exact.results["dbias"] ** 2
    if changed is not None:
        of_entries, sizes = [], []
        for n, (*_, weight) in enumerate(changed.entries):
            spread = ((shifted[1].entries[n][2] - shifted[0].entries[n][2]) / (2 * u)) ** 2
            # An error of delta is shared by a row; at most p w^2 of it reaches the entry that some of its scores read.
            of_entries.append(weight**2 * (var_ds + p * var_delta) + ds * ds * (spread + sums * weight**2))
            sizes.append((ds * weight).abs())
        size = changed.summed(sizes)
        for name, x in changed.summed(of_entries).items():
            x = x + sums * size[name] ** 2 + tiny
            variances[f"d({name})"] = x.unsqueeze(-1) if x.ndim == 1 else x
    return {name: u * x.mean(dim=-1).sqrt() for name, x in variances.items()}


def smallest(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The absolute error of numbers near zero, a scalar in fp64: what is lost below the smallest normal number, which
    GPUs may take for zero in bf16 and fp32."""
    limits = torch.finfo(dtype)
    lost = limits.smallest_normal * (limits.eps / 2 if dtype is torch.float16 else 1.0)
    return torch.tensor(max(lost, 1e-150), dtype=torch.float64, device=device)
