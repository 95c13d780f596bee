"""Sampling from a run folder, made by hand so that no training is needed."""

import json

import pytest
import torch
import triton

from attention import IMPLEMENTATIONS, Attention, AttentionConfig
from attention.flash import paths
from data.tokenizers import bpe_tokenizer, save_tokenizer
from model.options import GPTConfig
from recipe.errors import UserError, refusals
from recipe.infer.trained import CheckpointChoice
from recipe.run.config import Config, ConfigError
from recipe.training.device import cpu_memory_limit
from sample import SampleConfig, main, parse
from tests.handmade import TOKENIZER, fresh, make_run
from tests.limits import data_gib
from tests.lines import write_lines
from tests.own_attention import ScalableSoftmax
from tests.programs import rewrite
from tests.recipe.infer.from_scratch import expected

MODEL = GPTConfig(n_layers=1, n_heads=2, n_embd=32)
SAMPLED = ["temperature=0.5", "top_k=20", "seed=3"]


@pytest.fixture
def run(tmp_path):
    """A run folder with the best checkpoint at step 5 and the newest at step 9."""
    config = Config(seq_len=16, device="cpu", model=MODEL, attention=AttentionConfig(dropout=0.1))
    return make_run(tmp_path, config, {5: {"val_loss": 1.0}, 9: {"val_loss": 2.0}})


def continuation(step: int, prompt: list[int], tokens: int, attend: Attention | None = None) -> str:
    """The text with which the checkpoint of `step` continues the prompt, computed without a cache."""
    model, found = fresh(MODEL, 16, step), list[int]()
    model.attend = attend or model.attend
    while len(found) < tokens and found[-1:] != [256]:
        found = expected(model, prompt, [*found, 0], temperature=0.5, top_k=20, seed=3)
    return bytes(token for token in found if token != 256).decode("utf-8", errors="replace")


@pytest.mark.parametrize("checkpoint", ["best", "newest"])
def test_prompt_and_continuation_come_from_the_chosen_checkpoint(run, capsys, checkpoint):
    arguments = ["prompt=def ", "tokens=40", *SAMPLED, f"checkpoint={checkpoint}"]
    main([f"run={run}", "device=cpu", *arguments])
    step = {"best": 5, "newest": 9}[checkpoint]
    assert capsys.readouterr().out == "def " + continuation(step, list(b"def "), 40) + "\n"


@pytest.mark.parametrize("name", ["model/*.safetensors", "manifest.json"])
def test_a_damaged_best_checkpoint_is_named_and_the_newest_taken(run, capsys, name):
    (damaged,) = (run / "checkpoints" / "step-00000005").glob(name)
    with damaged.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    main([f"run={run}", "prompt=a", "tokens=5", *SAMPLED])
    captured = capsys.readouterr()
    assert captured.out == "a" + continuation(9, list(b"a"), 5) + "\n"
    assert "step-00000005" in captured.err
    assert "step-00000009" in captured.err


def test_a_tokenizer_of_another_vocabulary_is_refused(run):
    save_tokenizer(bpe_tokenizer(["a b a b"], 260), run)
    with pytest.raises(ConfigError, match=r"tokenizer\.json has 25[89] tokens and the model of .* has 257"):
        main([f"run={run}"])


def test_a_configuration_of_another_model_is_refused(run):
    rewrite(run / ".hydra" / "config.yaml", "n_layers: 1", "n_layers: 2")
    with pytest.raises(ConfigError, match=r"step-00000005 does not hold the weights of the model in .*config\.yaml"):
        main([f"run={run}"])


def test_damage_to_every_checkpoint_is_reported_once(run, capsys):
    for weights in (run / "checkpoints").glob("step-*/model/*"):
        weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(UserError, match=r"No checkpoint in .* is intact") as raised:
        main([f"run={run}"])
    assert str(raised.value).count("is damaged") == 2
    assert "is damaged" not in capsys.readouterr().err


@pytest.mark.parametrize("attention", ["flex", "sdpa"])
def test_an_attention_that_reads_no_cache_is_named_and_leaves_decoding_to_another(run, capsys, attention):
    main([f"run={run}", "prompt=def ", "tokens=9", *SAMPLED, f"attention={attention}"])
    captured = capsys.readouterr()
    assert captured.out == "def " + continuation(5, list(b"def "), 9) + "\n"
    assert f"attention={attention} cannot decode; attention=naive does it instead." in captured.err


