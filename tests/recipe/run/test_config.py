"""Every configuration file composes, every override is typed, and every mistake ends in one sentence."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from attention import IMPLEMENTATIONS, AttentionConfig, Score, build_attention
from model.counting import num_parameters
from model.gpt import GPT
from model.score import layer_scores
from recipe import CONF
from recipe.errors import UserError, fail
from recipe.files import plain
from recipe.run import compose
from recipe.run.config import Config, ConfigError, keys
from recipe.run.launch import prepare
from recipe.run.mistakes import mistakes
from recipe.run.wording import expected
from recipe.training.optimizer import OPTIMIZERS, SCHEDULES
from tests import toy_llama
from tests.lines import write_lines
from tests.programs import ROOT, started

FILES = sorted(path.relative_to(CONF) for path in CONF.glob("*/*.yaml"))


def composed(*overrides: str) -> Config:
    return compose.to_config(compose.composed(list(overrides)))


def covering(jobs: list[list[str]]) -> Iterator[list[str]]:
    """Jobs among which every value of a sweep occurs: few of all its combinations."""
    seen: set[str] = set()
    for job in jobs:
        if not seen.issuperset(job):
            seen |= set(job)
            yield job


@pytest.mark.parametrize("file", FILES, ids=str)
def test_every_file_of_every_group_composes(file, tmp_path):
    group, name = str(file.parent), file.stem
    (tmp_path / "notes.txt").write_text("some text")
    overrides = [f"{group}={name}", *([f"data.path={tmp_path}"] if name == "text" else [])]
    if name == "chat":
        toy_llama.tokenizer().save_pretrained(tmp_path)
        path = write_lines(tmp_path / "chats.jsonl", toy_llama.conversations(2))
        overrides += [f"data.path={path}", f"data.tokenizer={tmp_path / 'tokenizer.json'}"]
    if group == "experiment":
        for job in covering(compose.jobs(overrides)):
            assert not list(mistakes(composed(*job)))
    else:
        config = composed(*overrides)
        if name not in ("flash", "flex", "varlen") or torch.cuda.is_available():
            assert not list(mistakes(config))
        if group not in ("tracking", "arm"):  # an arm is any overrides
            assert getattr(config, group).name == name


@pytest.mark.parametrize("name", [file.stem for file in FILES if file.parent == Path("experiment")])
def test_every_experiment_may_be_cut_to_three_steps(name):
    assert not list(mistakes(composed(*compose.jobs([f"experiment={name}", "training.steps=3"])[0])))


def test_names_in_the_groups_are_those_of_the_registries():
    for group, names in (("attention", IMPLEMENTATIONS), ("optimizer", OPTIMIZERS), ("schedule", SCHEDULES)):
        assert {file.stem for file in FILES if file.parent == Path(group)} == set(names)


def test_values_in_the_files_are_the_defaults_of_the_code():
    assert plain(composed("model=tiny-gpt2")) == plain(Config())


def test_gpt2_presets_have_the_sizes_of_the_paper():
    # Radford et al. 2019, table 2, with heads of 64 channels.
    sizes = {"gpt2": (12, 768), "gpt2-medium": (24, 1024), "gpt2-large": (36, 1280), "gpt2-xl": (48, 1600)}
    for name, (n_layers, n_embd) in sizes.items():
        config = composed(f"model={name}")
        model, lr = config.model, config.optimizer.lr
        assert (model.name, model.n_layers, model.n_embd, model.n_embd // model.n_heads) == (name, n_layers, n_embd, 64)
        assert not model.bias
        assert 2e-4 <= lr <= 6e-4
        assert composed("optimizer.lr=1e-3", f"model={name}").optimizer.lr == 1e-3


def test_presets_have_as_many_parameters_as_their_originals():
    # Of the published weights, with the tokenizer's tokens; nanochat's by its formula, 2 V C + 12 L C^2.
    published = {
        "llama": (32_000, 162_417_408),
        "llama-1b": (128_256, 1_235_814_400),
        "qwen3": (151_936, 596_049_920),
        "gemma2": (256_000, 2_614_341_888),
        "olmo2": (100_352, 1_484_916_736),
        "nanochat": (65_536, 2 * 65_536 * 768 + 12 * 12 * 768**2),
    }
    for name, (tokens, parameters) in published.items():
        with torch.device("meta"):
            model = GPT(composed(f"model={name}").model, tokens, 16, build_attention(AttentionConfig()))
        assert (name, num_parameters(model)) == (name, parameters)


MISTAKES = {
    "atention=flash": "atention=flash .* did you mean attention?",
    "model.n_head=4": "did you mean model.n_heads?",
    "+training.step=4": "did you mean training.steps?",
    "training=4": "no training",
    "lr=3": "did you mean optimizer.lr?",
    "attention.window=8": "there is no attention.window; did you mean score.window",
    "=4": "^=4 is not an override",
    "data.path= notes.txt": "^data.path= notes.txt has a blank beside the equals sign; write data.path=notes.txt",
    "data=text data.path=a,b.txt": "^data.path=a,b.txt is more than one value; .* 'data.path=\"a,b.txt\"'",
    "data=text data.path=数据.txt": "^data.path=数据.txt is not an override; .* 'data.path=\"数据.txt\"'",
    "data=text data.path=a[1].txt": r"^data.path=a\[1\].txt is not an override; .* 'data.path=\"a\[1\].txt\"'",
    "data=text data.path=it's.txt": r"^data.path=it's.txt is not an override; .* 'data.path=\"it'\\''s.txt\"'",
    "model.dropout= 0.1": "^model.dropout= 0.1 has a blank beside the equals sign; write model.dropout=0.1",
    "model.dropout = 0.1": "^model.dropout = 0.1 has a blank beside the equals sign; write model.dropout=0.1",
    "model.dropout =0.1": "^model.dropout =0.1 has a blank beside the equals sign; write model.dropout=0.1",
    "dropout=0.1": "did you mean attention.dropout or model.dropout?",
    "--attention=flash": "--attention=flash is not a flag of train.py; overrides have no dashes: key=value",
    "~attention": "~attention would leave attention without a value",
    "attention": "attention is not an override; write key=value",
    "attention=flesh": "attention=flesh is not known; choose one of .*naive, .*tiled",
    "model=7": "model=7 is not known; choose one of .*gpt2",
    "score=null": "score=null is not known; choose one of .*causal",
    f"data={ROOT}/README.md": "data=.*README.md is not known; .*, text; to train on your text, use .*README.md",
    "seq_len=abc": "seq_len=abc is not a whole number",
    "seq_len=1.5": "seq_len=1.5 is not a whole number",
    "seq_len=null": "seq_len=null is not a whole number",
    "optimizer.lr=fast": "optimizer.lr=fast is not a number",
    "training.compile=maybe": "training.compile=maybe is not true or false",
    "training.precision=bf8": "training.precision=bf8 is not one of auto, fp32, bf16, fp16",
    "optimizer.betas=3": r"optimizer.betas=3 is not a list \[x,y,...\], where each is a number",
    "model=mini optimizer.muon_lr=0.1": "optimizer.muon_lr=0.1 has no effect with optimizer=adamw; choose .*=muon",
    "optimizer.betas=[0.9]": "must be two numbers",
    "seed=-1": "seed=-1 must lie between 0",
    "seq_len=0": "seq_len=0 must be at least 1",
    "experiment=context_length seq_len=512 training.eval_span=1000": "use training.eval_span=1024",
    "experiment=context_length seq_len=16384 training.batch_tokens=16384": "multiple of .*; use .*=16384",
    "training.steps=-1": "training.steps=-1 must be at least 1",
    "training.residual_in_fp32=false device=cpu": r"no effect in fp32 \(.*=auto on cpu\); .*training.precision=bf16",
    "training.batch_tokens=1000": "is not a multiple of the 1536 .* use training.batch_tokens=1536",
    "schedule.warmup_steps=3000": "schedule.warmup_steps=3000 must be a whole number between 0 and .*=900; .*=auto",
    "schedule.warmup_steps=soon": "schedule.warmup_steps=soon must be a whole number between 0 and",
    "schedule.warmup_steps=1.5": "schedule.warmup_steps=1.5 is not a whole number or auto",
    "-m hydra/launcher=slurm seed=1,2": "needs a machine of a Slurm cluster|pip install",
    "training.cpu.threads=0": "training.cpu.threads=0 must be at least 1, or null",
    "training.cpu.memory_gib=-1": "training.cpu.memory_gib=-1.0 must be above 0, or null",
    "hydra.run.dir=/proc/run": "hydra.run.dir=/proc/run cannot be written, because of /proc .*; name another folder",
    f"hydra.run.dir={ROOT}/Makefile": "hydra.run.dir=.*Makefile cannot be written, .*Not a directory",
    "-m hydra.sweep.dir=/proc/sweep seed=1,2": "hydra.sweep.dir=/proc/sweep cannot be written",
    "optimizer.lr=-1": "^optimizer.lr=-1.0 must be above 0 and finite, such as optimizer.lr=1e-3",
    "optimizer.clip=-1": "^optimizer.clip=-1.0 must not be negative",
    "model.dropout=1": "model.dropout=1",
    "attention.dropout=1.5": "attention.dropout=1.5",
    "attention=sdpa attention.dropout=0.1": "attention.rng=torch",
    "data=text": "set data.path",
    "data=text data.path=~/no/notes.txt": f"data.path={Path.home()}/no/notes.txt does not exist",
    "data=mqar data.tokenizer=gpt2": "data.tokenizer=gpt2 has no effect with data=mqar",
    "data=mqar data.documents=mask": "data.documents=.*mask has no effect with data=mqar",
    "parity.reference=foo": "parity.reference=foo is not known; choose one of .*naive",
    "probes=[mqr]": "probes=mqr is not known; choose among mqar, .*, position_loss",
    "probes=mqar": r"probes=mqar is not a list \[x,y,...\], where each is text",
    "probes=[mqar] training.eval_every=0": "probes are measured with every evaluation, .*eval_every=0 has none",
    "device=gpu": "device=gpu is not known; choose one of auto, cpu, cuda",
    "device=cuda": "device=cuda needs a CUDA GPU, .* use device=cpu",
    "parity.every=-1": "parity.every=-1",
    "parity.every=9 parity.reference=flex device=cpu": "^parity.reference=flex cannot stand beside .* no backward pass",
    "data=text data.path=/dev/null": r"^/dev/null cannot be read \(Not a directory\); .* data.path=",
    "score=window score.window=0": "^score.window=0 must be at least 1",
    "score.window=wide": "score.window=wide is not a whole number",
    "score.learned=3": "score.learned=3 is not a mapping",
    'score.formula="s+bias[h,i-j]" score.learned.bias=[h,16]': "index i - j reaches 127, and bias has 16 entries",
    "score.layers=3": r"score.layers=3 is not a list \[x,y,...\], where each is a mapping, such as {name:value}",
    "score.layers=[3,{}]": r"^score.layers=\[3,{}\] is not a list \[x,y,...\], where each is a mapping",
    "score=sinks attention=sdpa": "attention=sdpa does not support score.sinks=true; .* attention=tiled",
    "attention=flex device=cpu": "attention=flex has no backward pass on a CPU",
    "data.documents=join": "data.documents=join is not one of ignore, mask, restart",
    "resume=nowhere": "resume=nowhere is not a run folder",
    "attention=naive,tiled": "attention=naive,tiled is more than one value; add -m",
    "-m seed=1,2 resume=auto": "^resume=auto continues one run; a sweep goes on in its folder: hydra.sweep.dir=",
    "-m --cfg job": "-m cannot be combined with --cfg",
    "--experimental-rerun config.pickle": "would run code from a pickled file; use resume=<run folder>",
    "-m attention=naive,flesh": "attention=flesh is not known",
    "-m model.n_heads=4,7": "not a multiple of model.n_heads=7",
    "-m seq_len=128,abc": "seq_len=abc is not a whole number",
    "-m optimizer.lr=interval(0.001,0.01)": r"^optimizer.lr=interval\(.* no single values, .*range\(1,9,2\)",
    "-m attention=glob(*)": r"^attention=glob\(\*\) names no single values",
    "-m seed=range(0,1000000000)": "^The sweep has more than 10,000 jobs; take fewer values",
    "experiment=parity model.n_heads=7": "not a multiple of model.n_heads=7",
    "arena.seeds=3": r"arena.\* has no effect .* add experiment=arena",
    "experiment=arena arena.seeds=1": "^arena.seeds=1 shows no spread between seeds; use 2 or more",
    "experiment=arena arena.rules.margin=nan": "^arena.rules.margin=nan must lie above 0 and below 1",
    "experiment=arena arena.rules.margin=5": "^arena.rules.margin=5 must lie above 0 and below 1",
    "experiment=arena arena.rules.looks=0": "^arena.rules.looks=0 must be at least 1",
    "experiment=arena arena.rules.first_seed=-1": "^arena.rules.first_seed=-1 must lie between 0 and",
    "experiment=arena arena.lr=[1,-2]": r"^arena.lr=\[1.0, -2.0\] must hold different factors above 0",
    "experiment=arena arena.lr=[1,1]": r"^arena.lr=\[1.0, 1.0\] must hold different factors above 0",
    "experiment=arena seed=3": "an arena pairs its runs by seed; instead of seed=",
    "experiment=arena optimizer.lr=1e-3,1e-2": "optimizer.lr=1e-3,1e-2 is more than one value",
}


def assert_refused(arguments: list[str], sentence: str, here: Path) -> None:
    """In one sentence, before anything is done."""
    with pytest.raises(UserError, match=sentence) as raised:
        prepare(arguments)
    assert "\n" not in str(raised.value)
    assert not list(here.iterdir())


@pytest.mark.parametrize(("arguments", "sentence"), MISTAKES.items(), ids=list(MISTAKES))
def test_a_mistake_is_refused_before_anything_is_done(arguments, sentence, here):
    if arguments == "device=cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA GPU here")
    assert_refused(arguments.split(), sentence, here)


OF_RANKS = {
    (1, "parallel.context=4"): "must divide the number of ranks, 1; use .*context=1, or start 4 ranks with torchrun",
    (4, "parallel.context=3"): "use parallel.context=2, or start 3 ranks with torchrun --nproc-per-node 3",
    (6, "parallel.context=4"): "use parallel.context=3, or start 4 ranks with torchrun --nproc-per-node 4",
    (2, "parallel.context=0"): "parallel.context=0 must be at least 1",
    (8, "parallel.context=8"): "seq_len=128 cannot be shared by parallel.context=8 ranks; use seq_len=256",
    (4, "training.batch_size=2 training.batch_tokens=512"): "is not a multiple of the 1024 tokens",
    (2, "-m seed=1,2"): "2 ranks were started; start it without torchrun",
    (2, "experiment=break_it"): "2 ranks were started; start it without torchrun",
}


@pytest.mark.parametrize(("ranks", "arguments"), OF_RANKS, ids=str)
def test_what_these_ranks_cannot_do_is_refused(ranks, arguments, here, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    assert_refused([*arguments.split(), "device=cpu"], OF_RANKS[ranks, arguments], here)


SHARED = "parallel.context=2 training.batch_size=2 training.batch_tokens=512"


@pytest.mark.parametrize(("ranks", "arguments"), [(3, ""), (3, "parallel.context=3 seq_len=288"), (4, SHARED)])
def test_numbers_of_ranks_that_can_train(ranks, arguments, here, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    assert prepare([*arguments.split(), "device=cpu"])


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("arguments", [["model.n_heads=7", "seed=-1"], ["-m", "seq_len=abc,4"]])
def test_mistakes_end_the_command_with_their_sentences_alone(arguments, tmp_path):
    done = started(ROOT / "train.py", *arguments, folder=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    sentences = done.stderr.splitlines()
    assert len(sentences) == (1 if "-m" in arguments else 2)
    assert all(sentence.startswith("error: ") for sentence in sentences)
    assert not list(tmp_path.iterdir())


def test_a_formula_and_the_place_of_its_mistake_stand_below_one_error(here, capsys):
    with pytest.raises(ConfigError) as raised:
        prepare(["seed=-1", 'score.formula="s + cosh(i)"'])
    with pytest.raises(SystemExit):
        fail(raised.value)
    first, second, *place = capsys.readouterr().err.splitlines()
    assert first.startswith("error: seed=-1")
    assert second.startswith("error: score.formula has no function cosh")
    assert place == ["    s + cosh(i)", "        ^^^^"]


def test_a_value_that_is_tried_changes_no_later_one():
    for _ in range(2):
        assert prepare(["score=bias", "score.learned.bias=[h,128]"])
        assert prepare(["score.learned=null"])


@pytest.mark.parametrize(
    "wrong",
    [
        ["atention=flash", "model.n_head=4", "seq_len=abc", "optimizer=adam", "training.steps=2.5", "seed"],
        ["optimizer.lr=-1", "optimizer.clip=-1", "training.batch_size=0", "model.n_heads=0", "model.dropout=2",
         "data.max_tokens=0", "data.val_fraction=2"],
    ],
    ids=["words", "values"],
)  # fmt: skip
def test_all_mistakes_are_reported_together(wrong, here):
    with pytest.raises(ConfigError) as raised:
        prepare([*wrong, "training.log_every=5"])
    sentences = str(raised.value).splitlines()
    assert len(sentences) == len(wrong)
    for override in wrong:
        assert sum(sentence.startswith(override) for sentence in sentences) == 1


def test_a_sweep_says_before_it_starts_what_changes_nothing(capsys):
    prepare(["experiment=arena", "arena.arms=causal | idle: score.formula=s + log(n)"])
    assert "log(n): log(n) is the same for all keys" in capsys.readouterr().out


def test_flags_may_stand_among_the_overrides(here):
    assert prepare(["model=tiny", "--cfg", "job", "data=stdlib"]) == ["--cfg", "job", "model=tiny", "data=stdlib"]
    sweep: Any = prepare(["model=tiny", "-m", "seed=1,2", "data=stdlib"])
    assert [job.overrides for job in sweep.__wrapped__.args[0]] == [
        ("model=tiny", f"seed={n}", "data=stdlib") for n in (1, 2)
    ]


def test_a_mistake_that_every_job_of_a_sweep_shares_is_reported_once():
    with pytest.raises(ConfigError) as raised:
        prepare(["-m", "attention=naive,tiled", "seed=1,-2", "training.steps=0"])
    assert sorted(sentence.split(" ")[0] for sentence in str(raised.value).splitlines()) == [
        "seed=-2", "training.steps=0"
    ]  # fmt: skip


def test_a_sweep_is_refused_before_it_runs_if_one_of_its_scores_needs_several_documents(here):
    (here / "notes.txt").write_text("some text")
    sweep = ["experiment=variants", "data=text", "data.path=notes.txt", "attention=naive", "seed=1"]
    with pytest.raises(ConfigError) as raised:
        prepare(sweep)
    [sentence] = str(raised.value).splitlines()
    assert "data.documents=mask has no effect" in sentence
    assert "choose another score=" in sentence
    prepare([*sweep, "score=causal,window"])
    (here / "more.txt").write_text("more of it")  # one of them is held out
    with pytest.raises(ConfigError, match=r"is one document; use data\.documents=ignore"):
        prepare(["data=text", "data.path=.", "data.documents=restart"])
    (here / "rows.jsonl").write_text('{"text": "one"}\n' * 9)
    prepare(["data=text", "data.path=rows.jsonl", "data.documents=restart"])


def test_every_key_of_the_configuration_has_a_description_of_its_values():
    assert all(expected(key) for key in keys())


def test_a_preset_of_scores_is_changed_by_single_values():
    windowed, full = Score(window=1024, soft_cap=50.0), Score(soft_cap=50.0)
    assert layer_scores(composed("score=gemma2", "score.window=1024").score, 4) == (windowed, full, windowed, full)
    own = composed("score=window", "score.layers=[{window:8},{sinks:true}]").score
    assert layer_scores(own, 2) == (Score(window=8), Score(window=64, sinks=True))


def test_a_sweep_has_every_combination_and_its_values_replace_those_of_the_experiment():
    jobs = compose.jobs(["attention=naive,tiled", "seed=1,2", "seq_len=64"])
    assert len(jobs) == 4
    assert ["attention=tiled", "seed=1", "seq_len=64"] in jobs
    swept = compose.jobs(["experiment=parity", "seed=5"])
    assert {tuple(o for o in job if o.startswith("seed=")) for job in swept} == {("seed=5",)}
    assert len(swept) > 1


@pytest.mark.usefixtures("forked")
def test_help_names_groups_choices_and_overrides(tmp_path):
    done = started(ROOT / "train.py", "--help", folder=tmp_path)
    assert "attention: " in done.stdout
    assert ", tiled" in done.stdout
    # Every override that the help text mentions exists.
    words = [word.strip("'").split("=") for word in done.stdout.split()]
    mentioned = {name for name, *value in words if value and "." in name}
    assert {name for name in mentioned if not name.startswith("hydra.")} <= set(keys())
    assert len(mentioned) > 15
