"""Judging the attention of a model that trains: right calls pass, planted faults are flagged, no bit changes."""

import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention import AttentionError, Score, UnsupportedAttention, build_attention, watch
from attention.watch import Line
from tests.attention.subjects import SMALL, registered
from tests.equal import assert_equal
from tests.wrong_attention import FAULTS as PLANTED

SDPA = F.scaled_dot_product_attention
T, WIDTH, HEADS = 24, 32, 4


class Layer(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.qkv, self.out, self.options = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), options

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, **self.options).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, layers: int = 3, **options: Any) -> None:
        super().__init__()
        options = {"is_causal": "attn_mask" not in options} | options
        self.layers = nn.Sequential(*(Layer(**options) for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def train(
    model: nn.Module, steps: int, loss: Callable[[Any], Tensor] | None = None, inputs: Any = None
) -> list[Tensor]:
    """The losses, and at the end the parameters."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(2, T, WIDTH, dtype=next(model.parameters()).dtype) if inputs is None else inputs
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = model(x).square().mean() if loss is None else loss(model(x))
        value.backward()
        optimizer.step()
        losses.append(value.detach())
    return [*losses, *(p.detach().clone() for p in model.parameters())]


def build(**options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options)


def watched(model: nn.Module, steps: int = 3, **run: Any) -> list[Line]:
    """The lines of a run of which each step is watched."""
    lines: list[Any] = []
    with watch(every=1, log=lines.append):
        train(model, steps, **run)
    assert len(lines) == steps
    return lines


def bits_stay(make: Callable[[], nn.Module]) -> list[Line]:
    """The lines of a watched run, which computes the bits of one that is not watched."""
    expected, lines = train(make(), 3), list[Any]()
    with watch(every=1, log=lines.append):
        got = train(make(), 3)
    assert_equal(got, expected)
    return lines


def right(lines: list[Line]) -> None:
    for line in lines:
        assert "watch/wrong" not in line, line
        assert 0 < line["watch/error"] <= 1
        assert line.keys() <= {f"watch/{name}" for name in ("step", "layer", "shape", "error", "worst")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_right_calls_are_not_accused_and_each_step_has_another_layer(dtype):
    lines = watched(build().to(dtype), 4)
    right(lines)
    assert [line["watch/layer"] for line in lines] == ["layers.0", "layers.1", "layers.2", "layers.0"]
    name = str(dtype).removeprefix("torch.")
    assert lines[0]["watch/shape"] == f"q (2, 4, 24, 8), k (2, 4, 24, 8), v (2, 4, 24, 8) {name}"


def test_every_nth_step_has_one_line_which_print_shows(capsys):
    with watch(every=2):
        train(build(), 5)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[0] for line in lines] == [f"attention at step {step}" for step in (1, 3, 5)]
    assert "layers.1, q (2, 4, 24, 8)" in lines[1]
    assert "of what rounding explains" in lines[1]
    assert F.scaled_dot_product_attention is SDPA


def mask(hides: Tensor, low: float) -> Tensor:
    return torch.zeros(hides.shape).masked_fill(hides, low)


LATER = torch.ones(T, T, dtype=torch.bool).triu(1)
FAR = torch.rand(2, 1, T, T, generator=torch.Generator().manual_seed(2)) < 0.5
EMPTY = LATER | (torch.arange(T) < 3)  # the first queries see no key


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": False},
        {"attn_mask": ~LATER},
        {"attn_mask": mask(LATER, -torch.inf)},
        {"attn_mask": mask(FAR, torch.finfo(torch.float32).min)},
        {"attn_mask": ~EMPTY},
        {"attn_mask": torch.randn(HEADS, T, T, generator=torch.Generator().manual_seed(3))},
        {"scale": 0.7},
    ],
)
def test_masks_and_scales_are_judged_as_torch_defines_them(options):
    right(watched(build(**options)))


def test_under_autocast_the_computed_precision_is_judged():
    def loss(out):
        return out.float().square().mean()

    with torch.autocast("cpu", torch.bfloat16):
        right(watched(build(), loss=loss))


def wrong(change: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """SDPA through `change(q, k, v, options)`."""

    def sdpa(q, k, v, **options):
        return change(q, k, v, options)

    return sdpa


def hooked(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    x = x.view_as(x)
    x.register_hook(change)
    return x


def nan_at_the_end(x: Tensor) -> Tensor:
    x = x.clone()
    x[-1, -1, -1, -1] = math.nan
    return x


FAULTS: dict[str, tuple[Callable[..., Tensor], str]] = {
    "dropout": (lambda q, k, v, o: SDPA(q, k, v, **(o | {"dropout_p": 0.1})), "out of"),
    "dq is NaN": (
        lambda q, k, v, o: SDPA(hooked(q, nan_at_the_end), k, v, **o),
        "dq of layers.2, q (2, 4, 24, 8), is not finite",
    ),
    "out is NaN": (lambda q, k, v, o: nan_at_the_end(SDPA(q, k, v, **o)), "out is not finite"),
    "dv": (lambda q, k, v, o: SDPA(q, k, hooked(v, lambda x: x.roll(1, 2)), **o), "dv of"),
    "one row of dq": (lambda q, k, v, o: SDPA(hooked(q, row_off), k, v, **o), "dq of sequence 1, head 2, query 13"),
}


def row_off(x: Tensor) -> Tensor:
    x = x.clone()
    x[1, 2, 13] *= 1.001
    return x


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_calls_are_flagged_at_once(fault, monkeypatch):
    change, what = FAULTS[fault]
    monkeypatch.setattr(F, "scaled_dot_product_attention", wrong(change))
    line = watched(build(), 1)[0]
    assert "watch/wrong" in line
    assert what in line["watch/wrong"]
    assert "step 1" in str(line)
    assert "layers.0" in str(line)
    assert "WRONG" in str(line)


# Planted faults that no call of torch's function in training shows; `gpt-attention check` finds them.
UNSEEN = {"rare_call", "evaluation_alone", "lse_in_base_two"}
# Those of windows, documents, soft caps, dropout's key and so on are no part of torch's function.
SEEN = [
    name
    for name, x in PLANTED.items()
    if x.score == Score() and not (x.documents or x.grouped or x.attention.dropout or name in UNSEEN)
]


@pytest.mark.parametrize("name", SEEN)
def test_planted_faults_that_occur_in_a_call_are_flagged_at_once(name, monkeypatch):
    with registered():
        attend = build_attention(PLANTED[name].attention)

    def sdpa(q, k, v, *, is_causal, **_):
        return attend(q, k, v, score=Score(causal=is_causal)).out

    monkeypatch.setattr(F, "scaled_dot_product_attention", sdpa)
    x = torch.randn(2, 65, WIDTH, generator=torch.Generator().manual_seed(0))
    assert "watch/wrong" in watched(build(), 1, inputs=5 * x)[0]


def test_values_that_are_not_finite_are_named_and_not_laid_at_attentions_door():
    model = build()
    with torch.no_grad():
        next(model.parameters())[0, 0] = math.inf
    line = watched(model, 1)[0]
    assert "watch/wrong" not in line
    assert line["watch/not_finite"].startswith("q (")
    assert "q, k or v is not finite" in line["watch/not_judged"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mask_of_dropout_is_read_by_replay(dtype):
    right(watched(build(dropout_p=0.3).to(dtype)))


def test_dropout_that_keeps_the_wrong_scale_is_flagged(monkeypatch):
    monkeypatch.setattr(F, "scaled_dot_product_attention", wrong(lambda q, k, v, o: 0.9 * SDPA(q, k, v, **o)))
    assert "watch/wrong" in watched(build(dropout_p=0.1), 1)[0]


def test_dropout_that_does_not_come_back_is_not_judged(monkeypatch):
    draws = torch.Generator().manual_seed(5)

    def attend(q, k, v, options):
        dropped = torch.rand(T, T, generator=draws) < options["dropout_p"]
        return (q @ k.mT).softmax(-1).masked_fill(dropped, 0.0) @ v

    monkeypatch.setattr(F, "scaled_dot_product_attention", wrong(attend))
    line = watched(build(dropout_p=0.5), 1)[0]
    assert "watch/wrong" not in line
    assert "does not come back" in line["watch/not_judged"]
    assert "watch/error" not in line


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.2}, {"attn_mask": ~LATER}])
def test_a_run_computes_the_same_bits_with_and_without(options):
    bits_stay(lambda: build(**options))


def test_one_tensor_for_q_k_and_v_gets_the_same_gradient_and_each_is_judged_alone():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.x = nn.Parameter(torch.randn(2, 3, T, 8, generator=torch.Generator().manual_seed(0)))

        def forward(self, _):
            x = self.x * 1.5
            return x + F.scaled_dot_product_attention(x, x, x)

    right(bits_stay(Shared))


def test_of_a_large_call_one_head_of_one_sequence_is_judged_another_each_time(monkeypatch):
    monkeypatch.setattr(sys.modules[Line.__module__], "PAIRS", 1)
    right(watched(build()))
    monkeypatch.setattr(F, "scaled_dot_product_attention", wrong(FAULTS["one row of dq"][0]))
    *before, last = watched(build(), 6)
    assert not any("watch/wrong" in line for line in before)
    assert "dq of sequence 1, head 2, query 13" in last["watch/wrong"]


def test_of_two_optimizers_the_steps_of_one_count():
    lines: list[Any] = []
    model = build()
    optimizers = [torch.optim.SGD(model.layers[i].parameters(), lr=0.1) for i in range(2)]
    with watch(every=2, log=lines.append):
        for _ in range(3):
            model(torch.randn(2, T, WIDTH)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
    assert [line["watch/step"] for line in lines] == [1, 3]


def test_evaluation_and_recomputed_activations_are_passed_over():
    class Saving(Model):
        def forward(self, x):
            with torch.no_grad():
                self.layers(x)
            for layer in self.layers:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            return x

    right(watched(Saving()))


def compiled(backend: str) -> nn.Module:
    model = build(layers=1)
    model.compile(backend=backend)
    return model


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_model_is_refused_in_a_sentence_and_keeps_its_bits(backend):
    lines = bits_stay(lambda: compiled(backend))
    assert [set(line) for line in lines] == [{"watch/step", "watch/not_judged"}] * 3
    assert "train without torch.compile" in str(lines[0])


def test_a_number_of_steps_that_is_not_positive_is_refused():
    with pytest.raises(AttentionError, match=r"watch\(every=0\) needs a positive number of steps"), watch(every=0):
        pass


def of_transformers(kind: str, name: str, **options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    configuration = getattr(transformers, f"{kind}Config")(**(SMALL | options))
    return transformers.AutoModelForCausalLM.from_config(configuration, attn_implementation=name).train()


class Padded(nn.Module):
    """A model on tokens, of which the first sequence ends or begins with padding."""

    def __init__(self, model: nn.Module, left: bool = False) -> None:
        super().__init__()
        self.model = model
        self.tokens = torch.randint(1, 61, (2, T), generator=torch.Generator().manual_seed(1))
        self.real = torch.ones(2, T, dtype=torch.long)
        self.real[0, slice(0, 5) if left else slice(-5, None)] = 0

    def forward(self, _: Tensor) -> Tensor:
        return self.model(self.tokens, attention_mask=self.real).logits


KINDS = [("Llama", "eager"), ("Llama", "sdpa"), ("Gemma2", "eager"), ("GptOss", "eager")]


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize(("kind", "name"), KINDS)
def test_transformers_attention_functions_are_right(kind, name, left):
    lines = watched(Padded(of_transformers(kind, name), left), 2)
    right(lines)
    assert [line["watch/layer"] for line in lines] == [f"model.model.layers.{i}.self_attn" for i in (0, 1)]
    assert "k (2, 2, 24, 8)" in lines[0]["watch/shape"]


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_transformers_dropout_is_replayed_and_the_run_keeps_its_bits(name):
    right(bits_stay(lambda: Padded(of_transformers("Llama", name, attention_dropout=0.2))))


def test_wrong_functions_of_transformers_are_flagged(monkeypatch):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    eager = llama.eager_attention_forward

    def off(module, q, k, v, mask, **options):
        return eager(module, q, k, v, mask, **(options | {"scaling": 1.01 * options["scaling"]}))

    monkeypatch.setattr(llama, "eager_attention_forward", off)
    assert "watch/wrong" in watched(Padded(of_transformers("Llama", "eager")), 1)[0]
    monkeypatch.setattr(F, "scaled_dot_product_attention", wrong(lambda q, k, v, o: SDPA(1.01 * q, k, v, **o)))
    assert "watch/wrong" in watched(Padded(of_transformers("Llama", "sdpa")), 1)[0]


def test_flex_attention_of_transformers_is_judged_by_its_mask_function(monkeypatch):
    """FlexAttention has no backward pass on a CPU: a formula stands in for it."""
    modeling = pytest.importorskip("transformers.modeling_utils")
    later = [0]

    def formula(module, q, k, v, mask, scaling, **_):
        b, i, j = (torch.arange(n) for n in (2, T, T))
        seen = mask.mask_mod(b[:, None, None], 0, i[:, None] + later[0], j)[:, None]
        k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
        s = (scaling * q @ k.mT).masked_fill(~seen, -torch.inf)
        return (s.softmax(-1) @ v).transpose(1, 2), None

    monkeypatch.setitem(modeling.AttentionInterface._global_mapping, "flex_attention", formula)
    with torch.compiler.set_stance("force_eager"):  # transformers compiles the making of its mask
        right(watched(Padded(of_transformers("Llama", "flex_attention")), 2))
        later[0] = -1
        assert "watch/wrong" in watched(Padded(of_transformers("Llama", "flex_attention")), 1)[0]


def test_an_implementation_of_ours_computes_torchs_function_where_it_replaces_it():
    lines: list[Any] = []
    losses = train(build(), 3)
    with watch(every=1, log=lines.append).replace("tiled"):
        replaced = train(build(), 3)
    right(lines)
    torch.testing.assert_close(replaced, losses)
    assert not all(torch.equal(a, b) for a, b in zip(replaced, losses, strict=True))
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 1, 9, 8)
    expected = F.scaled_dot_product_attention(q, k, k, is_causal=True, scale=0.3, enable_gqa=True)
    with watch().replace("naive"):
        torch.testing.assert_close(
            F.scaled_dot_product_attention(q, k, k, is_causal=True, scale=0.3, enable_gqa=True), expected
        )


@pytest.mark.parametrize(
    "options", [{"attn_mask": torch.ones(T, T, dtype=torch.bool)}, {"dropout_p": 0.1}], ids=["mask", "dropout"]
)
def test_what_a_replacement_would_have_to_ignore_is_refused(options):
    with watch().replace("naive"), pytest.raises(UnsupportedAttention, match=f"takes no {next(iter(options))}"):
        train(build(is_causal=False, **options), 1)


def test_a_replacement_that_is_not_known_is_refused():
    with pytest.raises(UnsupportedAttention, match=r"fash is not known; choose one of .*flash"):
        watch().replace("fash")
