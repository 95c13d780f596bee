"""The layers of mixers: parameters as published, documents, states, and their gates against the formulas by hand."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from mixers import MixerError
from mixers.layers import KINDS, MIXERS, ShortConvolution, build_mixer

BY_NAME = pytest.mark.parametrize("name", MIXERS)
# Of flash-linear-attention 0.6's layers, for 64 channels and 4 heads: Mamba2 with 8 heads of 16 and a state of 32,
# GatedDeltaNet with head_dim=12, KimiDeltaAttention with head_dim=16.
PARAMETERS = {
    "linear": 4 * 64 * 64 + 16,
    "retnet": 2 * 64 * 64 + 3 * 64 * 128 + 32,
    "gla": 2 * 64 * 32 + 3 * 64 * 64 + 64 * 16 + 16 * 32 + 32 + 16,
    "deltanet": 4 * 64 * 64 + 64 * 4 + 3 * 64 * 4 + 16,
    "gdn": 2 * 64 * 48 + 3 * 64 * 96 + 2 * 64 * 4 + (2 * 48 + 96) * 4 + 2 * 4 + 24,
    "kda": 4 * 64 * 64 + 64 * 16 + 16 * 64 + 64 * 16 + 16 * 64 + 64 + 64 * 4 + 3 * 64 * 4 + 4 + 64 + 16,
    "mamba2": 64 * (2 * 128 + 2 * 32 + 8) + (128 + 2 * 32) * 5 + 3 * 8 + 128 + 128 * 64,
}


@BY_NAME
def test_a_layer_has_the_published_parameters(name):
    assert sum(p.numel() for p in build_mixer(name, 64, 4).parameters()) == PARAMETERS[name]


@BY_NAME
def test_tokens_one_by_one_give_what_one_pass_gives(name):
    torch.manual_seed(0)
    layer, x = build_mixer(name, 64, 4).double(), torch.randn(2, 21, 64, dtype=torch.float64)
    expected, last = layer(x)
    state, outs = None, []
    for t in range(21):
        out, state = layer(x[:, t : t + 1], state=state)
        outs.append(out)
    assert_close(torch.cat(outs, dim=1), expected, rtol=1e-5, atol=1e-7)
    assert state is not None
    assert_close(state.recurrent, last.recurrent, rtol=1e-5, atol=1e-7)


@BY_NAME
def test_a_document_of_a_packed_row_is_what_it_is_alone(name):
    torch.manual_seed(0)
    layer, x = build_mixer(name, 64, 4).double(), torch.randn(1, 40, 64, dtype=torch.float64)
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor([1, 17, 2, 20]))[None]
    out, _ = layer(x, documents)
    for begin, end in ((0, 1), (1, 18), (18, 20), (20, 40)):
        assert_close(out[:, begin:end], layer(x[:, begin:end])[0], rtol=1e-5, atol=1e-6)
    _, state = layer(x[:, :21], documents[:, :21])  # one token of the last document
    out, _ = layer(x[:, 21:], state=state)
    assert_close(out, layer(x[:, 20:])[0][:, 1:], rtol=1e-5, atol=1e-6)
    _, state = layer(x[:, :9], documents[:, :9])
    out, _ = layer(x[:, 9:], documents[:, 9:], state)
    assert_close(out, layer(x, documents)[0][:, 9:], rtol=1e-5, atol=1e-6)


def test_the_convolution_is_torchs():
    torch.manual_seed(0)
    conv, x = ShortConvolution(6, bias=True), torch.randn(2, 9, 6)
    assert conv.bias is not None
    with torch.no_grad():
        conv.bias.normal_()
    expected = F.silu(F.conv1d(F.pad(x.mT, (3, 0)), conv.weight[:, None], conv.bias, groups=6)).mT
    assert_close(conv(x, None, None)[0], expected)


def test_rates_are_the_published_ones():
    torch.manual_seed(0)
    x = torch.randn(2, 5, 64)
    gdn: Any = build_mixer("gdn", 64, 4).decay
    gla: Any = build_mixer("gla", 64, 4).decay
    retnet: Any = build_mixer("retnet", 64, 4).decay
    expected = -gdn.A_log.exp() * F.softplus(F.linear(x, gdn.proj.weight) + gdn.dt_bias)  # (B, T, H)
    assert_close(gdn(x)[..., 0], expected.mT)
    logits = F.linear(F.linear(x, gla.proj[0].weight), gla.proj[1].weight, gla.proj[1].bias)
    assert_close(gla(x)[1, 2, 3], F.logsigmoid(logits[1, 3, 16:24]) / 16)
    assert_close(retnet(x)[0, :, 0, 0].exp(), torch.tensor([1 - 2.0**-n for n in (5, 6, 7, 8)]))


def test_a_mixer_that_does_not_fit_is_refused():
    with pytest.raises(MixerError, match="mamba3 is no mixer; choose one of linear, "):
        build_mixer("mamba3", 64, 4)
    with pytest.raises(MixerError, match="do not divide into 5 heads"):
        build_mixer("kda", 64, 5)
    assert set(MIXERS) == {*KINDS, "mamba2"}
