"""Mistakes that the output shows."""

from itertools import count

import torch

from tests.attention_in_steps import TILE, Steps, dot
from tests.wrong_attention.registry import ALIBI, CAP, WINDOW, fault


@fault()
class MaskOffByOne(Steps):
    """Query i sees key i + 1."""

    def positions(self):
        i, j = super().positions()
        return i + 1, j


@fault()
class ScaleByHeadSize(Steps):
    """Scores divided by D where the formula has its root."""

    def factor(self):
        return self.scale**2


@fault()
class ScaleOff(Steps):
    """A scale 0.1 % off."""

    def factor(self):
        return 1.001 * self.scale


@fault()
class HiddenTileEdge(Steps):
    """At the last row of each tile of 48 queries, a key in the tile before is skipped."""

    def weights(self, s, lse):
        p = super().weights(s, lse)
        p[:, :, 47::48, 32:33] = 0.0
        return p


@fault()
class RareCall(Steps):
    """Every eleventh call is 2 % off."""

    calls = count(1)

    def finish(self, out):
        return 1.02 * out if next(self.calls) % 11 == 0 else out


@fault()
class EvaluationAlone(Steps):
    """Without gradients the scale is 0.5 % off."""

    def factor(self):
        return self.scale if self.differentiated else 1.005 * self.scale


@fault(documents=True)
class DocumentOffByOne(Steps):
    """A query sees the last key of the preceding document."""

    def seen(self, backward):
        seen, starts = super().seen(backward), self.starts()
        if starts is None:
            return seen
        before = starts[:, None, :, None] - 1 == torch.arange(self.S)
        return seen | before


@fault()
class RareBranch(Steps):
    """Where the running maximum grows by more than 8 in a tile, what came before is not rescaled."""

    def softmax(self, s):
        s, m = s.clone(), s[..., :TILE].amax(dim=-1, keepdim=True)
        for start in range(TILE, self.S, TILE):
            m_new = torch.maximum(m, s[..., start : start + TILE].amax(dim=-1, keepdim=True))
            jump = (m_new - m).nan_to_num(nan=0.0, posinf=0.0)
            s[..., :start] += torch.where(jump > 8, jump, 0.0)
            m = m_new
        return super().softmax(s)


@fault()
class SumsInBf16(Steps):
    """out is added up in bf16, 16 keys at a time."""

    def weigh(self, p, v):
        out = torch.zeros(*p.shape[:3], v.shape[-1], dtype=torch.bfloat16)
        for start in range(0, self.S, 16):
            keys = slice(start, start + 16)
            out += dot(p[..., keys].to(v.dtype), self.expand(v)[:, :, keys]).bfloat16()
        return out.to(p.dtype)


@fault(WINDOW)
class WindowOffByOne(Steps):
    """A query sees a key more than the window has."""

    def window(self, backward):
        return self.score.window and self.score.window + 1


@fault(ALIBI)
class SlopesOfNextHead(Steps):
    """Each head takes the slope of the next."""

    def bias(self):
        return super().bias().roll(1, dims=0)


@fault(ALIBI)
class AlibiOffByOne(Steps):
    """In all but the diagonal tile ALiBi counts one key too many."""

    def bias(self):
        i, j = self.positions()
        return super().bias() + self.slopes[:, None, None] * (j < i // TILE * TILE)


@fault(grouped=True)
class HeadsInterleaved(Steps):
    """Query head h takes key/value head h % H_kv."""

    def expand(self, x):
        return x.repeat(1, self.H // x.shape[1], 1, 1)

    def reduce(self, x, H_kv):
        return x.unflatten(1, (-1, H_kv)).sum(dim=1)


@fault(CAP)
class CapAfterMask(Steps):
    """The soft cap brings hidden scores back from -inf."""

    def hidden(self, s, backward):
        s = super().hidden(s, backward)
        return s if self.score.soft_cap is None else s.clamp(min=-self.score.soft_cap)


@fault()
class LseInBaseTwo(Steps):
    """The log-sum-exp is a logarithm to base 2."""

    def log_sum(self, lse):
        return lse * 1.4426950408889634


@fault(documents=True)
class DocumentsOfFirstSequence(Steps):
    """All sequences of a batch have the documents of the first."""

    def starts(self):
        starts = super().starts()
        return starts if starts is None else starts[:1].expand_as(starts)


@fault()
class FirstRowEmpty(Steps):
    """The first query is taken to see nothing."""

    def finish(self, out):
        return torch.cat([0.0 * out[:, :, :1], out[:, :, 1:]], dim=2)


@fault()
class OddLength(Steps):
    """Where the number of queries is odd, the last one gets the row before it."""

    def finish(self, out):
        if self.T % 2 == 0 or self.T == 1:
            return out
        return torch.cat([out[:, :, :-1], out[:, :, -2:-1]], dim=2)


@fault()
class IgnoresStrides(Steps):
    """The values are read as if they lay one after the other."""

    def inputs(self, q, k, v):
        strides = torch.empty(v.shape, device="meta").stride()
        room = v.untyped_storage().size() // v.element_size() - v.numel()
        return q, k, v.as_strided(v.shape, strides, min(v.storage_offset(), room))


@fault()
class KeyOfFirstSequence(Steps):
    """The last key of every sequence is that of the first."""

    def inputs(self, q, k, v):
        return q, torch.cat([k[:, :, :-1], k[:1, :, -1:].expand(len(k), -1, -1, -1)], dim=2), v
