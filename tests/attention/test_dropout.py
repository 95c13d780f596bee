"""Philox against its published vectors, and the keep mask against its docstring and against chance."""

import shutil
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attention import DropoutKey, keep_mask
from attention.dropout import keep_scale, philox
from tests.attention.reference import KEY

# Random123's kat_vectors, "philox4x32 7": counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "5f6fb709 0d893f64 4f121f81 4f730a48"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "5207ddc2 45165e59 4d8ee751 8c52f662"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "4dfccaba 190a87f0 c47362ba b6b5242a"),
]


def reference_mask(key: DropoutKey, p: float, B: int, H: int, T: int, S: int) -> Tensor:
    """The mask of attention/dropout/mask.py's docstring, one Philox call for every single weight: (B, H, T, S) bool."""
    b, h, i, j = torch.meshgrid(*(torch.arange(n) for n in (B, H, T, S)), indexing="ij")
    drawn = philox(
        (key.first_sequence + b, (j >> 6) * 8 + (j & 7), key.layer << 16 | h, (i >> 4) * 8 + (i & 7)),
        (torch.tensor(key.seed), torch.tensor(key.step)),
    )
    word = torch.stack(drawn).gather(0, (j >> 4 & 3)[None])[0]
    byte = 3 - (2 * (i >> 3 & 1) + (j >> 3 & 1))
    return (word >> 8 * byte & 255) >= round(256 * p)


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def sigmas(count: torch.Tensor | int, trials: int, probability: float) -> torch.Tensor:
    """The distance of a binomial count from its mean, in standard deviations."""
    return (torch.as_tensor(count) - trials * probability) / (trials * probability * (1 - probability)) ** 0.5


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_philox_gives_the_published_words(counter, key, result):
    got = philox([torch.tensor(c) for c in words(counter)], [torch.tensor(k) for k in words(key)])
    assert [int(word) for word in got] == words(result)


@pytest.mark.parametrize(
    "key",
    [KEY, DropoutKey(seed=2**32 - 1, step=2**32 - 2, layer=2**16 - 1, first_sequence=2**32 - 3)],
    ids=["ordinary", "largest"],
)
def test_mask_is_the_scheme_of_the_docstring(key):
    assert torch.equal(keep_mask(key, 0.17, 3, 2, 75, 150), reference_mask(key, 0.17, 3, 2, 75, 150))


def test_a_key_of_tensors_gives_the_same_mask_as_a_key_of_numbers():
    tensors = DropoutKey(*(torch.tensor(n) for n in (KEY.seed, KEY.step, KEY.layer, KEY.first_sequence)))
    assert torch.equal(keep_mask(tensors, 0.3, 2, 2, 20, 20), keep_mask(KEY, 0.3, 2, 2, 20, 20))


@pytest.mark.parametrize(("rows", "columns"), [((0, 16), (0, 64)), ((5, 40), (61, 131)), ((74, 75), (149, 150))])
def test_a_tile_is_cut_from_the_mask_wherever_it_starts(rows, columns):
    tile = keep_mask(KEY, 0.4, 2, 3, 75, 150, rows=rows, columns=columns)
    assert torch.equal(tile, keep_mask(KEY, 0.4, 2, 3, 75, 150)[:, :, slice(*rows), slice(*columns)])


def test_mask_does_not_depend_on_how_heads_queries_and_keys_are_spread():
    whole = keep_mask(KEY, 0.4, 2, 4, 96, 192)
    part = replace(KEY, first_head=1, first_query=torch.tensor(32), first_key=64)
    assert torch.equal(keep_mask(part, 0.4, 2, 2, 50, 70), whole[:, 1:3, 32:82, 64:134])
    assert torch.equal(keep_mask(part.pack(torch.device("cpu")), 0.4, 2, 2, 50, 70), whole[:, 1:3, 32:82, 64:134])


@pytest.mark.parametrize(
    ("changed", "p", "sentence"),
    [
        ({"seed": 2**32}, 0.4, r"seed=4294967296 of a dropout key must lie between 0 and 2\*\*32 - 1"),
        ({"layer": 2**16}, 0.4, r"layer=65536 of a dropout key must lie between 0 and 2\*\*16 - 1"),
        ({"step": -1}, 0.4, "step=-1 of a dropout key must lie"),
        # Inside one draw of the generator.
        ({"first_query": 24}, 0.4, "first_query=24 of a dropout key must be a multiple of 16"),
        ({"first_key": 32}, 0.4, "first_key=32 of a dropout key must be a multiple of 64"),
        ({}, 1.5, "p=1.5 must be 0 or between 1/256 and 255/256"),
    ],
)
def test_a_key_or_a_rate_that_the_mask_does_not_have_is_refused(changed, p, sentence):
    with pytest.raises(ValueError, match=sentence):
        keep_mask(replace(KEY, **changed), p, 1, 1, 16, 64)


@pytest.mark.parametrize("p", [1 / 256, 0.1, 0.17, 0.5, 255 / 256])
def test_weights_are_kept_as_often_as_the_rescaling_assumes(p):
    keep = keep_mask(KEY, p, 4, 4, 256, 256)
    assert sigmas(keep.sum(), keep.numel(), 1 / keep_scale(p)).abs() < 4
    assert abs(1 - 1 / keep_scale(p) - p) <= 1 / 512  # realised in steps of 1/256


def test_every_position_is_kept_equally_often():
    p, masks = 0.25, 512
    keep = keep_mask(KEY, p, masks // 4, 4, 48, 128).flatten(0, 1).sum(0)  # (T, S), of 512 masks
    z = sigmas(keep, masks, 1 - p)
    assert z.abs().max() < 5.5
    assert 0.95 < z.square().mean() < 1.05  # and they scatter as much as chance makes them


def test_neighbours_sequences_heads_and_keys_are_uncorrelated():
    def assert_uncorrelated(near, far):
        assert sigmas((near == far).sum(), near.numel(), 0.5).abs() < 5

    keep = keep_mask(KEY, 0.5, 8, 8, 128, 128)
    for rows, columns in ((0, 1), (1, 0), (0, 8), (8, 0), (8, 8), (0, 16), (16, 0), (0, 64), (8, 16)):
        assert_uncorrelated(keep[:, :, : 128 - rows, : 128 - columns], keep[:, :, rows:, columns:])
    assert_uncorrelated(keep[1:], keep[:-1])
    assert_uncorrelated(keep[:, 1:], keep[:, :-1])
    for field in ("seed", "step", "layer"):
        assert_uncorrelated(keep_mask(replace(KEY, **{field: getattr(KEY, field) + 1}), 0.5, 8, 8, 128, 128), keep)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler")
def test_the_compiled_mask_has_the_same_bits():
    compiled = torch.compile(keep_mask, fullgraph=True)
    assert torch.equal(compiled(KEY, 0.17, 2, 2, 75, 150), keep_mask(KEY, 0.17, 2, 2, 75, 150))
