"""Mistakes in dropout's masks, and mistakes that only gradients show."""

from dataclasses import replace

import torch

from attention import keep_mask
from tests.attention_in_steps import TILE, Steps
from tests.wrong_attention.registry import CAP, SINKS, WINDOW, fault


@fault(dropout=0.1)
class MaskIgnoresLayer(Steps):
    """The same dropout mask in every layer."""

    def keep(self, backward):
        self.key = self.key and self.key.at_layer(0)
        return super().keep(backward)


@fault(dropout=0.1)
class KeepScaleOff(Steps):
    """Kept weights are scaled by 1/256 too much."""

    def keep_factor(self):
        return super().keep_factor() * (1 + 1 / 256)


@fault()
class LastKeyGradient(Steps):
    """dk of the last key is a tenth too large."""

    def gradients(self, dq, dk, dv, dsinks):
        return dq, torch.cat([dk[:, :, :-1], 1.1 * dk[:, :, -1:]], dim=2), dv, dsinks


@fault(CAP)
class CapWithoutDerivative(Steps):
    """The backward pass takes the soft cap for the identity."""

    def slope(self, raw):
        return torch.ones_like(raw)


@fault(dropout=0.1)
class MaskSharedByHeads(Steps):
    """All heads drop the same weights."""

    def keep(self, backward):
        keep = super().keep(backward)
        return keep if keep is None else keep[:, :1].expand_as(keep)


@fault(SINKS)
class SinkWithoutGradient(Steps):
    """The sinks' gradient is zero."""

    def gradients(self, dq, dk, dv, dsinks):
        return dq, dk, dv, 0.0 * dsinks


@fault(SINKS)
class SinkMissingInBackward(Steps):
    """The backward pass normalises the weights without the sink."""

    def weights(self, s, lse):
        return super().weights(s, s.logsumexp(dim=-1) if self.finished else lse)

    finished = False

    def finish(self, out):
        self.finished = True
        return out


@fault(dropout=0.1)
class DropoutShiftedInBackward(Steps):
    """The backward pass drops the weight beside the one that the forward dropped."""

    def keep(self, backward):
        keep = super().keep(backward)
        return keep.roll(1, dims=-1) if keep is not None and backward else keep


@fault()
class LastTileGradient(Steps):
    """dv of the last tile of keys is 2 % too small."""

    def gradients(self, dq, dk, dv, dsinks):
        dv = dv.clone()
        dv[:, :, (self.S - 1) // TILE * TILE :] *= 0.98
        return dq, dk, dv, dsinks


@fault(WINDOW)
class BackwardIgnoresWindow(Steps):
    """The backward pass sees keys behind the window."""

    def window(self, backward):
        return None if backward else self.score.window


@fault(grouped=True)
class GradientOfFirstHead(Steps):
    """dk and dv are those of the first query head of a group."""

    def reduce(self, x, H_kv):
        return x.unflatten(1, (H_kv, -1))[:, :, 0]


@fault(dropout=0.1)
class DeltaIgnoresDropout(Steps):
    """delta is taken from the weights before dropout."""

    def delta(self, do, out, p, dp):
        return super().delta(do, out, p, dp) * (1 - self.rate)


@fault()
class ScoreGradientInBf16(Steps):
    """The backward pass rounds the gradient of the scores to bf16."""

    def rounded(self, ds, dtype):
        return ds.bfloat16().to(dtype)


@fault(dropout=0.1)
class DropRateOff(Steps):
    """1/256 of the weights is dropped too much."""

    def keep(self, backward):
        if self.key is None:
            return None
        return keep_mask(self.key, self.rate + 1 / 256, self.B, self.H, self.T, self.S)


@fault(dropout=0.1)
class MaskIgnoresStep(Steps):
    """The same dropout mask in every step."""

    def keep(self, backward):
        self.key = self.key and replace(self.key, step=0)
        return super().keep(backward)
