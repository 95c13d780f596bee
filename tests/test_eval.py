"""Evaluation of a run folder made by hand, against torch's formulas and against lm-eval where it is installed."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import eval
import sample
from data.options import DataConfig, Documents
from data.prepare import prepare
from model.gpt import GPT
from model.options import GPTConfig, Positions
from recipe.errors import UserError, refusals, sentence_of
from recipe.infer.evaluation.harness import run_tasks
from recipe.infer.evaluation.scorer import LanguageModel, Scorer
from recipe.infer.evaluation.tasks import run_file
from recipe.infer.trained import ModelChoice, load_trained
from recipe.run.config import Config
from recipe.run.run_folder import locked
from recipe.run.tracker import TrackingMode
from recipe.training.device import cpu_memory_limit
from tests import handmade
from tests.handmade import TOKENIZER
from tests.limits import data_gib
from tests.lines import write_lines
from tests.parts import built
from tests.programs import summary

T, END = 24, TOKENIZER.eot_token
MODELS = {
    positions.value: GPTConfig(n_layers=1, n_heads=2, n_embd=32, positions=positions, bias=True)
    for positions in Positions
}
QUESTIONS: list[dict[str, Any]] = [
    {"question": "The sun is", "choices": ["bright", "a very dark place"], "answer": 0},
    {"question": "Two and two are ", "choices": ["three", "four", "5"], "answer": 1},
    {"question": "", "choices": ["yes", "no"], "answer": 1},
    {"question": "A question that is longer than all that the model can read", "choices": ["a", "b"], "answer": 0},
]
TEXTS = ["Déjà\u2028vu.", "One text that takes more than one window of the model, and ends in the second or third."]


def fresh(positions: str = "learned") -> GPT:
    return handmade.fresh(MODELS[positions], T)


def make_run(folder: Path, positions: str = "learned", data: DataConfig | None = None, identity: str = "") -> Path:
    config = Config(seq_len=T, device="cpu", model=MODELS[positions], data=data or DataConfig())
    config.tracking.mode = TrackingMode.disabled
    handmade.make_run(folder, config, {5: {"data": identity}})
    (folder / "summary.json").write_text('{"status": "completed", "config": {}}')
    return folder


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run")


def evaluated(run: Path, *arguments: str) -> dict[str, Any]:
    eval.main([f"run={run}", "device=cpu", *arguments])
    return summary(run)["eval"]


@torch.no_grad()
def log_probability(model: GPT, tokens: list[int], last: int) -> float:
    """Log-probability of the `last` tokens after those before them, by one forward pass for each."""
    total = 0.0
    for i in range(len(tokens) - last, len(tokens)):
        context = tokens[max(0, len(tokens) - T - 1) : i]
        total += float(F.log_softmax(model(torch.tensor([context]))[0, -1], dim=-1)[tokens[i]])
    return total


def test_the_likeliest_choice_is_that_of_the_formula(run, tmp_path):
    model, right, by_length = fresh(), [], []
    for line in QUESTIONS:
        start = [END, *b" "] if not line["question"] else [*line["question"].rstrip().encode(), *b" "]
        if line["question"].endswith(" "):
            start += b" "
        logs = [log_probability(model, [*start, *c.encode()], len(c) + 1 + line["question"].endswith(" "))
                for c in line["choices"]]  # fmt: skip
        shares = [log / len(c) for log, c in zip(logs, line["choices"], strict=True)]
        right.append(logs.index(max(logs)) == line["answer"])
        by_length.append(shares.index(max(shares)) == line["answer"])
    found = evaluated(run, f"tasks={write_lines(tmp_path / 'quiz.jsonl', QUESTIONS)}", "batch=3")["quiz"]
    assert (found["acc"], found["acc_norm"], found["n"]) == (sum(right) / 4, sum(by_length) / 4, 4)
    assert 0 < sum(right) < 4 or 0 < sum(by_length) < 4  # else a constant answer would pass
    assert found["checkpoint"] == "step-00000005"


def test_where_there_is_no_terminal_lines_say_how_far_it_is(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("data.progress.SECONDS_BETWEEN_LINES", 0.0)
    (tmp_path / "text.txt").write_text("x" * (5 * T + 2))
    evaluated(run, "data=text", f"data.path={tmp_path / 'text.txt'}", "batch=2")
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("windows")]
    assert [line.partition(",")[0] for line in lines] == [f"windows: {done} of 6" for done in (2, 4, 6)]
    assert all(re.fullmatch(r"windows: \d of 6, 0:00:\d\d left", line) for line in lines)


def test_perplexities_count_each_byte_of_each_text_once(run, tmp_path):
    model, nats = fresh(), 0.0
    for text in TEXTS:
        tokens = [END, *text.encode()]
        for i in range(1, len(tokens)):
            window = (i - 1) // T  # the window that predicts token i
            start = min(window * T, max(0, len(tokens) - 1 - T))
            nats -= log_probability(model, tokens[start : i + 1], 1)
    size = sum(len(text.encode()) for text in TEXTS)
    path = write_lines(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])
    found = evaluated(run, f"tasks={path}", "batch=2")["texts"]
    assert found["bits_per_byte"] == pytest.approx(nats / size / math.log(2), rel=1e-5)
    assert found["byte_perplexity"] == pytest.approx(math.exp(nats / size), rel=1e-5)
    assert found["word_perplexity"] == pytest.approx(math.exp(nats / sum(len(t.split()) for t in TEXTS)), rel=1e-5)


@pytest.mark.parametrize(("positions", "seq_len"), [("learned", 10), ("rotary", 40)])
def test_the_loss_on_a_text_is_cross_entropy_over_windows_of_any_length(tmp_path, positions, seq_len):
    run, text = make_run(tmp_path / "run", positions), tmp_path / "book.txt"
    text.write_text("A line of text, é.\n" * 20)
    longer = built(MODELS[positions], max(T, seq_len), TOKENIZER.n_vocab)
    longer.load_state_dict(fresh(positions).state_dict())
    tokens = torch.tensor(list(text.read_bytes()))
    nats = 0.0
    with torch.no_grad():
        for start in range(0, len(tokens) - 1, seq_len):
            window = tokens[start : start + seq_len + 1]
            nats += float(F.cross_entropy(longer.eval()(window[None, :-1])[0], window[1:], reduction="sum"))
    found = evaluated(run, "data=text", f"data.path={text}", f"seq_len={seq_len}", "batch=4")[
        f"{text} seq_len={seq_len}"
    ]
    assert found["loss"] == pytest.approx(nats / (len(tokens) - 1), rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2))  # a token is a byte
    assert (found["tokens"], found["seq_len"]) == (len(tokens) - 1, seq_len)


def test_results_survive_a_later_part_that_does_not_fit_in_memory(tmp_path):
    run, text = make_run(tmp_path / "run", "rotary"), tmp_path / "book.txt"
    tasks = write_lines(tmp_path / "a.jsonl", QUESTIONS)
    text.write_text("A line of text.\n" * 3_000)
    arguments = ["data=text", f"data.path={text}", "batch=1", "seq_len=50_000"]
    sentence = r"batch=1 and seq_len=50000 does not fit in the memory"
    with cpu_memory_limit(data_gib() + 2), pytest.raises(UserError, match=sentence):
        evaluated(run, f"tasks={tasks}", *arguments)  # naive attention's scores: 9 GiB a head
    assert list(summary(run)["eval"]) == ["a seq_len=50000"]
    found = evaluated(run, "data=text", f"data.path={text}", "data.max_tokens=9", "seq_len=1_000_000")
    assert list(found.values())[-1]["tokens"] == 8  # no window is longer than the text


def test_documents_that_share_a_window_have_the_losses_of_documents_alone(tmp_path):
    """With positions that restart, documents that share a window have the losses that they have alone."""
    run = make_run(tmp_path / "run", "rotary", DataConfig(documents=Documents.restart))
    documents = ["first one", "the second", "3rd"]
    path = write_lines(tmp_path / "docs.jsonl", [{"text": document} for document in documents])
    together = evaluated(run, "data=text", f"data.path={path}", f"seq_len={T}")[f"{path} seq_len={T}"]
    model = fresh("rotary")
    tokens = [t for document in documents for t in (*document.encode(), END)][:-1]
    nats, begins = 0.0, 0
    for i in range(1, len(tokens)):
        row = (i - 1) // T * T
        begins = i - 1 if tokens[i - 2] == END and i > 1 else begins
        nats -= log_probability(model, tokens[max(row, begins) : i + 1], 1)
    assert together["loss"] == pytest.approx(nats / (len(tokens) - 1), rel=1e-5)


def test_without_tasks_and_data_the_validation_split_is_measured(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question " * 30)
    data = DataConfig(name="text", path=str(text), cache=str(tmp_path / "cache"))
    prepared = prepare(data)
    run = make_run(tmp_path / "run", data=data, identity=prepared.manifest["identity"])
    assert evaluated(run)["val"]["tokens"] == len(prepared.val.tokens) - 1
    text.write_text("another text " * 100)
    with pytest.raises(UserError, match="The text of data=text has changed since the run"):
        evaluated(run)


def test_results_add_to_the_summary_and_a_run_that_goes_on_keeps_none(run, tmp_path, capsys):
    first, second = write_lines(tmp_path / "a.jsonl", QUESTIONS[:1]), write_lines(tmp_path / "b.jsonl", QUESTIONS[1:])
    evaluated(run, f"tasks={first}")
    assert list(evaluated(run, f"tasks={second}", "limit=1")) == ["a", "b limit=1"]
    found = summary(run)
    assert found["status"] == "completed"
    assert found["eval"]["b limit=1"]["n"] == 1
    with locked(run):  # as training does
        assert evaluated(run, f"tasks={first}", "limit=1") == found["eval"]
    assert "is still running: the results are only printed" in capsys.readouterr().err
    (run / "summary.json").unlink()
    eval.main([f"run={run}", f"tasks={first}", "device=cpu"])
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1].startswith("a  acc ")
    assert "does not exist yet: the results are only printed" in captured.err
    assert not (run / "summary.json").exists()


def test_lm_evals_implementation_of_a_task_gives_the_same_metrics(run, tmp_path):
    pytest.importorskip("lm_eval")
    files = {"quiz": QUESTIONS, "texts": [{"text": text} for text in TEXTS]}
    paths = {name: write_lines(tmp_path / f"{name}.jsonl", lines) for name, lines in files.items()}

    def task(name, source, kind, prompt, target, *metrics, **more):
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(paths[source])}}}
        fields = {"doc_to_text": prompt, "doc_to_target": target, "metric_list": [{"metric": m} for m in metrics]}
        return {"task": name, "output_type": kind, "test_split": "test", **data, **fields, **more}

    perplexities = ("word_perplexity", "byte_perplexity", "bits_per_byte")
    stop = {"until": ["\n"], "max_gen_toks": 5}
    tasks = [
        task("quiz", "quiz", "multiple_choice", "question", "answer", "acc", "acc_norm", doc_to_choice="choices"),
        task("texts", "texts", "loglikelihood_rolling", "", "text", *perplexities),
        task("written", "quiz", "generate_until", "question", "answer", "exact_match", generation_kwargs=stop),
    ]
    scorer = Scorer(LanguageModel(load_trained(run, ModelChoice(device="cpu"))), batch=3)
    theirs = run_tasks(tasks, scorer, shots=None, limit=None)
    for name, path in paths.items():
        ours = run_file(path, scorer, limit=None)
        assert {key: theirs[name][key] for key in ours} == pytest.approx(ours)
    assert theirs["written"]["n"] == len(QUESTIONS)


def test_generation_is_greedy_up_to_a_stop_text_or_an_end_of_text(run, monkeypatch):
    model, prompts = LanguageModel(load_trained(run, ModelChoice(device="cpu"))), ["The sun", "", "x" * 40]
    found = Scorer(model, batch=2).generate_until([(prompt, [], 6) for prompt in prompts])
    reference, ended = fresh(), [END]
    for prompt, text in zip(prompts, found, strict=True):
        tokens = ([*prompt.encode()] or [END])[-(T - 6) :]
        with torch.no_grad():
            for _ in range(6):
                tokens.append(int(reference(torch.tensor([tokens]))[0, -1].argmax()))
        made = tokens[-6:]
        assert text == TOKENIZER.decode(made[: made.index(END)] if END in made else made)
        ended = made if prompt == prompts[0] else ended
    with monkeypatch.context() as patched:
        patched.setattr("recipe.infer.generation.text.ends_of", lambda tokenizer: {END, ended[2]})
        assert Scorer(model, batch=2).generate_until([(prompts[0], [], 6)]) == [
            TOKENIZER.decode(ended[: ended.index(ended[2])])
        ]
    stop = found[0][2]
    assert Scorer(model, batch=2).generate_until([(prompts[0], ["nowhere", stop], 6)]) == [found[0].partition(stop)[0]]


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_an_exported_folder_has_the_scores_of_its_run(tmp_path, positions, capsys):
    pytest.importorskip("transformers")
    run, folder = make_run(tmp_path / "run", positions), tmp_path / "exported"
    (run / "summary.json").unlink()
    sample.main([f"run={run}", f"export={folder}"])
    quiz = write_lines(tmp_path / "quiz.jsonl", QUESTIONS)
    texts = write_lines(tmp_path / "texts.jsonl", [{"text": TEXTS[1]}])
    capsys.readouterr()
    lines = []
    for which in (run, folder):
        eval.main([f"run={which}", f"tasks={quiz},{texts}", "data=text", f"data.path={texts}", "device=cpu"])
        lines.append(capsys.readouterr().out)
    assert lines[0] == lines[1]  # six digits of every metric
    arguments = [f"run={folder}", f"tasks={quiz}", "device=cpu"]
    with pytest.raises(refusals(), match=r"weights=ema has no effect on .*, a model of transformers; leave it out"):
        eval.main([*arguments, "weights=ema"])
    (folder / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(refusals(), match=r"model\.safetensors cannot be read .*; copy or fetch it again"):
        eval.main(arguments)
    (folder / "tokenizer.json").unlink()
    if positions == "rotary":  # GPT-2's files may lack it, as its tokens are known
        with pytest.raises(refusals(), match=r"has no tokenizer\.json; put the model's there"):
            eval.main(arguments)
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "someone/model"}')
    for program in (lambda: eval.main(arguments), lambda: sample.main([f"run={folder}"])):
        with pytest.raises(refusals(), match="is an adapter of someone/model; merge the two with peft's merge_and_unl"):
            program()


@pytest.mark.parametrize("written", ["b", {"__type": "AddedToken", "content": "b"}, None])
def test_a_text_of_a_folder_follows_its_tokenizers_begin_token(run, tmp_path, written):
    transformers, folder = pytest.importorskip("transformers"), tmp_path / "exported"
    (run / "summary.json").unlink()
    sample.main([f"run={run}", f"export={folder}"])
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"bos_token": written}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    first = transformers.AutoTokenizer.from_pretrained(folder).bos_token_id
    assert first == (None if written is None else ord("b"))
    first = END if first is None else first
    scorer = Scorer(LanguageModel(load_trained(folder, ModelChoice(device="cpu"))), batch=3)
    text, model = "A text.", fresh()
    expected = log_probability(model, [first, *text.encode()], len(text))
    assert scorer.loglikelihood_rolling([text]) == pytest.approx([expected], abs=1e-4)
    assert scorer.loglikelihood([("", text)])[0][0] == pytest.approx(expected, abs=1e-4)


def test_bits_per_byte_of_a_text_without_spaces_are_finite_and_its_word_perplexity_is_not(run, tmp_path):
    found = evaluated(run, f"tasks={write_lines(tmp_path / 'long.jsonl', [{'text': '木' * 400}])}")["long"]
    assert found["word_perplexity"] == "inf"
    assert found["byte_perplexity"] == pytest.approx(2 ** found["bits_per_byte"])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["batch=0"], "batch=0 must be at least 1"),
        (["seq_len=25"], "seq_len=25 is longer than the run's 24, and it has learned positions for those alone"),
        (["attention.precision=fp8"], r"attention.precision=fp8 has no effect with attention=naive; .*attention=flash"),
        (["tasks="], "tasks= names no task"),
        (["limit=3"], "limit=3 has no effect without tasks"),
        (["probes=[]"], r"probes=\[\] names no probe"),
        (["probes=mqr"], "probes=mqr is not known; choose among mqar, .*position_loss"),
        (["probes=mqar", "tasks=a"], "tasks=a and probes=mqar are two measurements"),
        (["probes=mqar", "batch=2"], "batch=2 has no effect on probes"),
        (["probes=mqar", "data=text"], "data=text has no effect on probes=mqar"),
        (["probes=mqar", "seq_len=20"], "seq_len=20 is shorter than the 24 tokens that the model was trained with"),
        (["probes=mqar", "seq_len=48"], "seq_len=48 is longer than the run's 24, and it has learned positions"),
        (["probes=mqar"], "probes=mqar needs seq_len=32 or more, and seq_len=24 is less"),
        (["tasks=a.jsonl", "shots=2"], "shots=2 affects tasks of lm-eval only"),
        (["tasks=a.jsonl,b/a.jsonl"], "tasks=a.jsonl,b/a.jsonl has two files of one name"),
        (["data=txt"], r"data=txt is not known; choose one of .*did you mean text\?"),
        (["data=text"], "data=text needs a text; set data.path=... to a file"),
        (["data=text", "data.tokenizer=gpt2"], "data.tokenizer=gpt2 has no effect here"),
        (
            ["data=text", "data.path=mixed.jsonl", "data.max_tokens=1"],
            "The text with data.max_tokens=1 has fewer than two",
        ),
        (
            ["data=text", "data.path=mixed.jsonl", "weights=ema"],
            "has no moving average, as training.ema was 0; leave weights=ema out",
        ),
        (["tasks=nowhere.jsonl"], r"tasks=nowhere.jsonl cannot be read \(No such file"),
        (["tasks=wrong.jsonl"], r"tasks=wrong.jsonl: line 2 has answer=2, which is none of its 2 choices; write"),
        (["tasks=mixed.jsonl"], "line 2 is of another kind than the first"),
        (["tasks=half.jsonl"], r"half.jsonl \(line 1 is text with half a character"),
        (["tasks=deep.jsonl"], r"deep.jsonl \(line 1 is not JSON\); repair it or set another tasks"),
        (["tasks=deep.json"], "tasks=deep.json is a file that does not end in .jsonl"),
        (["data.max_tokens=9"], "data.max_tokens=9 does not say which text to measure; name it with data="),
        (["tasks=long.jsonl"], r"The continuation ' xxxx.* has 31 tokens, and the model takes 1 to 24"),
    ],
)
def test_texts_and_tasks_that_cannot_be_measured_are_refused_in_one_sentence(run, here, arguments, sentence):
    write_lines(here / "wrong.jsonl", [QUESTIONS[0], QUESTIONS[0] | {"answer": 2}])
    write_lines(here / "mixed.jsonl", [{"text": "a"}, QUESTIONS[0]])
    for name in ("deep.json", "deep.jsonl"):
        (here / name).write_text('{"text": ' + "[" * 100_000)
    (here / "half.jsonl").write_text(r'{"text": "a\ud800"}')
    write_lines(here / "long.jsonl", [{"question": "a", "choices": ["x" * 30], "answer": 0}])
    before = (run / "summary.json").read_bytes()
    with pytest.raises(refusals()) as raised:
        evaluated(run, *arguments)
    assert re.search(sentence, sentence_of(raised.value))
    assert "\n" not in sentence_of(raised.value)
    assert (run / "summary.json").read_bytes() == before


def test_a_task_that_lm_eval_does_not_have_is_refused_with_near_names(run):
    pytest.importorskip("lm_eval")
    with pytest.raises(UserError, match=r"tasks=helaswag is not a task of lm-eval; did you mean .*hellaswag"):
        evaluated(run, "tasks=helaswag")


def test_no_module_of_the_checkout_hides_the_package_evaluate_from_lm_evals_tasks():
    names = {path.stem for path in Path(sample.__file__).parent.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert "evaluate" not in names
