"""Continue prompts with a trained model, or write it as a folder for Hugging Face's transformers.

python sample.py run=outputs/2026-11-21/10-00-00-flash prompt="def " tokens=200 temperature=0.8 top_k=50
python sample.py run=outputs/2026-11-21/10-00-00-flash prompts=prompts.txt batch=64 out=texts.jsonl
python sample.py run=outputs/2026-11-21/10-00-00-flash export=my-model

run          the run folder to take the model from, or a folder of transformers
prompt       the text to continue; a fresh text if empty
prompts      a file of texts to continue instead, one a line; a .jsonl file has {"prompt": ...} in each line
samples      texts for each prompt, each from separate random numbers
batch        how many texts at a time; a text does not depend on those beside it
out          a new file for the texts of prompts= or samples=, a JSON object in each line; without it they are printed
tokens       how many to add at most; an end-of-text token ends the text earlier
stop         text that ends the continuation earlier, and is not part of it
temperature  divides the logits: 0 always takes the likeliest token, 1 keeps the model's probabilities
top_k        draw among the k likeliest tokens; null: among all
top_p        draw among the likeliest tokens that together have this probability; null: among all
seed         of the random numbers; each prompt of a file and each sample has a separate stream
checkpoint   best (by validation loss, if it was measured) or newest
weights      trained, or ema: their moving average, from a run with training.ema
attention    an implementation other than the run's, for a device that does not support that one
attention.precision  of attention's products in prompts: inputs, or fp8 with attention=flash
device       auto, cpu, cuda, cuda:1
export       a new folder to write the model, its tokenizer and a model card to instead, for AutoModelForCausalLM,
             AutoTokenizer and pipeline("text-generation"), in the architecture that matches: docs/models.md
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from recipe.run import process

if __name__ == "__main__":
    process.begin()

from attention import ProductPrecision
from data.chat import load_template
from data.untrusted import has_half_characters
from recipe.infer.generation.engine import Engine
from recipe.infer.generation.sampling import Sampling
from recipe.infer.generation.steps import decoding_attention
from recipe.infer.generation.text import (
    continuations,
    in_order,
    open_new,
    read_prompts,
    requests_of,
    stream,
    write,
)
from recipe.infer.huggingface.export import check_folder, export
from recipe.infer.huggingface.starting import is_folder
from recipe.infer.trained import ModelChoice, Trained, inexact, load_trained
from recipe.run.arguments import parse as key_values
from recipe.run.config import ConfigError
from recipe.run.recorded import read_config
from recipe.run.wording import one_sentence
from recipe.training.device import oom_guard, resolve_device


@dataclass
class SampleConfig(ModelChoice):
    """The arguments; the module's docstring describes them."""

    run: str = ""
    prompt: str = ""
    prompts: str | None = None
    samples: int = 1
    batch: int = 32
    out: str | None = None
    tokens: int = 200
    stop: str | None = None
    temperature: float = 0.8
    top_k: int | None = 50
    top_p: float | None = None
    seed: int = 1337
    export: str | None = None


def parse(arguments: list[str]) -> SampleConfig:
    """The typed arguments. A prompt is taken verbatim: spaces at its end matter.

    Raises UserError for an unknown key or an invalid value.
    """
    config = key_values(
        arguments, SampleConfig, "sample.py", verbatim=("run", "prompt", "prompts", "out", "stop", "export")
    )
    if not config.run:
        raise ConfigError("run=<folder> is missing; name the run folder that train.py printed.")
    if has_half_characters(config.prompt):  # Python's form of bytes that are not UTF-8
        raise ConfigError("prompt= is not UTF-8; repair it, or put the text into a file for prompts=.")
    many = config.prompts is not None or config.samples > 1
    for name, least in {"tokens": int(many), "samples": 1, "batch": 1}.items():
        if (value := getattr(config, name)) < least:
            raise ConfigError(f"{name}={value} must be at least {least}.")
    if config.samples > 1 and config.temperature == 0:
        raise ConfigError(
            f"samples={config.samples} would be the same text each time, as temperature=0 takes the likeliest token; "
            "leave one of them out."
        )
    if config.out is not None and not many:
        raise ConfigError(f"out={config.out} takes the texts of many prompts; name their file with prompts=.")
    if config.prompts is not None and config.prompt:
        raise ConfigError(f"prompt={config.prompt} and prompts={config.prompts} are both given; leave one of them out.")
    if config.export is not None and (config.prompt or many):
        raise ConfigError(f"export={config.export} writes the model and no texts; leave the prompts out.")
    precision = config.attention_precision
    if precision is not ProductPrecision.inputs and many and config.batch > 1:
        raise ConfigError(
            f"attention.precision={precision.value} does not separate documents, and batch={config.batch} prompts "
            "share a row as documents; set batch=1, or leave the precision out."
        )
    return config


