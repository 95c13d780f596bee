"""A mixer's recurrence: the definition against numbers by hand, chunks against the definition."""

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mixers import Decay, MixerError, Recurrence, mix
from mixers.fla import bounds

RECURRENCES = [Recurrence(decay, delta) for decay in Decay for delta in (False, True)]
NAMES = [f"{recurrence.decay.value}-{'delta' if recurrence.delta else 'sum'}" for recurrence in RECURRENCES]
BY_NAME = pytest.mark.parametrize("recurrence", RECURRENCES, ids=NAMES)


def tensors(recurrence: Recurrence, shape: tuple[int, ...]) -> dict[str, Any]:
    """Random inputs in fp64: shape is (B, H, T, K, V)."""
    B, H, T, K, V = shape
    draw = torch.Generator().manual_seed(0)

    def randn(*size):
        return torch.randn(size, generator=draw, dtype=torch.float64)

    keys = torch.nn.functional.normalize(randn(B, H, T, K), dim=-1)
    inputs = {"q": randn(B, H, T, K), "k": keys, "v": randn(B, H, T, V)}
    if recurrence.decay is not Decay.none:
        channels = K if recurrence.decay is Decay.channel else 1
        inputs["log_decay"] = -3 * torch.rand((B, H, T, channels), generator=draw, dtype=torch.float64)
    inputs["beta"] = (1 + recurrence.delta) * torch.rand((B, H, T), generator=draw, dtype=torch.float64)
    inputs["initial"] = randn(B, H, K, V)
    return inputs


def both(recurrence: Recurrence, inputs: dict[str, Any], mixer: str, **options: Any) -> dict[str, Any]:
    """The output, the state, and the gradients of all inputs for a random direction of both."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    out, state = mix(recurrence=recurrence, mixer=mixer, **leaves, **options)
    draw = torch.Generator().manual_seed(1)
    directions = [torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x.dtype) for x in (out, state)]
    gradients = torch.autograd.grad([out, state], list(leaves.values()), directions)
    return {"out": out, "state": state} | {f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}


def test_the_definition_of_one_channel_by_hand():
    """With K = V = 1: S_1 = 0.5 * 2 + 1 * 3 * (4 - 3 * 0.5 * 2) = 4, o_1 = 5 * 4 = 20."""
    one = [torch.full((1, 1, 1, 1), x, dtype=torch.float64) for x in (5.0, 3.0, 4.0)]
    options = {
        "log_decay": torch.full((1, 1, 1, 1), 0.5, dtype=torch.float64).log(),
        "beta": torch.ones(1, 1, 1, dtype=torch.float64),
        "initial": torch.full((1, 1, 1, 1), 2.0, dtype=torch.float64),
    }
    out, state = mix(*one, recurrence=Recurrence(Decay.head, True), mixer="recurrent", scale=1.0, **options)
    assert state.item() == pytest.approx(4.0)
    assert out.item() == pytest.approx(20.0)


class Work(TorchDispatchMode):
    """Counts the numbers that operations write."""

    numbers = 0

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        results = operator(*arguments, **(keywords or {}))
        if not operator.is_view:
            self.numbers += sum(x.numel() for x in tree_leaves(results) if isinstance(x, Tensor))
        return results


def test_the_work_of_chunks_grows_with_the_tokens():
    work = []
    for tokens in (256, 1024):
        inputs = tensors(Recurrence(Decay.head, True), (1, 1, tokens, 8, 8))
        with Work() as counted:
            both(Recurrence(Decay.head, True), inputs, "chunked")
        work.append(counted.numbers)
    assert work[1] < 4.1 * work[0]


def test_linear_attention_is_causal_attention_without_the_softmax():
    inputs = tensors(Recurrence(), (2, 3, 20, 8, 5))
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    expected = (q @ k.mT * 8**-0.5).tril() @ v
    for mixer in ("recurrent", "chunked"):
        torch.testing.assert_close(mix(q, k, v, recurrence=Recurrence(), mixer=mixer)[0], expected)


@BY_NAME
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 47, 48, 49, 65])
def test_chunks_equal_the_definition_with_all_gradients(recurrence, tokens):
    inputs = tensors(recurrence, (2, 2, tokens, 8, 12))
    expected, found = both(recurrence, inputs, "recurrent"), both(recurrence, inputs, "chunked")
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def packed(lengths: list[int]) -> Tensor:
    """(1, T) numbers of the documents."""
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]


@BY_NAME
@pytest.mark.parametrize(
    ("mixer", "sizes"), [("recurrent", (16, 8)), ("chunked", (16, 8)), ("chunked", (7, 5)), ("chunked", (24, 1))]
)
def test_a_document_of_a_packed_row_has_the_bits_that_it_has_alone(recurrence, mixer, sizes):
    lengths = [5, 16, 1, 33, 48, 7]
    inputs = {name: x.float() for name, x in tensors(recurrence, (2, 3, sum(lengths), *sizes)).items()}
    del inputs["initial"]
    row = both(recurrence, inputs, mixer, documents=packed(lengths).expand(2, -1))
    second = {name: x[1:] for name, x in inputs.items()}
    begin = 0
    for length in lengths:
        piece = slice(begin, begin + length)
        alone, _ = mix(recurrence=recurrence, mixer=mixer, **{name: x[:, :, piece] for name, x in second.items()})
        assert torch.equal(row["out"][1:, :, piece], alone)
        begin += length
    _, state = mix(recurrence=recurrence, mixer=mixer, **{name: x[:, :, -7:] for name, x in second.items()})
    assert torch.equal(row["state"][1:], state)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"mixer": "fast"}, "mixer=fast is unknown; choose one of recurrent, chunked, fla"),
        ({"mixer": "fla"}, "needs a GPU"),
        ({"recurrence": Recurrence(Decay.head)}, "decay=head needs log_decay"),
        ({"beta": torch.ones(1, 1, 5)}, r"beta has the shape \(1, 1, 5\)"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(change, says):
    x = torch.ones(1, 1, 4, 2)
    with pytest.raises(MixerError, match=says):
        mix(x, x, x, **({"recurrence": Recurrence()} | change))


def test_gradients_that_triton_compiles_wrong_are_refused(monkeypatch):
    device, gated = torch.device("cuda"), Recurrence(Decay.head, True)
    module = import_module("mixers.fla")  # the package has the function by that name
    check_gradients = module.check_gradients.__wrapped__  # without what earlier calls found
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    monkeypatch.setattr(module.metadata, "version", lambda _: "3.6.0")
    check_gradients(Recurrence(Decay.channel, True), device)
    with pytest.raises(MixerError, match="no gradients with decay=head on a Hopper GPU with Triton 3"):
        check_gradients(gated, device)
    monkeypatch.setattr(module.metadata, "version", lambda _: "3.7.1")
    check_gradients(gated, device)


@pytest.mark.parametrize("inference", [False, True])
def test_the_package_gets_the_bounds_of_todays_documents(inference):
    with torch.inference_mode(inference):
        documents = torch.tensor([[0, 0, 7], [7, 7, 7]])
        assert bounds(documents).tolist() == [0, 2, 3, 6]
        assert inference or bounds(documents) is bounds(documents)  # found once for all layers
        documents[0] = 1
        assert bounds(documents).tolist() == [0, 3, 6]
