"""Measure a trained model: tasks of lm-eval or of a file, the loss on any text, and probes of its attention.

python eval.py run=outputs/2026-11-21/10-00-00-flash tasks=hellaswag,lambada_openai
python eval.py run=outputs/2026-11-21/10-00-00-flash tasks=questions.jsonl
python eval.py run=outputs/2026-11-21/10-00-00-flash data=text data.path=book.txt seq_len=4096
python eval.py run=outputs/2026-11-21/10-00-00-flash probes=[mqar,position_loss]

Without tasks, probes and data: the loss on the whole validation split of the run. Results are printed and, for a run
that is over, recorded under "eval" in its summary.json and in W&B.

run         a run folder, or a folder of transformers, such as sample.py exports
tasks       names of lm-eval's tasks (pip install -e '.[eval]') and .jsonl files, with commas. The lines of a file are
            {"question": ..., "choices": [...], "answer": 0} or {"text": ...}
shots       examples before each question of lm-eval's tasks; null: as many as a task has by itself
limit       questions or texts of each task; null: all
probes      what train.py's probes= measures, up to 8 times the trained length: position_loss, mqar, needle, ...
data        the corpus to take a text from: data=text data.path=<file or folder>, or another with its data.* overrides;
            data.max_tokens limits it
seq_len     the longest context, in tokens; null: the run's, and 8 times that for probes. Learned positions allow no
            longer one
batch       sequences of one forward pass
checkpoint  best (by validation loss, if it was measured) or newest
weights     trained, or ema: their moving average, from a run with training.ema
attention   an implementation other than the run's, for a device that does not support that one
attention.precision  of attention's products: inputs, or fp8 with attention=flash
device      auto, cpu, cuda, cuda:1
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe.run import process

if __name__ == "__main__":
    process.begin()

import numpy as np

from data.corpora import CHAT, CORPORA
from data.mistakes import check_data
from data.options import DataConfig, Documents
from data.tasks import TASKS
from recipe.distributed.world import World
from recipe.infer.evaluation.harness import run_tasks
from recipe.infer.evaluation.models import LanguageModel
from recipe.infer.evaluation.probes import (
    Measured,
    as_table,
    check_length,
    limits,
    probe_names,
    run_probes,
)
from recipe.infer.evaluation.results import Results, record, show
from recipe.infer.evaluation.scorer import Scorer
from recipe.infer.evaluation.tasks import run_file
from recipe.infer.evaluation.text import measure, tokenised, validation_text
from recipe.infer.huggingface.starting import is_folder
from recipe.infer.trained import Loaded, ModelChoice, Trained, load_any, load_trained
from recipe.run.arguments import parse as key_values
from recipe.run.compose import compose_right, expand_home, to_config
from recipe.run.config import ConfigError
from recipe.run.launch import refuse
from recipe.run.wording import one_sentence
from recipe.training.device import resolve_device
from recipe.training.memory import oom_guard
from recipe.training.recall import PositionLoss

# The options of data=... that choose a text. The others say how to train on it.
OF_TEXT = ("data", "data.path", "data.text_field", "data.max_tokens")
# The arguments that change a result; a result's name includes each of these that was given.
SETTINGS = ("shots", "limit", "seq_len", "checkpoint", "weights", "attention", "attention_precision")


@dataclass
class EvaluateConfig(ModelChoice):
    """The arguments; the module's docstring describes them. The arguments of data have a separate schema."""

    run: str = ""
    tasks: str | None = None
    shots: int | None = None
    limit: int | None = None
    probes: str | None = None
    seq_len: int | None = None
    batch: int = 16


