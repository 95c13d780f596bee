"""The referee: audits against planted cheats, and judgements in a repository whose runs are made of numbers."""

import json
import runpy
import shutil
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from filelock import FileLock

import compare
from data.tokenizers import bytes_tokenizer
from data.untrusted import read_json
from model.options import GPTConfig
from recipe.compare import referee
from recipe.compare.audits import FIXED, FUTURE, OF_TRAINING, InvalidError, check_paths, faults, result
from recipe.compare.referee import Judge, RefereeError
from recipe.compare.watched import READS
from recipe.distributed.world import World
from recipe.files import flatten, plain
from recipe.infer.evaluation.audited import future
from recipe.infer.evaluation.scorer import LanguageModel
from recipe.infer.evaluation.text import Text
from recipe.run.build import build_model
from recipe.run.config import Config
from tests.parts import built
from tests.programs import ROOT, rewrite, started

HOME, PYTHON = Path("outputs/referee/toy"), referee.python
BUDGET = {"tokens": 1000, "seconds": 60, "flops": 1e6, "parameters": 500}
SUMMARY: dict[str, Any] = {
    "status": "completed",
    "config": {"seed": 1, "seq_len": 32, "data": {"name": "text", "val_fraction": 0.1}, "training": {"eval_every": 0}},
    "device": {"type": "cpu", "name": "EPYC"},
    "versions": {"torch": "2.9"},
    "tokens": 1000,
    "flops_per_token": 1000.0,
    "steps": 10,
    "val_loss": None,
}
MEASURED: dict[str, Any] = {
    "bits_per_byte": 2.0,
    "tokens": 300,
    "bytes": 300,
    "future": 0.0,
    "parameters": 500,
    "weights": "a",
    "tokenizer": "t",
    "data": "d",
    "threads": 2,
    "step": 10,
    "checkpoints": 1,
}


def cheated(summary: dict[str, Any] | None = None, measured: dict[str, Any] | None = None, seconds: float = 9) -> str:
    """The faults of a run beside an honest one."""
    honest = result(SUMMARY, MEASURED, 10)
    return " ".join(faults(result(SUMMARY | (summary or {}), MEASURED | (measured or {}), seconds), honest, BUDGET))


def test_an_honest_run_has_no_fault_and_one_that_takes_longer_has():
    assert cheated(measured={"bits_per_byte": 1.9, "weights": "b"}) == ""
    assert "61 seconds, and the track allows 60" in cheated(seconds=61)


def config(**changed: Any) -> dict[str, Any]:
    return {"config": SUMMARY["config"] | changed}


@pytest.mark.parametrize(
    ("summary", "measured", "reason"),
    [
        (config(data={"name": "text", "val_fraction": 0.0001}), {}, "data.val_fraction=0.0001 instead of 0.1"),
        ({}, {"data": "with validation documents in training"}, "changes the text"),
        ({}, {"tokens": 200}, "changes the tokens that are evaluated"),
        ({}, {"tokenizer": "u"}, "changes the tokenizer"),
        ({}, {"bytes": 400}, "changes the count of bytes: 400 instead of 300"),
        (config(seed=7), {}, "changes the seed list: 7 instead of 1"),
        (config(training={"eval_every": 5}), {}, "training.eval_every=5 instead of 0"),
        ({}, {"step": 8}, "not the best of several"),
        ({}, {"checkpoints": 3}, "not the best of several"),
        ({"tokens": 1001}, {}, "1,001 tokens, and the track allows 1,000"),
        ({"flops_per_token": 2000.0}, {}, "2e+06 flops"),
        ({}, {"parameters": 501}, "501 parameters"),
        ({}, {"future": 0.5}, "sees the future"),
        ({}, {"future": float("nan")}, "sees the future"),
        ({"device": {"type": "cpu", "name": "Xeon"}}, {}, "another device"),
        ({}, {"threads": 4}, "another device"),
        ({"val_loss": 0.1}, {}, "val_loss) that the judge did not write"),
        ({"eval": {"val": {"bits_per_byte": 0.1}}}, {}, "eval) that the judge did not write"),
    ],
)
def test_a_planted_cheat_is_named(summary, measured, reason):
    assert reason in cheated(summary, measured)


def test_the_settings_that_no_edit_may_change_exist():
    settings = plain(Config())
    assert settings.keys() >= set(FIXED)
    assert flatten(settings).keys() >= {f"training.{name}" for name in OF_TRAINING}


@pytest.mark.parametrize("path", ["eval.py", "recipe/infer/evaluation/text.py", "data/prepare.py", "models/gpt.py"])
def test_an_edit_of_the_evaluation_or_the_text_is_not_valid(path):
    check_paths(["model/gpt.py", "model"], ["model"])
    with pytest.raises(InvalidError, match=f"changes {path}"):
        check_paths(["model/gpt.py", path], ["model"])


