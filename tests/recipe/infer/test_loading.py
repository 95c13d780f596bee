"""Weights from Hugging Face's GPT-2, against transformers itself; tests/recipe/infer/ has the way back."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from torch import Tensor

from model.gpt import GPT
from model.options import GPTConfig, Positions
from model.score import ScoreConfig, layer_scores
from recipe.infer.huggingface.loading import folder_mistakes
from recipe.infer.huggingface.loading import load as load_gpt2
from recipe.infer.huggingface.settings import WeightsError, read_settings
from recipe.infer.huggingface.starting import is_folder, start_from
from tests.parts import built, randomize

transformers = pytest.importorskip("transformers")

CONFIG = GPTConfig(n_layers=3, n_heads=4, n_embd=64, bias=True)
VOCAB, POSITIONS = 487, 32  # as GPT-2's 50,257, no multiple of 64


LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96,
    "vocab_size": 99, "max_position_embeddings": 64,
}  # fmt: skip


def build(config: GPTConfig = CONFIG, vocab_size: int = VOCAB, seq_len: int = POSITIONS) -> GPT:
    return built(config, seq_len, vocab_size).eval()


def flaws(
    source: Path | str, config: GPTConfig = CONFIG, scores: Any = (), seq_len: int = 16, tokenizer: str = "bpe"
) -> list[str]:
    return list(folder_mistakes(str(source), config, scores, seq_len, tokenizer))


@pytest.fixture(scope="module")
def gpt2():
    """A small GPT-2 of transformers, every parameter random."""
    torch.manual_seed(0)
    shape = transformers.GPT2Config(n_layer=3, n_head=4, n_embd=64, vocab_size=VOCAB, n_positions=POSITIONS)
    model = transformers.GPT2LMHeadModel(shape).eval()
    randomize(model, 0.1)
    return model


@pytest.fixture(scope="module")
def folder(gpt2, tmp_path_factory):
    path = tmp_path_factory.mktemp("gpt2")
    gpt2.save_pretrained(path)
    return path


def tokens() -> Tensor:
    return torch.randint(VOCAB, (2, POSITIONS), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_a_shorter_model_takes_the_first_positions(gpt2, folder):
    model = build(seq_len=8)
    load_gpt2(model, str(folder))
    torch.testing.assert_close(model(tokens()[:, :8]), gpt2(tokens()[:, :8]).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ({"config": replace(CONFIG, n_embd=128)}, r"set model.n_embd=64\."),
        ({"config": replace(CONFIG, positions=Positions.rotary)}, r"set model.positions=learned\."),
        ({"vocab_size": 257}, r"487 tokens, and the data's tokenizer 257; GPT-2's own is data.tokenizer=gpt2\."),
        ({"seq_len": 64}, r"32 positions, fewer than seq_len=64"),
    ],
)
def test_weights_of_another_model_are_refused_with_the_override_that_fits(folder, model, sentence):
    with pytest.raises(WeightsError, match=sentence):
        load_gpt2(build(**model), str(folder))


def test_all_mistakes_are_reported_at_once(folder):
    wrong = replace(CONFIG, n_layers=2, n_heads=8, bias=False, qk_norm=True)
    found = flaws(folder, wrong, layer_scores(ScoreConfig(sinks=True), 2), 64, "bytes")
    for named in ("model.n_layers=3", "model.n_heads=4", "model.qk_norm=false", "score.sinks=false", "model.bias=true"):
        assert sum(f"set {named}." in sentence for sentence in found) == 1
    assert len(found) == 7  # and the tokenizer, and the positions
    with pytest.raises(WeightsError) as raised:
        load_gpt2(build(config=replace(wrong, bias=True), seq_len=64), str(folder))
    assert len(str(raised.value).splitlines()) == 4  # layers, heads, qk_norm, positions
    assert flaws(folder) == []
    assert flaws("gpt2", wrong) == []  # of the hub: later


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            {"a": 0, "<eos>": 1, "<pad>": VOCAB + 1},
            r"has the token '<pad>' with number 488; take it out of the file, or",
        ),
        (
            {f"w{n}": n for n in range(VOCAB)},
            r"no token that ends a text, so <\|endoftext\|> becomes number 487; call one",
        ),
    ],
)
def test_a_token_without_a_row_is_named_with_its_number(folder, tmp_path, words, sentence):
    path = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a")).save(str(path))
    sentence = (
        f"has rows for the tokens up to 486, and data.tokenizer=.*{sentence}.* rows with .*resize_token_embeddings"
    )
    (flaw,) = flaws(folder, tokenizer=str(path))
    assert re.search(sentence, flaw)
    with pytest.raises(WeightsError, match=sentence):
        start_from(str(folder))._replace(tokenizer=str(path)).load_tokenizer()


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"model_type": "mixtral", "num_local_experts": 8}, r"type mixtral with experts \(num_local_experts=8\)"),
        ({"model_type": "llama", "hidden_act": "relu"}, "has hidden_act=relu; a model here computes hidden_act=silu"),
        ({"model_type": "llama", "quantization_config": {"bits": 4}}, "has a quantization_config"),
        (LLAMA | {"mlp_bias": True}, "mlp_bias=true and attention_bias=false"),
        (LLAMA | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "has rope_type=dynamic"),
        (LLAMA | {"rms_norm_eps": None}, "has rms_norm_eps=None in config.json, where a number above 0 has to be"),
        (LLAMA | {"rms_norm_eps": "1e-5"}, "has rms_norm_eps=1e-5 in config.json"),
        (LLAMA | {"num_attention_heads": 3}, r"describes no model: model.n_embd=64 is not a multiple"),
    ],
)
def test_a_folder_whose_model_no_block_here_computes_is_refused_by_name(content, named):
    with pytest.raises(WeightsError, match=named):
        read_settings(content, "some-folder")


def test_queries_keys_and_values_of_fewer_rows_than_promised_are_refused(tmp_path):
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, num_key_value_heads=2)).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_key_value_heads": 4}))
    config = start_from(str(tmp_path)).config().model
    with pytest.raises(WeightsError, match=r"q_proj.* and .*v_proj.* have 128 rows where its config.json promises 192"):
        load_gpt2(build(config, LLAMA["vocab_size"], LLAMA["max_position_embeddings"]), str(tmp_path))


def test_a_file_a_run_and_a_folder_that_is_not_there_are_named(folder, tmp_path):
    (tmp_path / "run" / ".hydra").mkdir(parents=True)
    for source, named in (
        (folder / "model.safetensors", "is a file; name the folder"),
        (tmp_path / "no", "is no folder"),
        (tmp_path / "run", "is a run folder; continue it with resume="),
    ):
        (sentence,) = flaws(source)
        assert named in sentence


def test_missing_damaged_and_pickled_weights_are_named(folder, tmp_path):
    with pytest.raises(WeightsError, match="needs a readable config"):
        load_gpt2(build(), str(tmp_path))
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(WeightsError, match=r"which has pytorch_model\.bin;"):
        load_gpt2(build(), str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(WeightsError, match="cannot be read"):
        load_gpt2(build(), str(tmp_path))


@torch.no_grad()
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("as_folder", [True, False])
def test_nanogpts_checkpoint_has_the_logits_of_its_model(tmp_path, bias, as_folder):
    """Its model is GPT-2's with the exact GELU, matrices that are not transposed, and biases of zero if it has none."""
    torch.manual_seed(0)
    shape = {"n_layer": 2, "n_head": 4, "n_embd": 64, "vocab_size": VOCAB}
    options = transformers.GPT2Config(**shape, n_positions=POSITIONS, activation_function="gelu")
    theirs, weights = transformers.GPT2LMHeadModel(options).eval(), {}
    for name, x in theirs.named_parameters():
        x.add_(0.1 * torch.randn_like(x))
        x.mul_(bias or not name.endswith("bias"))
        if bias or not name.endswith("bias"):
            matrix = x.ndim == 2 and ".h." in name
            weights[f"_orig_mod.{name}"] = (x.T if matrix else x).clone()
    weights["_orig_mod.lm_head.weight"] = weights["_orig_mod.transformer.wte.weight"]
    content = {"model": weights, "model_args": shape | {"block_size": POSITIONS, "bias": bias, "dropout": 0.0}}
    torch.save(content | {"optimizer": {}, "iter_num": 3, "best_val_loss": torch.tensor(1.0)}, tmp_path / "ckpt.pt")
    source = str(tmp_path if as_folder else tmp_path / "ckpt.pt")
    start = start_from(source)
    assert start.options()["model.mlp"] == "gelu_exact"
    model = build(start.settings.model, VOCAB, start.settings.longest)
    load_gpt2(model, source)
    torch.testing.assert_close(model(tokens()), theirs(tokens()).logits, rtol=1e-5, atol=1e-5)
    assert flaws(source, start.settings.model, seq_len=POSITIONS) == []