@pytest.fixture
def own_attention(run, monkeypatch):
    """The run, trained with an attention that computes another function."""
    monkeypatch.setitem(IMPLEMENTATIONS, ScalableSoftmax.name, ScalableSoftmax)
    rewrite(run / ".hydra" / "config.yaml", "name: naive", f"name: {ScalableSoftmax.name}")
    return run


def test_an_attention_of_another_function_samples_each_token_from_all_those_before_it(own_attention, capsys):
    text = continuation(5, list(b"def "), 20, ScalableSoftmax(AttentionConfig(ScalableSoftmax.name)))
    assert text != continuation(5, list(b"def "), 20)
    main([f"run={own_attention}", "prompt=def ", "tokens=20", *SAMPLED, "device=cpu"])
    captured = capsys.readouterr()
    assert captured.out == "def " + text + "\n"
    assert "reads no cache, so each token is computed from all those before it" in captured.err


@pytest.mark.parametrize("argument", ["attention=naive", "attention=tiled", "export={folder}/exported"])
def test_an_attention_of_another_function_is_neither_exchanged_nor_exported(own_attention, tmp_path, argument):
    with pytest.raises(ConfigError, match="attention=scalable_softmax does not declare that it is exact"):
        main([f"run={own_attention}", argument.format(folder=tmp_path)])
    assert not (tmp_path / "exported").exists()


def test_a_run_that_left_a_line_out_is_not_exported_as_if_it_had_not(run, tmp_path):
    rewrite(run / ".hydra" / "config.yaml", "name: naive", "name: tiled")
    rewrite(run / ".hydra" / "config.yaml", "ablate: none", "ablate: no_rescaling")
    with pytest.raises(ConfigError, match=r"attention\.ablate=no_rescaling leaves out a line"):
        main([f"run={run}", f"export={tmp_path / 'exported'}"])


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="flash runs on a CPU in Triton's interpreter only")
def test_the_prompt_alone_is_computed_in_8_bits(run, capsys, monkeypatch):
    plain, lengths = paths.PATHS["plain"], list[tuple[str, int]]()

    def forward(q, k, v, out, call):
        lengths.append((call.spec.precision, q.shape[2]))
        return plain.forward(q, k, v, out, call)

    monkeypatch.setitem(paths.PATHS, "plain", plain._replace(forward=forward))
    main([f"run={run}", "prompt=def ", "tokens=3", "device=cpu", "attention=flash", "attention.precision=fp8"])
    assert lengths == [("fp8", 4)]
    assert (
        "attention.precision=fp8 cannot decode; attention.precision=inputs does it instead." in capsys.readouterr().err
    )


def test_an_empty_prompt_begins_a_text(run, capsys):
    main([f"run={run}", "tokens=10", *SAMPLED])
    assert capsys.readouterr().out == continuation(5, [TOKENIZER.eot_token], 10) + "\n"


def test_the_stop_text_ends_the_continuation(run, capsys):
    whole = continuation(5, list(b"def "), 40)
    stop = whole[5:7]
    main([f"run={run}", "prompt=def ", "tokens=40", *SAMPLED, f"stop={stop}"])
    assert capsys.readouterr().out == "def " + whole[: whole.index(stop)] + "\n"


def test_a_text_of_many_depends_on_its_prompt_and_number_alone(run, tmp_path, capsys):
    prompts = ["def ", "a", "class", "if x:", "\u2028b"]
    file = write_lines(tmp_path / "prompts.jsonl", [{"prompt": prompt, "id": 7} for prompt in prompts])
    files = [f"prompts={file}", f"out={tmp_path / 'texts.jsonl'}"]
    main([f"run={run}", *files, "batch=2", "tokens=12", *SAMPLED])
    found = [json.loads(line) for line in (tmp_path / "texts.jsonl").open()]
    assert sorted(line["index"] for line in found) == list(range(5))
    for line in found:
        assert line["prompt"] == prompts[line["index"]]
        if line["index"] == 0:
            assert line["text"] == continuation(5, list(line["prompt"].encode()), 12)
        assert 0 < line["tokens"] <= 12
        assert line["seconds"] >= 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "5 of 5 prompts" in captured.err
    others = ["x" * n for n in range(1, 5)]
    for line in found[::2]:  # at the same place, among others
        beside = [*others[: line["index"]], line["prompt"], *others[line["index"] :]]
        (tmp_path / "beside.txt").write_text("\n".join(beside), encoding="utf-8-sig")
        main([f"run={run}", f"prompts={tmp_path / 'beside.txt'}", "batch=5", "tokens=12", *SAMPLED])
        again = [json.loads(text) for text in capsys.readouterr().out.removesuffix("\n").split("\n")]
        assert [text["text"] for text in again if text["index"] == line["index"]] == [line["text"]]