def parse(arguments: list[str]) -> tuple[EvaluateConfig, DataConfig | None]:
    """The typed arguments, and the corpus if one is given. Raises UserError."""
    of_data = [a for a in map(expand_home, arguments) if a.partition("=")[0].split(".")[0] == "data"]
    others = [a for a in arguments if a.partition("=")[0].split(".")[0] != "data"]
    config = key_values(others, EvaluateConfig, "eval.py", verbatim=("run", "tasks", "probes"))
    if not config.run:
        raise ConfigError("run=<folder> is missing; name a run folder, or one in Hugging Face's format.")
    for name in ("batch", "limit", "seq_len"):
        if (value := getattr(config, name)) is not None and value < 1:
            raise ConfigError(f"{name}={value} must be at least 1.")
    if config.shots is not None and config.shots < 0:
        raise ConfigError(f"shots={config.shots} must be at least 0.")
    names = task_names(config)
    files = [Path(name).stem for name in names if name.endswith(".jsonl")]
    if config.tasks is not None and not names:
        raise ConfigError(f"tasks={config.tasks} names no task; name one, or leave it out to measure a text.")
    if stray := [name for name in names if not name.endswith(".jsonl") and Path(name).expanduser().is_file()]:
        raise ConfigError(f"tasks={stray[0]} is a file that does not end in .jsonl; convert or rename it.")
    if config.limit is not None and not names:
        raise ConfigError(f"limit={config.limit} has no effect without tasks; leave it out, or use data.max_tokens.")
    if config.shots is not None and len(files) == len(names):
        raise ConfigError(f"shots={config.shots} affects tasks of lm-eval only; leave it out.")
    if len(set(files)) < len(files):
        raise ConfigError(f"tasks={config.tasks} has two files of one name; rename one, or measure one at a time.")
    if config.probes is not None:
        check_probes(config, of_data)
    return config, corpus_config(of_data) if of_data else None


def check_probes(config: EvaluateConfig, of_data: list[str]) -> None:
    """Raise ConfigError for arguments that do not fit together with probes."""
    names = probe_names(config.probes or "")
    if config.tasks is not None:
        raise ConfigError(f"tasks={config.tasks} and probes={config.probes} are two measurements; make one at a time.")
    if config.batch != EvaluateConfig.batch:
        raise ConfigError(f"batch={config.batch} has no effect on probes; leave it out.")
    if of_data and PositionLoss.name not in names:
        raise ConfigError(f"{of_data[0]} has no effect on probes={config.probes}, which measure no text; leave it out.")


def task_names(config: EvaluateConfig) -> list[str]:
    """The tasks that are asked for."""
    return [name.strip() for name in (config.tasks or "").split(",") if name.strip()]


def corpus_config(overrides: list[str]) -> DataConfig:
    """The corpus that overrides of `data` choose. Raises UserError."""
    if not any(override.startswith("data=") for override in overrides):
        raise ConfigError(f"{overrides[0]} does not say which text to measure; name it with data=, such as data=text.")
    for override in overrides:
        key = override.partition("=")[0]
        if key not in OF_TEXT and not key.startswith("data.hub"):
            raise ConfigError(
                f"{override} has no effect here: the whole text is read, with the run's tokenizer; leave it out."
            )
    composition = compose_right(overrides)
    refuse(composition.wrong)
    assert composition.cfg is not None
    data = to_config(composition.cfg).data
    if data.name == CHAT:
        raise ConfigError(
            "data=chat has no text to measure, and train.py measures the loss of its answers (val/loss); name a text."
        )
    check_data(data)
    if data.name in TASKS:
        raise ConfigError(
            f"data={data.name} is a task, whose accuracy train.py measures (probes=[{data.name}]); name a text."
        )
    CORPORA[data.name](data)  # finds the files before a model is loaded, and reads none
    return data


def open_model(config: EvaluateConfig, run: Path, data: DataConfig | None) -> tuple[LanguageModel, Trained | None]:
    """The model in a folder and, if it is a run folder, the run's description of it. Raises UserError."""
    trained = load_trained(run, config, config.seq_len, documents=data is not None or config.tasks is None)
    return LanguageModel(trained, config.seq_len), None if is_folder(run) else trained