@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize("place", ["edited", "fixed"])
def test_code_that_reads_the_validation_text_ends_the_run(tmp_path, place, in_thread):
    """A cheat in a folder that the track lets an edit change, and the same lines in one that it does not."""
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "val.bin").write_text("text")
    (tmp_path / place).mkdir()
    (tmp_path / place / "reads.py").write_text("def read():\n    open('tokens/val.bin').read()\n")
    run = "t = threading.Thread(target=reads.read); t.start(); t.join()" if in_thread else "reads.read()"
    (tmp_path / "train.py").write_text(f"import sys, threading\nfrom {place} import reads\n{run}\nsys.exit(7)\n")
    lists = [json.dumps(["edited"]), json.dumps([f"{tmp_path}/*/val.*"])]
    done = started("-m", "recipe.compare.watched", *lists, "seed=1", folder=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == (READS if place == "edited" else 7), done.stderr
    assert ("edited/reads.py reads the validation text" in done.stderr) == (place == "edited")


@pytest.mark.parametrize("leak", [0.0, 0.01])
def test_a_model_that_sees_the_future_is_noticed(monkeypatch, leak):
    tokenizer = bytes_tokenizer()
    network = built(GPTConfig(n_layers=1, n_heads=2, n_embd=16), vocab_size=tokenizer.n_vocab).eval()
    hidden = network.hidden

    def cheating(*arguments, **options):
        found: torch.Tensor = hidden(*arguments, **options)
        return found + leak * found.roll(-1, dims=1)

    monkeypatch.setattr(network, "hidden", cheating)
    trained: Any = SimpleNamespace(
        model=network, tokenizer=tokenizer, config=SimpleNamespace(seq_len=network.seq_len), autocast=nullcontext
    )
    assert (future(LanguageModel(trained), Text(np.arange(64), np.zeros(1, int), 64)) > FUTURE) == (leak > 0)


def test_init_seed_draws_the_initial_weights_alone():
    model = GPTConfig(n_layers=1, n_heads=2, n_embd=16)

    def weights(**options):
        built = build_model(Config(model=model, seq_len=8, **options), 16, torch.device("cpu"), torch.float32, World())
        return built.get_parameter("h.0.mlp.c_fc.weight").detach()

    assert torch.equal(weights(seed=3), weights(seed=3, init_seed=None))
    assert torch.equal(weights(seed=3, init_seed=5), weights(seed=5))
    assert not torch.equal(weights(seed=3, init_seed=5), weights(seed=3))


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.strip()


def commit(**files: str) -> str:
    """Commit files of model/ or of others (data__x: data/x). Returns the hash."""
    for name, content in files.items():
        path = Path(*name.split("__")) if "__" in name else Path("model", name)
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    git("add", "-A")
    git("commit", "-qm", "an edit", "--allow-empty")
    return git("rev-parse", "HEAD")


def train_by_number(tree: Path, folder: Path, module: str, *arguments: str) -> int:
    """In place of training: the loss follows from the worktree's model/gain, the seed and the salt."""
    options = dict(argument.partition("=")[::2] for argument in arguments[2:])
    if module == "recipe.compare.watched":
        seed, start = int(options["seed"]), options.get("init_seed", "")
        gain = float((tree / "model" / "gain").read_text())
        shared, alone = (np.random.default_rng([seed, n]).normal() for n in (0, crc32(f"{start} {gain}".encode())))
        weights = f"{gain} {seed} {start}"
        found = MEASURED | {"bits_per_byte": 2 - gain + 0.1 * shared + 0.002 * alone, "weights": weights}
        diverged = gain < -1
        summary = SUMMARY | config(seed=seed) | {"status": "failed" if diverged else "completed"}
        summary |= {"non_finite_step": 3} if diverged else {}
        (folder / "summary.json").write_text(json.dumps(summary))
        (folder / "measured").write_text(json.dumps(found))
        return 0
    (folder / "console.log").write_text(f"a line of torch's\n{(folder / 'measured').read_text()}\n")
    return 0


@pytest.fixture
def track(here, monkeypatch):
    """A repository with a track, whose first commit is the baseline."""
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "Ada")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "ada@example.org")
    monkeypatch.setattr(referee, "python", train_by_number)
    git("init", "-q")
    first = commit(gain="0", data__text="0")
    Path(".gitignore").write_text("/outputs/\n")
    Path("records", "toy").mkdir(parents=True)
    rules = {"baseline": first, "overrides": ["model=mini"], "editable": ["model", "records", ".gitignore"]}
    Path("records", "toy", "track.yaml").write_text(json.dumps(rules | {"budget": BUDGET, "salts": True}))
    return commit(gain="0")