def test_equal_prompts_of_a_file_get_different_texts(run, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("def \n" * 4)
    main([f"run={run}", f"prompts={tmp_path / 'prompts.txt'}", "tokens=12", *SAMPLED])
    texts = {line["index"]: line["text"] for line in map(json.loads, capsys.readouterr().out.splitlines())}
    assert texts[0] == continuation(5, list(b"def "), 12)
    assert len(set(texts.values())) == 4


def test_samples_of_a_prompt_differ_and_come_in_order(run, tmp_path, capsys):
    main([f"run={run}", "prompt=def ", "samples=3", "batch=2", "tokens=12", *SAMPLED])
    printed = capsys.readouterr().out
    first, *others = printed.split("--- sample ")[1:]
    assert first == f"1 of 3\ndef {continuation(5, list(b'def '), 12)}\n"
    assert [text.splitlines()[0] for text in others] == ["2 of 3", "3 of 3"]
    assert len({text.partition("\n")[2] for text in (first, *others)}) == 3
    out = tmp_path / "texts.jsonl"
    main([f"run={run}", "prompt=def ", "samples=3", "tokens=12", *SAMPLED, f"out={out}"])
    lines = {line["sample"]: line for line in map(json.loads, out.read_text().splitlines())}
    assert all(f"{line['prompt']}{line['text']}\n" in printed for line in lines.values())
    assert sorted(lines) == [0, 1, 2]


@pytest.mark.parametrize(
    ("content", "arguments", "sentence"),
    [
        ("a\n\nb\n", [], r"Line 2 of prompts=.*prompts.txt has no prompt; write one there, or take it out"),
        ("", [], "prompts=.*prompts.txt is empty; give it at least one line"),
        ('{"prompt": "a"}\n{"text": "b"}\n', [], "Line 2 of prompts=.*prompts.jsonl has no prompt"),
        ('{"prompt": "\\ud800"}', [], r"prompts.jsonl \(line 1 is text with half a character"),
        ('{"prompt": "' + 17 * "a" + '"}', [], "The prompt has 17 tokens, and the model sees seq_len=16"),
        ('{"prompt": "a"}', ["out={folder}/full"], "out=.*full exists, and is not overwritten"),
        ('{"prompt": "a"}', ["out={folder}/no/file"], r"out=.*file cannot be written \(No such file"),
        ('{"prompt": "a"}', ["prompt=b"], "prompt=b and prompts=.* are both given"),
        ('{"prompt": "a"}', ["batch=0"], "batch=0 must be at least 1"),
        ('{"prompt": "a"}', ["tokens=0"], "tokens=0 must be at least 1"),
        ('{"prompt": "a"}', ["samples=0"], "samples=0 must be at least 1"),
        ('{"prompt": "a"}', ["samples=2", "temperature=0"], "samples=2 would be the same text each time"),
        ('{"prompt": "a"}\n' * 2, ["tokens=10000000000"], r"random numbers of batch=2 .* ask for fewer tokens"),
        (None, [], r"prompts=.*prompts.jsonl cannot be read \(No such file"),
        ("a\udcff", [], r"prompts=.*prompts.txt cannot be read \(it is not UTF-8"),
        ('{"prompt": ' + "[" * 100_000, [], r"prompts.jsonl \(line 1 is not JSON\); repair it or set another prompts"),
        ("a", ["prompts=/dev/zero"], r"prompts=/dev/zero cannot be read \(it is not a regular file\)"),
    ],
)
def test_prompts_that_cannot_be_continued_are_refused_in_one_sentence(run, tmp_path, content, arguments, sentence):
    (tmp_path / "full").write_text("something else")
    path = tmp_path / ("prompts.jsonl" if content is None or content.startswith("{") else "prompts.txt")
    if content is not None:
        path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(refusals(), match=sentence) as raised:
        main([f"run={run}", f"prompts={path}", *(argument.format(folder=tmp_path) for argument in arguments)])
    assert "\n" not in str(raised.value)
    assert (tmp_path / "full").read_text() == "something else"


def test_a_batch_that_does_not_fit_in_memory_ends_in_one_sentence(run, tmp_path):
    (tmp_path / "prompts.txt").write_text("a\nb\n")
    sentence = "model with batch=9 does not fit in the memory of cpu"
    with cpu_memory_limit(data_gib() + 2), pytest.raises(UserError, match=sentence):
        main([f"run={run}", f"prompts={tmp_path / 'prompts.txt'}", "batch=9", "tokens=2000000", "device=cpu"])


def test_a_run_is_exported_for_transformers_with_its_tokenizer_and_card(run, tmp_path):
    transformers = pytest.importorskip("transformers")
    main([f"run={run}", f"export={tmp_path / 'mine'}"])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "mine").eval()
    tokens = torch.arange(16)[None]
    torch.testing.assert_close(theirs(tokens).logits, fresh(MODEL, 16)(tokens), rtol=1e-4, atol=1e-4)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "mine")("déjà")["input_ids"] == list("déjà".encode())
    assert theirs.config.attn_pdrop == 0.1
    card = (tmp_path / "mine" / "README.md").read_text()
    assert 'model="mine")("The", max_new_tokens=8)' in card  # half of the model's context


