"""Folders of transformers' models, read, computed and written again, for random shapes of each architecture."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close

from attention import AttentionConfig, build_attention
from model.gpt import GPT, Computation
from model.positions import position_tables
from model.score import attention_scores, layer_scores
from recipe.distributed.world import World
from recipe.infer.huggingface import HuggingFace
from recipe.infer.huggingface.export import describe, renamed
from recipe.infer.huggingface.families import BEFORE, FAMILIES, Family
from recipe.infer.huggingface.loading import folder_mistakes, load
from recipe.infer.huggingface.settings import WeightsError, essence, read_settings
from recipe.infer.huggingface.starting import start_from
from recipe.run.build import build_model
from recipe.run.compose import composed, to_config
from recipe.run.config import Config
from recipe.run.starting import with_start
from tests.parts import randomize
from tests.programs import completed

transformers = pytest.importorskip("transformers")

VOCAB, T, SHAPES = 67, 14, 3
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
]


def shape(kind: str, seed: int) -> dict[str, Any]:
    """Options of a small model of an architecture."""
    draw = random.Random(f"{kind} {seed}")
    heads = draw.choice([2, 4])
    if kind == "gpt2":
        return {
            "n_embd": 8 * heads,
            "n_head": heads,
            "n_layer": 2,
            "n_positions": 64,
            "n_inner": draw.choice([None, 40]),
            "tie_word_embeddings": draw.random() < 0.5,
        }
    options = {
        "hidden_size": 8 * heads,
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice([1, 2, heads]),
        "num_hidden_layers": draw.choice([2, 4]),
        "intermediate_size": draw.choice([24, 40]),
        "max_position_embeddings": 64,
        "tie_word_embeddings": draw.random() < 0.5,
        "rope_parameters": draw.choice(ROPES) | {"rope_theta": draw.choice([1e4, 5e5])},
    }
    options["norm_epsilon" if kind == "starcoder2" else "rms_norm_eps"] = draw.choice([1e-6, 1e-5])
    if kind in ("llama", "mistral", "qwen3", "gemma2"):
        options["head_dim"] = draw.choice([8, 12])
    if kind in ("llama", "qwen3", "gemma2", "olmo2"):
        options["attention_bias"] = draw.random() < 0.5
    if kind == "llama":
        options["mlp_bias"] = options["attention_bias"] and draw.random() < 0.5
    if kind in ("mistral", "starcoder2"):
        options["sliding_window"] = draw.choice([5, 9])
    if kind == "starcoder2":
        options["hidden_act"] = "gelu_pytorch_tanh"
    if kind in ("qwen2", "qwen3"):
        slides = draw.random() < 0.5
        options |= {"use_sliding_window": slides, "sliding_window": 5 if slides else None, "max_window_layers": 1}
    if kind == "gemma2":
        options |= {"sliding_window": 5, "query_pre_attn_scalar": draw.choice([8, 20])}
        options |= {
            "final_logit_softcapping": draw.choice([None, 3.0]),
            "attn_logit_softcapping": draw.choice([None, 2.0]),
        }
    return options


def fresh(kind: str, seed: int, **more: Any) -> Any:
    """A model of transformers as it begins."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(kind, vocab_size=VOCAB, **shape(kind, seed) | more)
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def folders(kind: str, root: Path) -> Iterator[tuple[Any, Path]]:
    """Models of transformers with every parameter random, and their folders."""
    for seed in range(SHAPES):
        model = fresh(kind, seed)
        randomize(model, 0.2)
        folder = root / f"{kind}-{seed}"
        model.save_pretrained(folder, max_shard_size="20KB" if seed % 2 else "1GB")
        yield model, folder


def read(folder: Path, dtype: torch.dtype = torch.float32) -> GPT:
    """The folder's model, as train.py builds it."""
    config, computation = start_from(str(folder)).config(), Computation(dtype=dtype)
    with torch.device("meta"):
        attend = build_attention(AttentionConfig())
        model = GPT(config.model, VOCAB, config.seq_len, attend, computation, score=config.score)
    model.materialise("cpu")
    load(model, str(folder))
    return model.eval()


