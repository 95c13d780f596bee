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

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
from recipe.infer.evaluation.probes import check_length, limits, probe_names, run_probes
from recipe.infer.evaluation.results import Measured, record, show
from recipe.infer.evaluation.scorer import LanguageModel, Scorer
from recipe.infer.evaluation.tasks import run_file
from recipe.infer.evaluation.text import Text, measure, tokenised, validation_text
from recipe.infer.huggingface.starting import is_folder
from recipe.infer.trained import Loaded, ModelChoice, Trained, load_any, of_text
from recipe.run.arguments import parse as key_values
from recipe.run.compose import checked, expand_home, to_config
from recipe.run.config import ConfigError
from recipe.run.wording import one_sentence
from recipe.training import recall
from recipe.training.device import oom_guard, resolve_device

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

    def task_names(self) -> list[str]:
        """The tasks that are asked for."""
        return [name.strip() for name in (self.tasks or "").split(",") if name.strip()]


def parse(arguments: list[str]) -> tuple[EvaluateConfig, DataConfig | None]:
    """The typed arguments, and the corpus if one is chosen. Raises UserError."""
    of_data = [a for a in map(expand_home, arguments) if a.partition("=")[0].split(".")[0] == "data"]
    others = [a for a in arguments if a.partition("=")[0].split(".")[0] != "data"]
    config = key_values(others, EvaluateConfig, "eval.py", verbatim=("run", "tasks", "probes"))
    if not config.run:
        raise ConfigError("run=<folder> is missing; name a run folder, or one in Hugging Face's format.")
    for name, least in {"batch": 1, "limit": 1, "seq_len": 1, "shots": 0}.items():
        if (value := getattr(config, name)) is not None and value < least:
            raise ConfigError(f"{name}={value} must be at least {least}.")
    names = config.task_names()
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
    idle = [f"batch={config.batch}"] if config.batch != EvaluateConfig.batch else []
    for argument in idle + ([] if recall.OF_TEXT.keys() & set(names) else of_data[:1]):
        raise ConfigError(f"{argument} has no effect on probes={config.probes}; leave it out.")


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
    data = to_config(checked(overrides)).data
    if data.name == CHAT:
        raise ConfigError(
            "data=chat has no text to measure, and train.py measures the loss of its answers (val/loss); name a text."
        )
    check_data(data)
    if data.mixture:
        raise ConfigError(f"data.path={data.path} names several texts, and one is measured; name one.")
    if data.name in TASKS:
        raise ConfigError(
            f"data={data.name} is a task, whose accuracy train.py measures (probes=[{data.name}]); name a text."
        )
    CORPORA[data.name](data)  # finds the files before a model is loaded, and reads none
    return data


def texts_and_tasks(config: EvaluateConfig, data: DataConfig | None, loaded: Loaded) -> Iterator[Measured]:
    """The measurements of a model's tasks and of a text, one after the other."""
    trained = of_text(loaded, config.run)
    model, names = LanguageModel(trained, config.seq_len), config.task_names()
    scorer = Scorer(model, config.batch)
    for name in names:
        if name.endswith(".jsonl"):
            yield Measured(Path(name).stem, run_file(Path(name).expanduser(), scorer, config.limit))
    if of_harness := [name for name in names if not name.endswith(".jsonl")]:
        for task, metrics in run_tasks(of_harness, scorer, config.shots, config.limit).items():
            yield Measured(task, metrics)
    if scorer.cut:
        print(
            f"{scorer.cut:,} of the texts are longer than the model's {model.max_length} tokens and lost their "
            "beginning.",
            file=sys.stderr,
        )
    if data is None and names:
        return
    text, separate = text_of(data, trained, model), trained.config.data.documents is not Documents.ignore
    found = measure(model, text, model.max_length, config.batch, separate)
    yield Measured("val" if data is None else data.path or data.name, found | {"seq_len": model.max_length})


def probes(config: EvaluateConfig, data: DataConfig | None, loaded: Loaded) -> Iterator[Measured]:
    """The measurements of a model's probes, one after the other."""
    check_length(loaded, config.seq_len)
    if sentence := limits(loaded):
        print(sentence, file=sys.stderr)

    def text() -> np.ndarray:
        trained = of_text(loaded, config.run)
        return text_of(data, trained, LanguageModel(trained)).tokens

    yield from run_probes(probe_names(config.probes or ""), loaded, text, config.seq_len)


def text_of(data: DataConfig | None, trained: Trained, model: LanguageModel) -> Text:
    """The text that is asked for, else the run's validation split. Raises UserError."""
    if data is not None:
        return tokenised(CORPORA[data.name](data).rows(), model, data.max_tokens)
    if is_folder(trained.checkpoint):
        raise ConfigError("A model in Hugging Face's format has no text; give tasks=..., or data=text data.path=...")
    return validation_text(trained)


def settings(config: EvaluateConfig, data: DataConfig | None) -> list[str]:
    """The arguments that differ from their defaults and change a result."""
    chosen = {
        name.replace("attention_", "attention."): getattr(config, name)
        for name in SETTINGS
        if getattr(config, name) != getattr(EvaluateConfig, name)
    }
    if data is not None and data.max_tokens is not None:
        chosen["data.max_tokens"] = data.max_tokens
    return [f"{name}={getattr(value, 'value', value)}" for name, value in chosen.items()]


def main(arguments: list[str]) -> None:
    """Run the command line. Raises UserError or AttentionError."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return
    config, data = parse(arguments)
    if (size := World.from_environment().size) > 1:
        raise ConfigError(f"eval.py is one process, and {size} ranks were started; start it without torchrun.")
    run, every = Path(config.run).expanduser(), list[Measured]()
    with oom_guard(too_large(config)):
        loaded = load_any(run, config, config.seq_len, documents=data is not None or config.tasks is None)
        try:
            for one in (texts_and_tasks if config.probes is None else probes)(config, data, loaded):
                every.append(one._replace(name=" ".join([one.name, *settings(config, data)])))
                show(every[-1])
        finally:  # if one fails, the results before it are still written
            if every and not is_folder(run):
                if details := {one.probe: one.details for one in every if one.probe}:
                    from recipe.compare.probes import draw_probes  # matplotlib takes a second to import

                    for path in draw_probes(run, details):
                        print(path)
                record(run, loaded, every)


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