def main(arguments: list[str]) -> None:
    """Run the command line. Raises UserError or AttentionError."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return
    config = parse(arguments)
    run = Path(config.run).expanduser()
    if config.export is not None:
        write_export(run, config, Path(config.export).expanduser())
        return
    sampling = Sampling(config.temperature, config.top_k, config.top_p, config.seed)
    prompts = [config.prompt] if config.samples > 1 else None
    if config.prompts is not None:
        prompts = read_prompts(Path(config.prompts).expanduser())
    batch = "" if prompts is None else f" with batch={config.batch}"
    too_large = (
        f"The model{batch} does not fit in the memory of {resolve_device(config.device)}; use a smaller batch, fewer "
        "tokens or another device."
    )
    with oom_guard(too_large):
        continue_prompts(load_trained(run, config), prompts, sampling, config)


def continue_prompts(trained: Trained, prompts: list[str] | None, sampling: Sampling, config: SampleConfig) -> None:
    """Continue the prompts, or stream the continuation of the only one. Raises UserError before anything is written."""
    model, tokenizer = trained.model, trained.tokenizer
    reader = decoding_attention(model, model.wte.weight.device)
    if (precision := config.attention_precision) is not ProductPrecision.inputs:
        print(
            f"attention.precision={precision.value} cannot decode; attention.precision=inputs does it instead.",
            file=sys.stderr,
        )
    elif reader is None:
        print(
            f"attention={model.attend.name} reads no cache, so each token is computed from all those before it.",
            file=sys.stderr,
        )
    elif reader is not model.attend:
        print(f"attention={model.attend.name} cannot decode; attention={reader.name} does it instead.", file=sys.stderr)
    if prompts is not None:
        write_texts(prompts, trained, sampling, config)
        return
    text = stream(model, tokenizer, config.prompt, config.tokens, sampling, config.stop, trained.dtype)
    print(config.prompt, end="", flush=True)
    for piece in text:
        print(piece, end="", flush=True)
    print()


def write_export(run: Path, choice: ModelChoice, folder: Path) -> None:
    """Write a run's model for transformers, on any machine. Raises UserError before anything is written."""
    check_folder(folder)  # before the weights are read
    if is_folder(run):
        raise ConfigError(f"run={run} is a folder of transformers already; name a run folder, or leave export= out.")
    if reason := inexact(read_config(run).attention):
        raise ConfigError(f"{reason}, and transformers would compute another; only exact ones can be exported.")
    trained = load_trained(run, ModelChoice(choice.checkpoint, choice.weights, attention="naive", device="cpu"))
    export(trained.model, trained.tokenizer, folder, trained.config.attention.dropout, load_template(run))
    print(f"wrote {folder}", file=sys.stderr)


def write_texts(prompts: list[str], trained: Trained, sampling: Sampling, config: SampleConfig) -> None:
    """Continue many prompts, or one many times, and print or write it all. Raises UserError before anything is
    written."""
    requests = requests_of(prompts, trained.tokenizer, config.tokens, config.samples)
    engine = Engine(trained.model, requests, sampling, slots=config.batch, dtype=trained.dtype)
    texts = continuations(engine, prompts, trained.tokenizer, config.stop)
    if config.out is not None:
        write(texts, len(requests), open_new(Path(config.out).expanduser()))
    elif config.prompts is not None:
        write(texts, len(requests), lambda continuation: print(continuation.as_json()))
    else:
        title = f"of {config.samples}\n{config.prompt}"
        write(
            in_order(texts),
            len(requests),
            lambda one: print(f"--- sample {one.sample + 1} {title}{one.text}", flush=True),
        )


def run() -> None:
    """The command."""
    try:
        with one_sentence():
            main(sys.argv[1:])
    except BrokenPipeError:  # the reader closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    process.run(run)