class InDouble(TorchFunctionMode):
    """Computes in fp64 also where transformers' code names fp32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = Tensor.double if func is Tensor.float else func
        wide = [torch.float64 if x is torch.float32 else x for x in args]
        named = {name: torch.float64 if x is torch.float32 else x for name, x in (kwargs or {}).items()}
        return func(*wide, **named)


class Learned(NamedTuple):
    """What a model computes in a training step; gradients are by transformers' names."""

    logits: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]

    def distances(self, exact: Learned) -> dict[str, float]:
        names = sorted(exact.gradients)
        gradients = [torch.cat([x.gradients[name].double().flatten() for name in names]) for x in (self, exact)]
        pairs = {"logits": (self.logits, exact.logits), "loss": (self.loss, exact.loss), "gradients": gradients}
        return {name: (a.double() - b).square().mean().sqrt().item() for name, (a, b) in pairs.items()}


class Rounding:
    """The errors of models here and in transformers, added up by precision and quantity."""

    def __init__(self) -> None:
        self.here: dict[tuple[torch.dtype, str], float] = defaultdict(float)
        self.there: dict[tuple[torch.dtype, str], float] = defaultdict(float)

    def compare(self, model: GPT, theirs: Any, tokens: Tensor, renamed: Callable[[GPT], dict[str, Tensor]]) -> Learned:
        """Add the errors for these tokens; returns the exact result."""
        with InDouble():
            exact = learned_there(deepcopy(theirs).double(), tokens)
        assert exact.logits.dtype == torch.float64
        assert exact.logits.std() > 0.1
        nearest = torch.finfo(torch.float32).eps / 2 * exact.loss.item()  # the loss is in fp32
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            here = learned_here(model, tokens, dtype, renamed).distances(exact)
            there = learned_there(deepcopy(theirs).to(dtype), tokens).distances(exact)
            # One number may be near by chance: at least what the logits' errors make of the mean over the tokens.
            of_logits = there["logits"] / tokens[:, 1:].numel() ** 0.5
            there["loss"] = max(there["loss"], nearest, of_logits)
            for name in here:
                self.here[dtype, name] += here[name]
                self.there[dtype, name] += there[name]
        return exact

    def is_alike(self) -> bool:
        return len(self.here) == 9 and all(self.here[key] <= 2 * self.there[key] for key in self.here)


def learned_there(model: Any, tokens: Tensor) -> Learned:
    out = model(tokens, labels=tokens, use_cache=False)
    out.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return Learned(out.logits.detach(), out.loss.detach(), gradients)


def learned_here(
    model: GPT, tokens: Tensor, dtype: torch.dtype, renamed: Callable[[GPT], dict[str, Tensor]]
) -> Learned:
    model = deepcopy(model)
    targets = torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], -100)], dim=1)
    with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
        logits, loss = model(tokens).detach(), model(tokens, targets)
    loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad
    return Learned(logits, loss.detach(), renamed(model))


@pytest.mark.parametrize("kind", FAMILIES)
def test_models_of_transformers_learn_the_same_here_and_are_written_as_they_were(kind, tmp_path):
    tokens = torch.randint(VOCAB, (2, T), generator=torch.Generator().manual_seed(1))
    rounding = Rounding()
    for theirs, folder in folders(kind, tmp_path):
        model = read(folder)
        exact = rounding.compare(model, theirs, tokens, lambda model: describe(model, 0.0).tensors)
        assert_close(model(tokens).double(), exact.logits, rtol=1e-4, atol=2e-5)

        described, stored = describe(model, 0.0), theirs.state_dict()
        assert described.config["model_type"] == kind
        kept = {name for name in stored if not (name == "lm_head.weight" and model.config.tied)}
        assert {name for name in described.tensors if described.tensors[name].any() or name in kept} == kept
        assert all(torch.equal(described.tensors[name], stored[name]) for name in kept)
    assert rounding.is_alike()


