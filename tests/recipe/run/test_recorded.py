"""A run folder from a stranger is data: nothing in it runs, and a refusal names the line to remove."""

import time
from pathlib import Path

import pytest
import torch
import yaml

from recipe.compare.runs import find_runs
from recipe.files import plain
from recipe.run import compose
from recipe.run.config import Config, ConfigError
from recipe.run.recorded import read_config
from recipe.run.resume import recorded_overrides, resumed
from recipe.run.run_folder import write_recorded
from recipe.training.checkpoint import save_checkpoint
from tests.data.test_untrusted import ALIASES
from tests.programs import contents

RUNS = "ran.txt"  # the file that a stranger's code would write


@pytest.fixture
def run(here):
    """A run folder with a valid checkpoint, below the working directory."""
    config = Config(device="cpu")
    write_recorded(here / "run", plain(config), ["seed=1337"])
    state = {"model": {"x": torch.zeros(1)}, "training": {}}
    save_checkpoint(here / "run" / "checkpoints", state, 1, keep_last=1, metadata={"config": plain(config)})
    (here / "hubconf.py").write_text(f"open({RUNS!r}, 'w')\ndef go(): pass\n")
    return Path("run")


def record(run: Path, *overrides: str) -> None:
    (run / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(list(overrides)))


HOSTILE = [
    "+hydra.callbacks.x={_target_:torch.hub.load,repo_or_dir:.,model:go,source:local}",
    "+hydra.callbacks.x._target_=torch.load",
    "hydra.launcher._target_=numpy.load",
    "hydra/launcher=slurm",
    "hydra.searchpath=[file:///tmp]",
    "hydra.job.chdir=true",
    "hydra.run.dir=elsewhere",
    "+experiment@hydra=parity",
    "attention=../hydra/launcher/gpus",
    "+experiment=/tmp/evil",
    "score.layers=[{_target_:os.getpid}]",
    "+attention._target_=os.getpid",
    "tracking.group=${oc.env:HOME}",
    "tracking.group='a ${oc.env:HOME}'",
    "seed=1,2",
    "seed=range(1,1000000000000)",
    "~attention",
    "not an override",
    "seed=" + "[" * 5000,
    "seed=99999999999999999999999",
]


@pytest.mark.parametrize("line", HOSTILE, ids=lambda line: line[:60])
def test_a_recorded_override_that_is_no_plain_option_is_refused_and_does_nothing(run, line):
    record(run, "seed=1337", line)
    begin = time.process_time()
    with pytest.raises(ConfigError, match=r"overrides\.yaml holds .*; restore the file\.$") as raised:
        recorded_overrides(run)
    assert time.process_time() - begin < 5
    assert "\n" not in str(raised.value)


def test_resuming_a_strangers_run_is_refused_before_hydra_reads_its_overrides(run, refused):
    record(run, "seed=1337", HOSTILE[0])
    before = contents(run)
    (sentence,) = refused("resume=run", "device=cpu").splitlines()
    assert sentence.startswith("error: run/.hydra/overrides.yaml holds +hydra.callbacks.x={_target_:torch.hub.load")
    assert not Path(RUNS).exists()
    assert contents(run) == before


@pytest.mark.parametrize("content", [ALIASES, "seed: 1", "- [seed=1]", "- 3", "", "a: b: c"], ids=lambda c: c[:9])
def test_recorded_overrides_that_are_no_list_of_lines_are_refused(run, content):
    (run / ".hydra" / "overrides.yaml").write_text(content)
    with pytest.raises(ConfigError, match=r"overrides\.yaml .*, so the run cannot be resumed"):
        recorded_overrides(run)


def test_every_option_and_every_file_of_conf_may_be_recorded(run):
    lines = [
        "experiment=context_length", "+attention=tiled", "attention.block_q=32", "optimizer.betas=[0.8,0.9]",
        "optimizer.lr=1e-3", "data.path='my notes.txt'", 'tracking.group="a=b, c"', "experiment=null",
        "score.layers=[{window:8},{sinks:true}]", "resume=auto", "init_from=null",
    ]  # fmt: skip
    record(run, *lines)
    assert [override.input_line for override in recorded_overrides(run)] == lines


@pytest.mark.parametrize("value", ["${oc.env:HOME}", [{"window": "${oc.env:SHLVL}"}, {}], "${" * 99], ids=str)
def test_a_reference_in_a_recorded_configuration_is_refused(run, value):
    config = plain(Config())
    config["score"]["layers"] = value
    (run / ".hydra" / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigError, match=r"config\.yaml holds references .*, and train\.py records values"):
        read_config(run)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("model: {n_heads: 0}", "describes no model: model.n_heads=0"),
        ("seq_len: 0", "describes no model: seq_len=0"),
        ("seed: [1]", "is not a configuration of this version"),
        ("unknown: 1", "is not a configuration of this version"),
        ("- 1", "is not a mapping"),
        (ALIASES, "has an alias"),
    ],
    ids=lambda value: value[:20],
)
def test_a_configuration_that_describes_no_run_is_refused(run, change, sentence):
    (run / ".hydra" / "config.yaml").write_text(change)
    begin = time.perf_counter()
    with pytest.raises(ConfigError, match=rf"config\.yaml .*{sentence}|config\.yaml {sentence}"):
        read_config(run)
    assert time.perf_counter() - begin < 10


def test_compare_notes_what_it_does_not_read(run):
    (run / ".hydra" / "config.yaml").write_text(ALIASES)
    (run / "summary.json").write_text("[" * 10_000)
    (run / "metrics.jsonl").write_text('{"step": 1e999}\n{"step": 1, "train/loss": 1.5}\n[3]\n')
    begin = time.perf_counter()
    (found,) = find_runs([run]).runs
    assert time.perf_counter() - begin < 5
    assert found.series("train/loss").last() == 1.5
    notes = " ".join(found.notes)
    assert "config.yaml cannot be read (it has an alias)" in notes
    assert "summary.json cannot be read (it is not JSON)" in notes
    assert "2 of the lines of metrics.jsonl cannot be read, the first is line 1" in notes


def test_a_configuration_is_read_as_it_was_recorded(tmp_path):
    overrides = ["experiment=context_length", "optimizer.betas=[0.8,0.9]", "score.layers=[{window:8},{}]"]
    config = compose.to_config(
        compose.composed([*overrides, "seq_len=64", "tracking.group='déjà: vu'", "optimizer.lr=1e-5"])
    )
    write_recorded(tmp_path, plain(config), [*overrides, "seq_len='${min:64,${training.steps}}'"])
    assert plain(read_config(tmp_path)) == plain(config)
    assert "${" not in (tmp_path / ".hydra" / "config.yaml").read_text()
    assert yaml.safe_load((tmp_path / ".hydra" / "overrides.yaml").read_text()) == overrides


def test_a_removed_option_is_ignored_at_its_default_and_refused_else(run):
    config = plain(Config())
    config["training"] |= {"mlp_in_fp8": False}
    write_recorded(run, config, ["seed=1337", "training.mlp_in_fp8=false"])
    assert [line for line in resumed(["resume=run"]) if "mlp_in_fp8" in line] == []
    assert plain(read_config(run)) == plain(Config())
    (found,) = find_runs([run]).runs
    assert "training.mlp_in_fp8" not in found.settings
    record(run, "seed=1337", "training.mlp_in_fp8=true")
    with pytest.raises(ConfigError, match=r"training\.mlp_in_fp8 is no longer an option; leave it out"):
        resumed(["resume=run"])
