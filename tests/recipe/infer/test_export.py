"""Exported folders, read by transformers itself: the same logits, the same tokens and the same text."""

import inspect
import json
import os
import random
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from data.own_tokenizer import OwnTokenizer
from data.tokenizers import Tokenizer, bpe_tokenizer, bytes_tokenizer, gpt2_tokenizer, train_bpe
from model.gpt import GPT
from model.options import GPTConfig, Positions
from model.score import ScoreConfig
from recipe.infer.generation.sampling import Sampling
from recipe.infer.generation.text import stream
from recipe.infer.huggingface.export import export, to_tokenizers
from recipe.infer.huggingface.loading import load
from recipe.infer.huggingface.settings import WeightsError
from tests.parts import built

transformers = pytest.importorskip("transformers")

TOKENS = Path(__file__).parents[3] / "../shared/data/tiktoken_cache"
SEQ_LEN = 48
SMALL = GPTConfig(n_layers=2, n_heads=4, n_embd=32, bias=True)
ROTARY = replace(SMALL, n_kv_heads=2, positions=Positions.rotary)
WINDOW = ScoreConfig(window=5)
TEXTS = [
    "",
    "  two  blanks, tabs\t\tand\n\n lines \n",
    "déjà vu — 木 🦜 don't they'RE 12345 x_y==z;",
    "\x00\x7f\u2028\ufeff end ",
    "".join(map(chr, random.Random(0).choices(range(1, 0x2FFF), k=300))),
    inspect.getsource(random)[:4000],
]


def tokenizer(name: str) -> Tokenizer:
    if name == "own":  # its end of text is the first token, and called otherwise
        learned = train_bpe([inspect.getsource(random)], 400).get_vocab()
        model = tokenizers.Tokenizer(tokenizers.models.BPE({"</s>": 0} | {t: i + 1 for t, i in learned.items()}, []))
        model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = tokenizers.decoders.ByteLevel()
        model.add_special_tokens(["</s>"])
        begin = {
            "single": "</s> $A",
            "special_tokens": [("</s>", 0)],
        }  # which training leaves out
        model.post_processor = tokenizers.processors.TemplateProcessing(**begin)
        return OwnTokenizer("own", model.to_str())
    return bytes_tokenizer() if name == "bytes" else bpe_tokenizer([inspect.getsource(random)], 700)