def test_the_preset_of_nanochat_learns_as_the_model_of_transformers_does():
    """The model rotates queries and keys in the other direction: the same as exchanging the halves of each head."""

    def exchanged(model):
        family = Family("nanochat", "NanoChatForCausalLM", BEFORE | {"mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2"})
        tensors = renamed(model, family)
        for name in [name for name in tensors if "q_proj" in name or "k_proj" in name]:
            tensors[name] = tensors[name].unflatten(0, (heads, 2, -1)).flip(1).flatten(0, 2)
        return tensors

    heads, rounding = 4, Rounding()
    sizes = ["model.n_layers=2", f"model.n_heads={heads}", "model.n_embd=32", "seq_len=64", "device=cpu"]
    config = to_config(composed(["model=nanochat", *sizes]))
    for seed in range(4):
        model = build_model(config, VOCAB, torch.device("cpu"), torch.float32, World(), HuggingFace()).eval()
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter[:VOCAB].add_(0.2 * torch.randn_like(parameter[:VOCAB]))
        shape = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": heads}
        options = transformers.NanoChatConfig(vocab_size=VOCAB, pad_token_id=None, **shape)
        theirs = transformers.NanoChatForCausalLM(options).eval()
        theirs.load_state_dict(exchanged(model))
        rounding.compare(model, theirs, torch.randint(VOCAB, (2, T)), exchanged)
    assert rounding.is_alike()


TURNS = {
    "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9,
    "intermediate_size": 24, "max_position_embeddings": 128, "rope_theta": 5e5,
}  # fmt: skip
YARN = ROPES[-1]
SCALINGS: list[Any] = [(rope, key, {}) for rope in ROPES for key in rope if key != "rope_type"]
SCALINGS += [
    (YARN, "factor", {"factor": None}),
    (YARN, None, {"truncate": False, "original_max_position_embeddings": 4096}),
    (YARN, None, {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.5}),
    (ROPES[2], None, {"low_freq_factor": 2.0, "high_freq_factor": 6.0, "original_max_position_embeddings": 4096}),
]


@pytest.mark.parametrize(("rope", "without", "more"), SCALINGS)
def test_longer_sequences_turn_by_the_angles_of_transformers_and_a_key_that_it_needs_is_asked_for(rope, without, more):
    content = TURNS | {"rope_scaling": {key: value for key, value in rope.items() if key != without} | more}
    try:
        theirs = transformers.AutoConfig.for_model(**content)
        frequencies, size = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, "cpu")
    except KeyError:
        with pytest.raises(WeightsError, match=rf"rope_type={rope['rope_type']} without {without}; write it into"):
            read_settings(content, "folder")
    else:
        ours = position_tables(read_settings(content, "folder").model, 128)
        angles = torch.arange(128)[:, None] * frequencies
        assert_close(ours.cos, angles.cos() * size, rtol=0, atol=1e-5)
        assert_close(ours.sin, angles.sin() * size, rtol=0, atol=1e-5)


# Keys of config.json that have no default here, but for GPT-2.
SIZES = {"hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"}
SIZES |= {"max_position_embeddings"}


class Reading(dict[str, Any]):
    """A mapping that records which keys are read."""

    def __init__(self, content: dict[str, Any]) -> None:
        super().__init__(content)
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)


def meaning(content: dict[str, Any]) -> Any:
    settings = read_settings(content, "folder")
    return essence(settings.model, (), settings.model.vocab_size or 0), settings.score, settings.longest


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_key_that_a_file_leaves_out_has_the_value_of_transformers_class(kind):
    options = shape(kind, 0) | {"vocab_size": VOCAB}
    # Widths and heads that the defaults of the others divide
    options |= (
        {"n_embd": 48, "n_head": 4}
        if kind == "gpt2"
        else {"hidden_size": 256, "num_attention_heads": 32, "num_key_value_heads": 16}
    )
    complete = transformers.AutoConfig.for_model(kind, **options).to_dict()
    if "use_sliding_window" in complete:
        complete |= {"use_sliding_window": True, "sliding_window": 5}
    reading, compared = Reading(complete), set()
    read_settings(reading, "folder")
    for key in reading.read & complete.keys() - {"model_type"}:
        content = {name: value for name, value in complete.items() if name != key}
        if key in SIZES and kind != "gpt2":
            with pytest.raises(WeightsError, match=f"has {key}=None in config.json, where a whole number has to be"):
                read_settings(content, "folder")
        else:
            compared.add(key)
            theirs = transformers.AutoConfig.for_model(**content).to_dict()
            assert meaning(content) == meaning(theirs), key
    assert len(compared) > 5


