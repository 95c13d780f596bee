"""Attention with the mistakes one makes, for tests that have to catch them."""

from __future__ import annotations

from torch.nn.functional import pad

from attention import Ablation, AttentionConfig
from attention.dropout import moved
from attention.naive import NaiveAttention


class MaskOffByOne(NaiveAttention):
    """Query i sees key i + 1."""

    name = "mask_off_by_one"

    def attend(self, q, k, v, call):
        k, v = (pad(x, (0, 0, 0, 1))[:, :, 1:] for x in (k, v))
        return super().attend(q, k, v, call)


class ScaleByHeadSize(NaiveAttention):
    """Scores divided by D where the formula has its root."""

    name = "scale_by_head_size"

    def attend(self, q, k, v, call):
        return super().attend(q, k, v, call._replace(spec=call.spec._replace(scale=1 / q.shape[-1])))


class MaskIgnoresLayer(NaiveAttention):
    """The same dropout mask in every layer."""

    name = "mask_ignores_layer"

    def attend(self, q, k, v, call):
        key = None if call.dropout_key is None else moved(call.dropout_key, layer=0)
        return super().attend(q, k, v, call._replace(dropout_key=key))


CLASSES = (MaskOffByOne, ScaleByHeadSize, MaskIgnoresLayer)
WRONG = {
    "mask_off_by_one": AttentionConfig(name="mask_off_by_one"),
    "scale_by_head_size": AttentionConfig(name="scale_by_head_size"),
    "no_rescaling": AttentionConfig(name="tiled", block_q=8, block_k=8, ablate=Ablation.no_rescaling),
    "mask_ignores_layer": AttentionConfig(name="mask_ignores_layer", dropout=0.1),
}