def judged(name: str, *more: str) -> int:
    return compare.main(["referee=toy", f"commit={name}", *more])


def test_a_gain_is_kept_and_what_changes_nothing_is_dropped(track, capsys):
    assert judged(commit(gain="0.02")) == 0
    out = capsys.readouterr().out
    assert "calibration 8 of 8" in out
    assert " of 78.4\n" in out  # 1 / (0.05 * (1/4 + 50 / (101 * 100)))
    better = git("rev-parse", "HEAD")
    assert judged(commit(comment="why")) == 1
    assert "dropped, changed nothing" in capsys.readouterr().out
    assert judged(commit(gain="0.01")) == 1  # is worse than the best now
    assert compare.main(["referee=toy"]) == 0
    title, *_, baseline, kept = capsys.readouterr().out.strip().splitlines()[-6:]
    assert title == "3 edits, 1 kept"
    assert all(part in kept for part in (better[:12], "-0.0", "Ada"))
    assert baseline.startswith("| 0 |")
    page = (HOME / "index.html").read_text()
    assert all(part in page for part in ("dropped, no gain that", better[:12]))
    assert read_json(HOME / "referee.json")["verdict"] == "dropped"


def test_the_ledgers_of_records_belong_to_their_tracks(monkeypatch):
    monkeypatch.chdir(ROOT)
    judges = {file.parent: Judge("mini", str(file.parent)) for file in Path("records", "mini").rglob("ledger.json")}
    null = judges.pop(Path("records", "mini", "null")).ledger
    (mini,) = (judge.ledger for judge in judges.values())
    assert (len(null.edits), len(null.kept)) == (100, 0)
    assert [edit["commit"] == mini.edits[0]["commit"] for edit in mini.kept] == [True]


def test_a_night_of_salts_keeps_nothing(track):
    assert [judged(track, f"salt={salt}") for salt in range(2, 5)] == [1] * 3


def test_a_run_that_diverges_is_dropped_and_not_repeated(track, refused, capsys, monkeypatch):
    edit = commit(gain="-5")
    assert judged(edit) == 1
    assert "dropped, diverged with seed 1" in capsys.readouterr().out
    monkeypatch.setattr(referee, "python", None)
    assert judged(edit) == 1  # from the ledger
    assert "the same code was judged before" in refused(commit(gain="-5"))


@pytest.fixture
def refused(capsys):
    """refused(commit): what is said of one that is no valid attempt."""

    def said(name):
        assert judged(name) == 2
        return capsys.readouterr().err

    return said


def test_what_is_no_valid_attempt_has_status_two(track, refused, capsys):
    assert "changes data/text" in refused(commit(data__text="1"))
    assert "HEAD~9" in refused("HEAD~9")
    git("reset", "-q", "--hard", track)
    git("mv", "data/text", "model/text")
    assert "changes data/text" in refused(commit())
    git("reset", "-q", "--hard", track)
    Path("model", "gain").write_text("0.5")
    assert "changes that no commit holds" in refused("HEAD")
    assert judged(track, "salt=1") in (0, 1)  # a commit that is named leaves them alone
    assert Path("model", "gain").read_text() == "0.5"
    assert git("status", "--porcelain") == "M model/gain"
    assert compare.main(["referee=other"]) == 2
    assert "is no track" in capsys.readouterr().err


def test_a_cheat_within_a_run_has_status_two_and_stays_so(track, refused, monkeypatch):
    def cheats(tree, folder, module, *arguments):
        train_by_number(tree, folder, module, *arguments)
        (folder / "console.log").write_text("error: model/x.py reads the validation text val.bin")
        return READS if (tree / "model" / "x.py").exists() else 0

    edit = commit(**{"x.py": "", "gain": "0.3"})
    calibrated = Judge("toy")
    with calibrated:
        calibrated.calibration(calibrated.best, 1)
    monkeypatch.setattr(referee, "python", cheats)
    for _ in range(2):
        assert "model/x.py reads the validation text" in refused(edit)