@torch.no_grad()
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_file_of_the_base_model_or_of_a_compiled_one_is_the_same_model(kind, tmp_path):
    theirs = fresh(kind, 0, tie_word_embeddings=True)
    base, compiled = tmp_path / "base", tmp_path / "compiled"
    theirs.base_model.save_pretrained(base)
    theirs.save_pretrained(compiled)
    weights = load_file(base / "model.safetensors")
    assert not any(name.startswith((theirs.base_model_prefix, "lm_head")) for name in weights)
    if kind == "gpt2":  # whose old files also hold the causal mask
        save_file(weights | {"h.0.attn.bias": torch.ones(1, 1, 64, 64)}, base / "model.safetensors")
    weights = load_file(compiled / "model.safetensors")
    save_file({f"_orig_mod.{name}": x for name, x in weights.items()}, compiled / "model.safetensors")
    tokens = torch.randint(VOCAB, (2, T), generator=torch.Generator().manual_seed(1))
    for folder in (base, compiled):
        assert_close(read(folder)(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)


def test_a_head_that_contradicts_config_json_is_refused_with_a_way_out(tmp_path):
    _, folder = next((x, f) for x, f in folders("llama", tmp_path) if x.config.tie_word_embeddings)
    config = json.loads((folder / "config.json").read_text())
    weights = {name: x for path in folder.glob("*.safetensors") for name, x in load_file(path).items()}
    embedding = weights["model.embed_tokens.weight"]

    def written(tied, head):
        (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
        save_file(weights | ({} if head is None else {"lm_head.weight": head}), folder / "model.safetensors")
        with pytest.raises(WeightsError) as raised:
            read(folder)
        start = start_from(str(folder)).settings
        scores = layer_scores(start.score, start.model.n_layers)
        assert list(folder_mistakes(str(folder), start.model, scores, 16, "bpe")) == [str(raised.value)]
        return str(raised.value)

    assert written(True, embedding + 1).endswith(
        "has tie_word_embeddings=true in config.json and a lm_head.weight that is not the embedding; set it to false "
        "there, or remove the head."
    )
    assert "tie_word_embeddings=false in config.json and no lm_head.weight; set it to true" in written(False, None)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights | {"lm_head.weight": embedding.clone()}, folder / "model.safetensors")
    read(folder)  # an equal head is fine


def differences(config: Config) -> list[str]:
    """Sentences on what differs from the folder that a run starts from."""
    assert config.init_from is not None
    scores = attention_scores(config.score, config.model)
    found = HuggingFace().mistakes(config.init_from, config.model, scores, config.seq_len, config.data.tokenizer)
    return list(found)


def test_a_run_starts_from_a_folder_and_the_command_line_may_change_what_has_no_weights(tmp_path):
    _, folder = next(folders("gemma2", tmp_path))
    (folder / "tokenizer.json").write_text("{}")
    overrides = with_start([f"init_from={folder}", "model.dropout=0.1", "seq_len=32"], HuggingFace())
    config = to_config(composed(overrides))
    start = start_from(str(folder))
    assert replace(config.model, dropout=0.0) == start.settings.model
    assert (config.score, config.data.tokenizer) == (start.settings.score, str(folder / "tokenizer.json"))
    assert (config.model.dropout, config.seq_len) == (0.1, 32)
    assert not differences(config)
    torch.manual_seed(0)
    model = build_model(config, VOCAB, torch.device("cpu"), torch.float32, World(), HuggingFace())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), read(folder).parameters(), strict=True))
    with_score = to_config(composed(with_start([f"init_from={folder}", "score=causal"], HuggingFace())))
    assert with_score.score == Config().score
    changed = to_config(composed([*overrides, "model.norm_place=before"]))
    (sentence,) = differences(changed)
    assert sentence.endswith("has model.norm_place=both, and the model before; set model.norm_place=both.")


@pytest.mark.usefixtures("forked")
def test_loading_takes_memory_for_the_model_and_one_tensor(tmp_path):
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8}
    config = transformers.LlamaConfig(**shape, num_key_value_heads=8, vocab_size=VOCAB)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    found = json.loads(completed("-m", "tests.recipe.infer.loading_memory", tmp_path))
    assert found["weights"] > 50 << 20
    assert found["weights"] * 0.95 < found["taken"] < found["weights"] + found["largest"] + (8 << 20)