def build(config: GPTConfig, score: ScoreConfig | None = None, vocab_size: int = 257) -> GPT:
    """Every parameter random, biases too."""
    model = built(config, SEQ_LEN, vocab_size, spread=0.2, score=score).eval()
    with torch.no_grad():
        # Else the tied embedding makes the last token the likeliest again and again.
        model.get_parameter("ln_f.weight").normal_()
        model.wte.weight[vocab_size:] = 0
    return model


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "config", "score", "architecture"),
    [
        ("bytes", SMALL, None, "GPT2"),
        ("bpe", replace(SMALL, bias=False), None, "GPT2"),
        ("bytes", replace(ROTARY, n_kv_heads=1), None, "Starcoder2"),
        ("bpe", replace(SMALL, positions=Positions.rotary, bias=False), WINDOW, "Starcoder2"),
        ("own", SMALL, None, "GPT2"),
    ],
)
def test_the_folder_is_read_as_the_same_model(name, config, score, architecture, tmp_path, monkeypatch):
    encoding = tokenizer(name)
    model = build(config, score, encoding.n_vocab)
    export(model, encoding, tmp_path / "exported", 0.0)

    copy = build(config, score, encoding.n_vocab)
    for parameter in copy.parameters():
        parameter.zero_()
    load(copy, str(tmp_path / "exported"))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), copy.parameters(), strict=True))

    theirs, notes = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported", output_loading_info=True)
    assert not any(notes.values()), notes
    assert type(theirs).__name__.startswith(architecture)
    tokens = torch.randint(encoding.n_vocab, (2, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    expected = model(tokens)
    assert expected.std() > 0.5
    torch.testing.assert_close(theirs.eval()(tokens).logits, expected, rtol=1e-5, atol=1e-5)

    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert len(read) == encoding.n_vocab
    for text in TEXTS:
        assert read(text)["input_ids"] == encoding.encode_ordinary(text)
        assert read.decode(encoding.encode_ordinary(text)) == text
    end = encoding.end if isinstance(encoding, OwnTokenizer) else "<|endoftext|>"
    assert read(f"a{end}")["input_ids"][-1] == encoding.eot_token

    generate = transformers.pipeline("text-generation", model=str(tmp_path / "exported"), device="cpu")
    prompt = "def f(x):"
    continued = "".join(stream(model, encoding, prompt, 30, Sampling(temperature=0)))
    warnings = list[str]()
    monkeypatch.setattr("transformers.generation.utils.logger.warning", lambda text, *_: warnings.append(text))
    (answer,) = generate(prompt, max_new_tokens=30, do_sample=False)
    assert not warnings
    assert answer["generated_text"] == prompt + continued
    assert len(set(continued)) > 2
    (without_length,) = generate(prompt, return_tensors=True)  # the pipeline's default is 256 more tokens
    assert len(without_length["generated_token_ids"]) <= SEQ_LEN
    batch = read(["x" * 14, prompt], padding=True, return_tensors="pt")
    _, beside_a_longer_one = theirs.generate(**batch, max_new_tokens=30, do_sample=False)
    assert read.decode(beside_a_longer_one, skip_special_tokens=True) == answer["generated_text"]


@pytest.mark.skipif(not TOKENS.exists(), reason="no cached GPT-2 tokens at hand")
def test_gpt2s_tokens_follow_from_the_merges_that_are_exported(monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(TOKENS))
    gpt2 = gpt2_tokenizer()
    exported = to_tokenizers(gpt2)
    for text in TEXTS:
        tokens = exported.encode(text).ids
        assert tokens == gpt2.encode_ordinary(text)
        assert exported.decode(tokens, skip_special_tokens=False) == text
    assert exported.get_vocab_size() == gpt2.n_vocab


class RMSNorm(torch.nn.LayerNorm):
    """Names and shapes are those of a LayerNorm."""

    def forward(self, x):
        return x * x.square().mean(-1, keepdim=True).add(self.eps).rsqrt() * self.weight + self.bias


@pytest.mark.parametrize("change", ["norm", "gate"])
def test_a_changed_block_is_refused_and_nothing_is_left(change, tmp_path):
    model: Any = build(SMALL)
    for block in model.h:
        if change == "norm":
            block.ln_1 = RMSNorm(32)
        else:
            block.mlp.c_fc = torch.nn.Linear(32, 256)  # with a gate
    with pytest.raises(WeightsError, match=r"describe a changed model in recipe/infer/huggingface/families\.py"):
        export(model.eval(), bytes_tokenizer(), tmp_path / "exported", 0.0)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("config", "score", "named"),
    [
        (SMALL, WINDOW, r"score.window=5\."),
        (replace(SMALL, n_kv_heads=2), None, r"model.n_kv_heads=2\."),
        (replace(SMALL, qk_norm=True), None, r"model.qk_norm=true\."),
        (replace(SMALL, positions=Positions.none), None, r"model.positions=none\."),
        (ROTARY, ScoreConfig(soft_cap=30.0), r"score.soft_cap=30.0\."),
        (ROTARY, ScoreConfig(alibi=True, sinks=True), "score.alibi=true and score.sinks=true"),
        (ROTARY, ScoreConfig(formula="t[h] * s", learned={"t": ["h"]}), r"score.formula=.*t\[h\] \* s"),
        (ROTARY, ScoreConfig(formula="0.5 * s"), r"score.formula=.*0\.5 \* s"),
        (ROTARY, ScoreConfig(layers=[{"window": 5}, {}]), "score.layers=layers that differ"),
    ],
)
def test_a_model_that_no_architecture_describes_is_refused_by_name(config, score, named, tmp_path):
    with pytest.raises(WeightsError, match=f"has this model's {named}"):
        export(build(config, score), bytes_tokenizer(), tmp_path / "exported", 0.0)
    assert not [*tmp_path.iterdir()]


def test_every_file_of_the_folder_may_be_read_by_those_whom_the_umask_allows(tmp_path):
    before = os.umask(0o027)
    try:
        export(build(SMALL), bytes_tokenizer(), tmp_path / "exported", 0.0)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "exported").iterdir()}
    assert "model.safetensors" in modes
    assert set(modes.values()) == {0o640}


def test_the_folder_has_a_model_card_and_the_tokens_that_end_a_text(tmp_path):
    export(build(SMALL), bytes_tokenizer(), tmp_path / "mine", 0.0)
    card = (tmp_path / "mine" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: text-generation\n")
    assert f'model="mine")("The", max_new_tokens={SEQ_LEN // 2})' in card
    generation = json.loads((tmp_path / "mine" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == generation["pad_token_id"] == 256