def test_a_judge_that_was_killed_goes_on(track, monkeypatch):
    edit, started = commit(gain="0.01"), list[Path]()

    def killed(tree, folder, module, *arguments):
        started.append(folder)
        if len(started) == kill_at:
            raise KeyboardInterrupt
        return train_by_number(tree, folder, module, *arguments)

    monkeypatch.setattr(referee, "python", killed)
    kill_at = 0
    assert judged(edit) == 0
    expected, runs = read_json(HOME / "ledger.json"), len(started)
    shutil.rmtree(HOME)
    started.clear()
    kill_at = runs - 3
    with pytest.raises(KeyboardInterrupt):
        judged(edit)
    assert judged(edit) == 0
    shutil.copy(HOME / "ledger.json", "records/toy")
    shutil.rmtree(HOME / "runs")
    assert judged(edit) == 0  # without its runs, as in a clone that has the ledger
    assert len(started) <= runs + 2  # the run that was killed is repeated
    continued = read_json(HOME / "ledger.json")
    for ledger in (expected, continued):
        del ledger["edits"][0]["when"], ledger["edits"][0]["seconds"]
    assert continued == expected


def test_the_run_of_a_judge_that_was_killed_ends_before_it_is_repeated(track, monkeypatch):
    judge = Judge("toy")
    folder = judge.home / "runs" / f"{track[:12]}-0" / "1"
    folder.mkdir(parents=True)
    held, ended = threading.Event(), threading.Event()

    def runs():
        with FileLock(folder / ".lock"):
            held.set()
            time.sleep(0.2)
            ended.set()

    def train(*arguments):
        assert ended.is_set()
        return train_by_number(*arguments)

    monkeypatch.setattr(referee, "python", train)
    left = threading.Thread(target=runs)
    left.start()
    assert held.wait(5)
    assert judge.run(track, 0, 1)["tokens"] == 1000
    left.join()


def test_a_script_runs_a_night_over_patches(track, capsys, monkeypatch):
    for name, gain in (("better", "0.05"), ("worse", "-0.05")):
        commit(gain=gain)
        Path("outputs").mkdir(exist_ok=True)  # which git ignores
        Path("outputs", f"{name}.patch").write_text(git("diff", track, "HEAD", "--", "model") + "\n")
        git("reset", "-q", "--hard", track)
    script = ROOT / "records" / "night.py"
    assert script.read_text().count("\n") <= 40
    edits = ["outputs/better.patch", "outputs/worse.patch", "salt=3"]
    monkeypatch.setattr(sys, "argv", ["night.py", "toy", *edits])
    runpy.run_path(str(script), run_name="__main__")
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith(tuple(edits))]
    # The second was made from the baseline, and does not apply to the first.
    assert told == [f"{edits[0]}: kept", f"{edits[1]}: not valid", "salt=3: dropped"]
    assert git("show", "refs/referee/toy/better:model/gain") == "0.05"
    assert Path("model", "gain").read_text() == "0"


def test_two_judges_of_a_track_do_not_mix(track):
    with Judge("toy"), pytest.raises(RefereeError, match="another judge of toy is at work"), Judge("toy"):
        pass
    late = Judge("toy")
    judged(track, "salt=1")
    with late:  # sees what was judged after it was made
        assert len(late.ledger.edits) == 1


def test_rules_that_change_during_a_night_are_refused(track):
    judged(track, "salt=1")
    rewrite(Path("records/toy/track.yaml"), "1000", "2000")
    with pytest.raises(RefereeError, match="has changed since its first edit"):
        Judge("toy")


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.timeout(600)
def test_runs_are_trained_and_measured(track, capsys, monkeypatch):
    """A comment in the model: both runs have equal bits."""
    monkeypatch.setattr(referee, "python", PYTHON)
    shutil.copy(ROOT / "train.py", "train.py")
    Path("text.txt").write_text("".join(f"{n} and {n + 1} are {2 * n + 1}.\n" for n in range(300)))
    overrides = ["model=mini", "model.n_layers=1", "model.n_embd=16", "model.n_heads=2", "seq_len=16", "data=text"]
    overrides += [f"data.path={Path('text.txt').absolute()}", "training.steps=2", "training.batch_size=2", "device=cpu"]
    rules = {"baseline": commit(), "overrides": overrides, "editable": ["model"], "budget": {"tokens": 64}}
    Path("records", "toy", "track.yaml").write_text(json.dumps(rules | {"calibration": 0}))
    git("checkout", "-q", "--detach")
    Path("model", "comment").write_text("why")
    git("add", "model")
    git("commit", "-qm", "a comment")
    assert judged(git("rev-parse", "HEAD")) == 1
    assert not list(HOME.glob("runs/*/*/checkpoints"))
    out = capsys.readouterr().out
    assert out.startswith("pair 1: +0.00000\n")
    assert "changed nothing" in out
    found = read_json(next(HOME.glob("runs/*/1/judged.json")))
    assert (found["tokens"], found["step"], found["checkpoints"], found["recorded"]) == (64, 2, 1, [])
    assert 7 < found["bits_per_byte"] < 9  # 257 tokens, none learned yet
    assert found["future"] < FUTURE
