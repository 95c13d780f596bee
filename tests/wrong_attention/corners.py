"""Mistakes that only unusual inputs show: each has the line of the check that finds it."""

import torch

from tests.attention_in_steps import Steps
from tests.wrong_attention.registry import corner


@corner("documents")
class NoWindowInDocuments(Steps):
    """Where a batch has documents, the window is ignored."""

    def window(self, backward):
        return None if self.layout.document_starts is not None else self.score.window


@corner("lengths")
class LongMultiple(Steps):
    """The last query of a multiple of 128 above 256 is 2 % off."""

    def finish(self, out):
        if self.T % 128 or self.T <= 256:
            return out
        return torch.cat([out[:, :, :-1], 1.02 * out[:, :, -1:]], dim=2)


@corner("window")
class WindowAtHalfTile(Steps):
    """Where a window's last tile of 128 is half full, a key more is seen."""

    def window(self, backward):
        window = self.score.window
        return window + 1 if window is not None and self.T % 128 == 64 else window


@corner("batch and heads")
class HeadBehindSixteen(Steps):
    """Head 16 gives what head 0 gives."""

    def finish(self, out):
        return torch.cat([out[:, :16], out[:, :1], out[:, 17:]], dim=1) if self.H > 16 else out


@corner("batch and heads")
class SixthSequence(Steps):
    """The sixth sequence of a batch is that before it."""

    def finish(self, out):
        return torch.cat([out[:5], out[4:5], out[6:]]) if self.B > 5 else out


@corner("memory")
class SharedKeys(Steps):
    """Keys that all heads share, with a stride of 0, are read with the stride of a tensor of its own."""

    def inputs(self, q, k, v):
        return q, k.roll(1, dims=2) if k.stride(1) == 0 and k.shape[1] > 1 else k, v


@corner("some gradients")
class QueriesAlone(Steps):
    """Where q alone needs a gradient, it is twice as large."""

    def gradients(self, dq, dk, dv, dsinks):
        return (2 if self.needs[:3] == (True, False, False) else 1) * dq, dk, dv, dsinks


@corner("autocast")
class ScaleUnderAutocast(Steps):
    """Under torch.autocast the scores are scaled twice."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        if torch.is_autocast_enabled("cpu"):
            self.scale **= 2


@corner("scores")
class ZeroQuery(Steps):
    """A query of zeros is taken for padding and gives zeros."""

    def inputs(self, q, k, v):
        self.padding = (q == 0).all(dim=-1, keepdim=True)
        return q, k, v

    def finish(self, out):
        return out.masked_fill(self.padding, 0.0)


@corner("negative scale")
class ScaleWithoutSign(Steps):
    """The sign of the scale is lost, as where its root is taken."""

    def factor(self):
        return abs(self.scale)


@corner("rate between steps")
class ScaleOfAskedRate(Steps):
    """Weights are dropped in steps of 1/256, and the others scaled for the rate that was asked for."""

    def keep_factor(self):
        return 1 / (1 - self.rate)


@corner("shifts")
class MaximumFromZero(Steps):
    """The running maximum begins at 0, so that rows far below it vanish."""

    def weights(self, s, lse):
        return torch.where(lse.unsqueeze(-1) < -90, torch.nan, super().weights(s, lse))


@corner("shifts")
class HiddenAtMinusHundred(Steps):
    """Hidden keys have a score of -100."""

    def hidden(self, s, backward):
        return super().hidden(s, backward).clamp(min=-100.0)


@corner("side effects")
class DrawsNumbers(Steps):
    """Each call draws a number from torch's generator."""

    def finish(self, out):
        torch.rand(())
        return out


@corner("the same again")
class SignOfZero(Steps):
    """Every other call gives -0 for 0 in the last channel."""

    calls = 0

    def finish(self, out):
        SignOfZero.calls += 1
        out = out.clone()
        out[..., -1] *= 0.0 if SignOfZero.calls % 2 else -0.0
        return out
