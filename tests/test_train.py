"""The whole recipe: one command, its run folder, how it ends, and that runs do not touch each other."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import eval as eval_module
import train as train_module
from attention import IMPLEMENTATIONS, AttentionConfig
from attention.naive import NaiveAttention
from data.options import DataConfig, Documents
from model.options import GPTConfig, Positions
from model.score import ScoreConfig
from recipe.compare.parity import judge
from recipe.compare.runs import find_runs
from recipe.compare.sweeps import cells_of
from recipe.compare.verdict import Outcome
from recipe.distributed.world import World
from recipe.errors import UserError
from recipe.infer.trained import ModelChoice, load_trained
from recipe.run.build import build_trainer
from recipe.run.config import Config, ConfigError
from recipe.run.metrics import read_metrics
from recipe.run.mistakes import mistakes
from recipe.run.tracker import TrackingConfig, TrackingMode
from recipe.training.checkpoint import CheckpointError
from recipe.training.device import OutOfMemory, Precision
from recipe.training.optimizer import ScheduleConfig
from recipe.training.options import TrainingConfig
from recipe.training.parity_probe import ParityConfig
from recipe.training.restoring import check_step_size
from recipe.training.step import NonFiniteError, Trainer
from tests.limits import data_gib
from tests.own_attention import ScalableSoftmax
from tests.parts import built
from tests.programs import ROOT, completed, losses, summary
from tests.wrong_attention import CLASSES, WRONG


@pytest.fixture
def config(here):
    """A run of seconds, on real text, below the working directory."""
    shutil.copy(os.__file__, "text.txt")
    return Config(
        seq_len=32,
        device="cpu",
        attention=AttentionConfig(dropout=0.1),
        model=GPTConfig(n_layers=2, n_heads=2, n_embd=32, dropout=0.1),
        data=DataConfig(name="text", path="text.txt", cache="cache"),
        schedule=ScheduleConfig(warmup_steps=2),
        training=TrainingConfig(
            steps=8, batch_size=4, log_every=2, eval_every=4, eval_batches=2, checkpoint_every=3, sample_tokens=10
        ),
        tracking=TrackingConfig(mode=TrackingMode.disabled),
    )


def run(config: Config, name: str = "run", **changes: Any) -> Path:
    folder = Path(name)
    folder.mkdir()
    assert train_module.train(replace(config, **changes), folder, ["seed=1"]) == 0
    return folder


def resume(config: Config) -> None:
    assert train_module.train(replace(config, resume="run"), Path("run"), []) == 0


class EvenAttention(NaiveAttention):
    """Refuses lengths that are odd."""

    name = "even"

    def attend(self, q, *others):
        if q.shape[2] % 2:
            raise ValueError("only even lengths")
        return super().attend(q, *others)


def test_attention_of_another_function_is_recorded_as_one_and_refused_by_the_probe(config, monkeypatch):
    monkeypatch.setitem(IMPLEMENTATIONS, ScalableSoftmax.name, ScalableSoftmax)
    config.attention = AttentionConfig(ScalableSoftmax.name)
    (found,) = find_runs([run(config)]).runs
    assert not found.claims_parity
    assert judge(cells_of([found])) == []
    config.parity.every = 2
    assert [line for line in mistakes(config) if ScalableSoftmax.name in line] == [
        "parity.every=2 would compare attention=scalable_softmax with softmax attention, which it does not claim to be "
        "(docs/add-an-attention.md); leave it at 0: compare.py ranks it by loss, and gpt-attention check judges it."
    ]


def test_a_complete_run_whose_model_generates_no_text_says_so(config, monkeypatch, capsys):
    monkeypatch.setitem(IMPLEMENTATIONS, "even", EvenAttention)
    assert summary(run(config, attention=AttentionConfig("even")))["status"] == "completed"
    assert "complete, but has no sample (ValueError: only even lengths); training.sample_tokens=0 asks" in (
        capsys.readouterr().out
    )


def test_one_command_trains_on_real_text_and_prints_the_paths_of_its_results(tmp_path, forked):
    small = ["data.max_tokens=200000", "seq_len=32", "model.n_layers=1", "model.n_embd=64", "training.steps=60"]
    quick = ["training.eval_every=30", "training.eval_batches=4", "schedule.warmup_steps=5", "tracking=disabled"]
    said = completed(ROOT / "train.py", *small, *quick, folder=tmp_path)
    (folder,) = tmp_path.glob("outputs/*/*-naive")
    assert f"run folder  {folder.relative_to(tmp_path)}" in said
    assert "step 60/60  loss" in said
    assert "23k tokens, " in said  # 60 steps of 12 sequences of 32
    assert "device=cpu (auto)  precision=fp32 (auto)" in said or torch.cuda.is_available()
    first, middle, last = (line["val/loss"] for line in read_metrics(folder / "metrics.jsonl") if "val/loss" in line)
    assert first > middle > last
    assert last < 3.2
    assert {"metrics.jsonl", "summary.json", "loss.png", "checkpoints", ".hydra"} <= {p.name for p in folder.iterdir()}
    # A sample from the model is printed between the last step and the run folder.
    sample = said.split("tokens, ")[-1].split("run folder")[0]
    assert len(sample) > 100


def test_compiling_is_announced_before_it_begins(config, monkeypatch, capsys):
    def compiling(*_, **__):
        raise InterruptedError

    monkeypatch.setattr(torch, "compile", lambda model, options: compiling)
    config.training.compile = True
    with pytest.raises(InterruptedError):
        run(config)
    assert "compiling: the first steps and the first evaluation wait for it" in capsys.readouterr().out


def test_the_summary_describes_the_run(config):
    folder = run(config)
    stored, lines = summary(folder), read_metrics(folder / "metrics.jsonl")
    evaluated = {line["step"]: line["val/loss"] for line in lines if "val/loss" in line}
    assert set(evaluated) == {0, 4, 8}
    assert (stored["status"], stored["message"], stored["non_finite_step"]) == ("completed", None, None)
    assert stored["attention_exact"]
    assert (stored["step"], stored["steps"], stored["tokens"]) == (8, 8, 8 * 4 * 32)
    assert [line["train/tokens"] for line in lines] == [line["step"] * 4 * 32 for line in lines]
    assert stored["train_loss"] == lines[-1]["train/loss"]
    assert stored["val_loss"] == evaluated[8]
    assert stored["best_val_loss"] == min(evaluated.values())
    assert evaluated[stored["best_val_step"]] == stored["best_val_loss"]
    assert (stored["attention"], stored["attention_path"], stored["overrides"]) == ("naive", None, ["seed=1"])
    assert stored["config"]["training"]["precision"] == "auto"
    assert stored["precision"] == "fp32"
    assert stored["device"]["type"] == "cpu"
    assert stored["median"]["throughput/tokens_per_s"] > 0
    assert stored["wall_time_s"] >= lines[-1]["throughput/elapsed_s"] > 0
    assert stored["memory_source"] == "attention"
    assert stored["process_peak_gib"] >= lines[-1]["memory/peak_allocated_gib"] > 0.05, "the process, with torch"
    scores = 4 * 2 * 32 * 32 * 4  # bytes of (B, H, T, T) in fp32
    assert 2 * scores < stored["peak"]["memory/peak_allocated_gib"] * 2**30 < 20 * scores
    assert {path.name for path in (folder / "checkpoints").iterdir()} >= {"step-00000006", "step-00000008", "best"}


def test_a_run_that_reaches_its_target_is_complete_and_says_what_that_took(config, capsys):
    config.training.target_loss = 100.0
    stored = summary(folder := run(config))
    assert (stored["status"], stored["step"], stored["steps"]) == ("completed", 4, 8)
    seconds = 4 * stored["median"]["throughput/step_ms"] / 1e3
    assert stored["target"] == {"step": 4, "tokens": 4 * 4 * 32, "seconds": pytest.approx(seconds)}
    assert "reached training.target_loss=100.0 after step 4: 512 tokens" in capsys.readouterr().out
    resume(config)
    assert "run is complete with 4 steps" in capsys.readouterr().out
    config.training.target_loss = None
    resume(config)
    assert summary(folder)["step"] == 8


def test_nothing_carries_over_from_one_run_of_a_process_to_the_next(config):
    alone = run(config, "alone")
    run(config, "between", seed=99, attention=AttentionConfig(name="tiled", dropout=0.2))
    torch.manual_seed(5)
    assert losses(run(config, "again")) == losses(alone)


def test_running_out_of_memory_is_in_the_summary(config):
    config.seq_len = 2048  # whose scores of 16 sequences take 0.5 GiB
    config.training.batch_size = 16
    config.training.cpu.memory_gib = data_gib() + 0.3
    with pytest.raises(OutOfMemory, match=r"attention=naive with seq_len=2048 .* does not fit in the memory of cpu"):
        run(config)
    stored = summary(Path("run"))
    assert (stored["status"], stored["step"]) == ("out_of_memory", 0)
    assert "attention=flash on a GPU, tiled or sdpa" in stored["message"]
    assert Path("run/loss.png").exists()  # the limit applies to training only


def test_a_model_that_does_not_fit_is_in_the_summary(config):
    config.model.n_embd = 4096
    config.training.cpu.memory_gib = data_gib() + 0.1
    with pytest.raises(OutOfMemory, match=r"model\.n_embd=4096 does not fit in the memory of cpu"):
        run(config)
    stored = summary(Path("run"))
    assert (stored["status"], stored["attention"], stored["step"], stored["steps"]) == ("out_of_memory", "naive", 0, 8)
    assert stored["config"]["model"]["n_embd"] == 4096


def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_the_last_good_checkpoint(config):
    config.optimizer.lr = 1e30
    config.schedule.warmup_steps = 0
    config.training.log_every, config.training.checkpoint_every = 100, 1
    with pytest.raises(NonFiniteError, match=r"Step 2 was not finite \(loss"):
        run(config)
    stored = summary(Path("run"))
    assert (stored["status"], stored["step"], stored["non_finite_step"]) == ("failed", 1, 2)
    assert stored["message"].startswith("Step 2 was not finite")
    assert [path.name for path in Path("run/checkpoints").glob("step-*")] == ["step-00000001"]


def test_a_first_step_that_is_not_finite_is_not_blamed_on_the_learning_rate(config):
    score = ScoreConfig(formula="s * log(a[h])", learned={"a": ["h"]})
    with pytest.raises(NonFiniteError, match=r"Step 1 was not finite .*: score\.formula, the init of") as raised:
        run(config, score=score)
    assert "optimizer.lr" not in str(raised.value)


def test_a_fault_of_the_program_is_in_the_summary_too(config, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(Trainer, "update", broken)
    with pytest.raises(ZeroDivisionError):
        run(config)
    stored = summary(Path("run"))
    assert (stored["status"], stored["message"]) == ("failed", "ZeroDivisionError('oh')")


@pytest.mark.slow
def test_documents_of_a_row_are_separated_in_training_evaluation_and_the_probe(config, capsys):
    Path("texts").mkdir()
    for n in range(40):
        (Path("texts") / f"{n}.txt").write_text(Path(os.__file__).read_text()[100 * n : 100 * n + 20 + n])
    config.data.path, config.data.val_fraction, config.training.steps = "texts", 0.3, 4
    config.score, config.parity = ScoreConfig(window=7, sinks=True), ParityConfig(every=4)
    config.attention = AttentionConfig("tiled", dropout=0.1, block_q=8, block_k=8)
    at_the_start = set()
    for documents in Documents:
        config.data.documents = documents
        folder = run(config, documents.name)
        at_the_start.add(losses(folder)[0][2])
        parity = summary(folder)["parity"]
        assert parity["worst_grad_rel_err"] <= 10 * parity["noise_grad_rel_err"]
    told = capsys.readouterr().out
    assert all(words in told for words in ("score=causal (window=7, sinks=true)", "documents=restart"))
    assert len(at_the_start) == 3


def test_a_window_as_long_as_the_sequences_gets_a_note_that_it_hides_nothing(config, capsys):
    config.training.steps, config.training.sample_tokens = 2, 0
    run(config, score=ScoreConfig(layers=[{"window": 31}, {"window": 32}]))
    told = capsys.readouterr().out
    assert "window=32 hides nothing at seq_len=32" in told
    assert "window=31 hides nothing" not in told


def assert_measured_again(folder: Path, *names: str) -> None:
    """eval.py measures and draws what training recorded at its end."""
    eval_module.main([f"run={folder}", f"probes=[{','.join(names)}]", "checkpoint=newest", "device=cpu"])
    recorded, metrics = summary(folder), dict[str, Any]()
    for name in names:
        metrics |= (again := recorded["eval"][f"{name} checkpoint=newest"])
        assert recorded["probes"][name].items() <= again.items()
    last = read_metrics(folder / "metrics.jsonl")[-1]
    assert {key: value for key, value in last.items() if key.startswith("probe/")}.items() <= metrics.items()
    tasks = [name for name in names if name != "position_loss"]
    assert [path.stem for path in (folder / "probes").glob("*.png")] == [f"recall-{name}" for name in tasks]


@pytest.mark.slow
def test_a_run_trains_on_a_task_and_measures_how_far_its_attention_reaches(config):
    config.model.positions, config.probes = Positions.rotary, ["needle"]
    with pytest.raises(UserError, match=r"probes=needle needs a vocabulary of 129 tokens, and that of data=counting"):
        run(config, "small", data=DataConfig(name="counting"))
    config.data, config.training.checkpoint_every = DataConfig(name="needle"), 4
    folder = run(config)
    assert not (folder / "tokenizer.json").exists()
    lines = read_metrics(folder / "metrics.jsonl")
    assert [line["step"] for line in lines if "probe/needle" in line] == [0, 4, 8]
    found = summary(folder)["probes"]
    assert found.keys() == {"needle"}
    assert found["needle"]["lengths"] == [32, 64, 128, 256]
    assert [len(row) for row in found["needle"]["accuracy"]] == [9] * 4
    assert_measured_again(folder, "needle")
    shutil.rmtree(folder / "checkpoints" / "step-00000008")
    (folder / "summary.json").unlink()
    before = losses(folder)
    resume(config)
    assert losses(folder) == before
    with pytest.raises(UserError, match="run=run was trained on data=needle, a task without text"):
        load_trained(folder, ModelChoice())


@pytest.mark.slow
def test_the_loss_by_position_of_a_text_is_measured_beyond_the_trained_length(config):
    config.model.positions, config.probes = Positions.none, ["position_loss", "induction"]
    found = summary(run(config))["probes"]
    assert found["position_loss"]["trained"] == 32
    assert found["position_loss"]["positions"][0] == 0
    assert found["position_loss"]["positions"][-1] > 4 * 32
    assert_measured_again(Path("run"), "position_loss", "induction")
    with pytest.raises(ConfigError, match="probes=position_loss measures a text, and data=mqar is none"):
        run(config, "task", data=DataConfig(name="mqar"))


@pytest.mark.slow
def test_the_verdict_on_runs_catches_a_wrong_attention_and_accuses_no_right_one(config, monkeypatch):
    wrong = WRONG["mask_ignores_layer"]
    for cls in CLASSES:
        monkeypatch.setitem(IMPLEMENTATIONS, cls.name, cls)
    tiled = AttentionConfig("tiled", block_q=16, block_k=16, dropout=wrong.dropout)
    training = replace(config.training, steps=10, log_every=1, eval_every=5, sample_tokens=0, checkpoint_every=0)
    config.training, config.parity = training, ParityConfig(every=5)
    for attention in (AttentionConfig(dropout=wrong.dropout), tiled, wrong):
        for seed in (1, 2):
            run(config, f"{attention.name}-{seed}", attention=attention, seed=seed)
    verdicts = {found.label.split()[0]: found for found in judge(cells_of(find_runs([Path()]).runs))}
    assert verdicts["tiled"].outcome is Outcome.holds, verdicts["tiled"]
    assert verdicts["tiled"].gaps == ()
    assert verdicts[wrong.name].outcome is Outcome.broken
    probe = verdicts[wrong.name].probe
    assert probe is not None
    assert probe.ratio > 100


def test_documents_need_a_text_that_has_several(config):
    config.data.documents = Documents.mask
    with pytest.raises(UserError, match=r"data.documents=mask has no effect on data=text, .* is one document"):
        run(config)


def test_a_step_that_changed_with_the_ranks_alone_is_refused():
    training = TrainingConfig(batch_size=4, precision=Precision.fp32)
    gpt = built(GPTConfig(n_layers=1, n_heads=1, n_embd=8), 32, 256)
    trainer = build_trainer(Config(training=training), gpt, torch.device("cpu"), World(size=4))
    trained = {"tokens_per_step": 256, "config": {"training": {"batch_size": 4}}}
    offered = r"set training\.batch_tokens=256 with .* to keep it, or training\.batch_tokens=512 to continue"
    with pytest.raises(CheckpointError, match=offered):
        check_step_size(trainer, trained, Path("step-00000002"))
    check_step_size(trainer, trained | {"tokens_per_step": 512}, Path("same"))