def results(
    config: EvaluateConfig, data: DataConfig | None, model: LanguageModel, trained: Trained | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each measurement, by its name."""
    scorer, names = Scorer(model, config.batch), task_names(config)
    for name in names:
        if name.endswith(".jsonl"):
            yield Path(name).stem, run_file(Path(name).expanduser(), scorer, config.limit)
    if of_harness := [name for name in names if not name.endswith(".jsonl")]:
        yield from run_tasks(of_harness, scorer, config.shots, config.limit).items()
    if scorer.cut:
        print(
            f"{scorer.cut:,} of the texts are longer than the model's {model.max_length} tokens and lost their "
            "beginning.",
            file=sys.stderr,
        )
    if data is not None:
        text, name = tokenised(CORPORA[data.name](data).rows(), model, data.max_tokens), data.path or data.name
    elif names:
        return
    elif trained is None:
        raise ConfigError("A model in Hugging Face's format has no data; give tasks=... or data=...")
    else:
        text, name = validation_text(trained), "val"
    separate = trained is not None and trained.config.data.documents is not Documents.ignore
    yield name, measure(model, text, model.max_length, config.batch, separate) | {"seq_len": model.max_length}


def settings(config: EvaluateConfig, data: DataConfig | None) -> list[str]:
    """The arguments that differ from their defaults and change a result."""
    values = {name.replace("attention_", "attention."): getattr(config, name) for name in SETTINGS}
    usual = [getattr(EvaluateConfig, name) for name in SETTINGS]
    given = {name: value for (name, value), default in zip(values.items(), usual, strict=True) if value != default}
    if data is not None and data.max_tokens is not None:
        given["data.max_tokens"] = data.max_tokens
    return [f"{name}={getattr(value, 'value', value)}" for name, value in given.items()]


def main(arguments: list[str]) -> None:
    """Run the command line. Raises UserError or AttentionError."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return
    config, data = parse(arguments)
    if (size := World.from_environment().size) > 1:
        raise ConfigError(f"eval.py is one process, and {size} ranks were started; start it without torchrun.")
    run = Path(config.run).expanduser()
    with oom_guard(too_large(config)):
        if config.probes is not None:
            measure_probes(config, run, data)
            return
        model, trained = open_model(config, run, data)
        measured: Results = {}
        given = settings(config, data)
        try:
            for task, metrics in results(config, data, model, trained):
                name = " ".join([task, *given])
                show(name, metrics)
                measured[name] = metrics
        finally:  # if a task fails, the results of the tasks before it are still written
            if trained is not None and measured:
                origin = {"checkpoint": trained.checkpoint.name}
                record(run, trained, {name: metrics | origin for name, metrics in measured.items()})


def measure_probes(config: EvaluateConfig, run: Path, data: DataConfig | None) -> None:
    """Print what probes measure, draw it, and record it. Raises UserError."""
    names, given = probe_names(config.probes or ""), settings(config, data)
    loaded = load_any(run, config, config.seq_len, documents=True)
    check_length(loaded, config.seq_len)
    if sentence := limits(loaded):
        print(sentence, file=sys.stderr)

    def text() -> np.ndarray:
        if data is not None and isinstance(loaded, Trained):
            return tokenised(CORPORA[data.name](data).rows(), LanguageModel(loaded), data.max_tokens).tokens
        return text_of_run(run, loaded)

    every: list[Measured] = []
    try:
        for one in run_probes(names, loaded, text, config.seq_len):
            show(" ".join([one.probe, *given]), one.metrics)
            print(as_table(one), flush=True)
            every.append(one)
    finally:  # if a probe fails, the results of the probes before it are still written
        if every and not is_folder(run):
            from recipe.compare.probes import draw_probes  # matplotlib takes a second to import

            print(*draw_probes(run, {one.probe: one.details for one in every}), sep="\n")
            origin = {"checkpoint": loaded.checkpoint.name}
            record(run, loaded, {" ".join([one.probe, *given]): one.metrics | one.details | origin for one in every})


def text_of_run(run: Path, loaded: Loaded) -> np.ndarray:
    """The tokens of a run's validation split. Raises ConfigError where there is none."""
    if is_folder(run):
        raise ConfigError("A model in Hugging Face's format has no text; give data=text data.path=...")
    if not isinstance(loaded, Trained):
        raise ConfigError(
            f"probes={PositionLoss.name} measures a text, and the run was trained on data={loaded.config.data.name}; "
            "leave it out."
        )
    return validation_text(loaded).tokens


def too_large(config: EvaluateConfig) -> str:
    """The sentence for a model or a forward pass that does not fit in memory."""
    length = "" if config.seq_len is None else f" and seq_len={config.seq_len}"
    return (
        f"The model with batch={config.batch}{length} does not fit in the memory of {resolve_device(config.device)}; "
        "use a smaller batch or seq_len, or attention=tiled (on a GPU flash), whose memory is linear in seq_len."
    )


def run() -> None:
    """The command."""
    with one_sentence():
        main(sys.argv[1:])


if __name__ == "__main__":
    process.run(run)
