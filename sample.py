"""Continue a prompt with a trained model, or write it as a folder for Hugging Face's transformers.

python sample.py run=outputs/2026-11-21/10-00-00-flash prompt="def " tokens=200 temperature=0.8 top_k=50
python sample.py run=outputs/2026-11-21/10-00-00-flash export=my-model

run          the run folder to take the model from
prompt       the text to continue; a fresh text if empty
tokens       how many to add at most; an end-of-text token ends the text earlier
temperature  divides the logits: 0 always takes the likeliest token, 1 keeps the model's probabilities
top_k        draw among the k likeliest tokens; null: among all
seed         of the draws
checkpoint   best (by validation loss, if it was measured) or newest
attention    an implementation other than the run's, for a device that does not support that one
device       auto, cpu, cuda, cuda:1
export       a new folder to write the model, its tokenizer and a model card to instead, for AutoModelForCausalLM,
             AutoTokenizer and pipeline("text-generation"): as a GPT-2 or, with rotary positions, a Starcoder2
"""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tiktoken

from attention import AttentionError
from cli.arguments import parse as key_values
from cli.trained import CheckpointChoice, load_trained
from config import ConfigError, as_plain
from errors import UserError, fail
from huggingface import check_folder, export, read_origin
from model.gpt import GPT


@dataclass
class SampleConfig:
    """The arguments; the module's docstring says what each does."""

    run: str = ""
    prompt: str = ""
    tokens: int = 200
    temperature: float = 0.8
    top_k: int | None = 50
    seed: int = 1337
    checkpoint: CheckpointChoice = CheckpointChoice.best
    attention: str | None = None
    device: str = "auto"
    export: str | None = None


def parse(arguments: list[str]) -> SampleConfig:
    """The typed arguments. A prompt is taken verbatim: spaces at its end matter.

    Raises UserError for an unknown key or an invalid value.
    """
    config = key_values(arguments, SampleConfig, "sample.py", verbatim=("run", "prompt", "export"))
    if not config.run:
        raise ConfigError("run=<folder> is missing; name the run folder that train.py printed.")
    if config.tokens < 0:
        raise ConfigError(f"tokens={config.tokens} must be at least 0, the number of tokens to add.")
    return config


def stream(
    model: GPT,
    tokenizer: tiktoken.Encoding,
    prompt: str,
    tokens: int,
    temperature: float = 0.8,
    top_k: int | None = 50,
    seed: int = 1337,
) -> Iterator[str]:
    """The continuation of a prompt, in pieces of whole characters, up to the end of the text."""
    # A character may span several tokens: it appears with its last byte.
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    start = tokenizer.encode_ordinary(prompt) or [tokenizer.eot_token]
    for token in model.generate(start, tokens, temperature, top_k, seed):
        if token == tokenizer.eot_token:
            break
        yield decoder.decode(tokenizer.decode_single_token_bytes(token))
    yield decoder.decode(b"", final=True)


def main(arguments: list[str]) -> None:
    """Run the command line. Raises UserError or AttentionError."""
    config = parse(arguments)
    run = Path(config.run).expanduser()
    if config.export is not None:
        check_folder(Path(config.export).expanduser())  # before the weights are read
    trained = load_trained(run, config.checkpoint, attention=config.attention, device=config.device)
    model, tokenizer = trained.model, trained.tokenizer
    if config.export is not None:
        origin = read_origin(run, trained.checkpoint, as_plain(trained.config))
        export(model, tokenizer, Path(config.export).expanduser(), origin)
        print(f"wrote {config.export}", file=sys.stderr)
        return
    text = stream(model, tokenizer, config.prompt, config.tokens, config.temperature, config.top_k, config.seed)
    print(config.prompt, end="", flush=True)
    with trained.autocast():
        for piece in text:
            print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        sys.exit()
    try:
        main(sys.argv[1:])
    except (UserError, AttentionError) as error:
        fail(error)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