class Harmful:
    def __reduce__(self):
        return Path.touch, (Path("harm"),)


def test_pickles_of_others_are_refused_by_name_and_not_run(here):
    torch.save({"model": {}, "model_args": {}, "more": Harmful()}, here / "ckpt.pt")
    torch.save({"state_dict": {}}, here / "other.pt")
    (here / "nanochat").mkdir()
    for folder in (here, here / "nanochat"):
        torch.save({"transformer.wte.weight": torch.zeros(1)}, folder / "model_000700.pt")
    for name, named in (
        ("ckpt.pt", "ckpt.pt holds more than tensors or is damaged; load it in the library that wrote it"),
        ("other.pt", "other.pt is no checkpoint of nanoGPT; load it in the library that wrote it, and name the folder"),
        ("model_000700.pt", "is a checkpoint of nanochat, which is not read; train model=nanochat, or name a folder"),
        ("nanochat", "is a checkpoint of nanochat, which is not read; train model=nanochat, or name a folder"),
    ):
        (sentence,) = flaws(name)
        assert named in sentence
        with pytest.raises(WeightsError, match=re.escape(named)):
            start_from(name)
    assert is_folder(here / "nanochat")
    assert not (here / "harm").exists()


def test_a_name_is_fetched_from_the_hub_and_one_that_it_does_not_give_is_named(folder, monkeypatch):
    def fetch(name, **_):
        if name != "small-gpt2":
            raise ConnectionError("Cannot reach the hub\nlong advice")
        return str(folder)

    monkeypatch.setattr("recipe.infer.huggingface.loading.snapshot_download", fetch)
    load_gpt2(build(), "small-gpt2")
    with pytest.raises(WeightsError, match=r"init_from=gpt2 is not a folder here.*\(Cannot reach the hub\)"):
        load_gpt2(build(), "gpt2")