@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        ("file", "it is a file"),
        ("file/below", "Not a directory"),
        ("/proc/nowhere", "No such file or directory"),
        ("full", "it is not empty"),
    ],
)
def test_an_export_that_cannot_be_written_is_named_and_nothing_overwritten(run, tmp_path, folder, reason):
    (tmp_path / "file").write_text("something else")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.json").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(
        refusals(), match=rf"export=.*{folder} cannot be written as a folder \({reason}\); name another"
    ):
        main([f"run={run}", f"export={tmp_path / folder}"])
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "full" / "config.json").read_text() == "mine"


def test_arguments_are_typed_and_a_prompt_is_taken_as_it_is():
    given = ["run=x y", "prompt= a=[1, 2]: ", "tokens=7", "temperature=0", "top_k=null", "checkpoint=newest"]
    assert parse(given) == SampleConfig(
        run="x y", prompt=" a=[1, 2]: ", tokens=7, temperature=0.0, top_k=None, checkpoint=CheckpointChoice.newest
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "run=<folder> is missing"),
        (["run=x", "tokns=3"], "tokns=3 is not an argument; did you mean tokens?"),
        (["run=x", "hello"], "hello is not an argument"),
        (["/"], "/ is not an argument; did you mean run=/?"),
        (["run=x", "tokens"], "tokens has no value; write tokens=<value>"),
        (["run=x", "export=y", "prompt=a"], "export=y writes the model and no texts; leave the prompts out"),
        (["run=x", "tokens=many"], "tokens=many is not possible: .*many"),
        (["run=x", "tokens=-5"], "tokens=-5 must be at least 0"),
        (["run=x", "out=y"], "out=y takes the texts of many prompts; name their file with prompts="),
        (["run=x", "top_p=2"], "top_p=2.0 must be above 0 and at most 1"),
        (
            ["run=x", "prompts=y", "attention.precision=fp8"],
            "attention.precision=fp8 does not separate documents, and batch=32 prompts share a row .*; set batch=1",
        ),
        (["run=x", "top_k=0"], "top_k=0 must be at least 1; null draws among all tokens"),
        (["run=x", "prompt=a\udcff"], "prompt= is not UTF-8; repair it"),
        (["run=x", "checkpoint=last"], "checkpoint=last is not possible: .*best, newest"),
        (["run=/no/where"], r"run=/no/where is not a run folder, .*; name the folder that train.py printed"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused_in_one_sentence(arguments, sentence):
    with pytest.raises(refusals(), match=sentence) as raised:
        main(arguments)
    assert "\n" not in str(raised.value)
