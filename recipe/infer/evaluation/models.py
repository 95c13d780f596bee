"""A model to evaluate: a run's model, or a folder in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from data.errors import brief
from data.tokenizers import encoder, ends_of
from data.untrusted import UntrustedError, children, read_json
from model.loss import IGNORE_INDEX
from recipe.infer.generation.engine import Engine, Request
from recipe.infer.generation.sampling import Sampling
from recipe.infer.huggingface.reload import open_folder
from recipe.infer.trained import Trained
from recipe.run.config import ConfigError

GREEDY = Sampling(temperature=0)
# Rows of logits in fp32 that exist at once: 0.8 GB with GPT-2's vocabulary.
ROWS = 4096
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json")
# Keys of Hugging Face's files that name code: classes in the folder, kernels of the hub.
RUNS_CODE = {"auto_map", "attn_implementation", "experts_implementation", "quantization_config", "custom_generate"}

# Logarithms of the probabilities of some targets, (N,) fp32, and whether each is the likeliest token, (N,) bool.
Scores = tuple[Tensor, Tensor]


class LanguageModel(Protocol):
    """The interface of a model to evaluate.

    max_length   the longest input, in tokens
    end_of_text  the token that ends a text and begins the next
    ends         the tokens that end a generated text
    """

    max_length: int
    end_of_text: int
    ends: set[int]

    def encode(self, text: str) -> np.ndarray:
        """The tokens of a text, 1-D integers, without special ones."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens."""

    def size(self, tokens: Sequence[int]) -> int:
        """Bytes of the text of some tokens, without ends of text."""

    def scores(self, inputs: Tensor, targets: Tensor, document_starts: Tensor | None = None) -> Scores:
        """The scores of the targets that are not -100, in their order.

        inputs           (B, T)   int64, T <= max_length
        targets          (B, T)   int64: the token after each input
        document_starts  (B, T)   int32, as `GPT.hidden` has it
        """

    def generate(self, requests: Sequence[Request], slots: int) -> Iterator[tuple[Request, int]]:
        """Yield each request with its likeliest next token, which is added to its `tokens`, until it is finished.

        slots  requests at a time, where a model takes more than one
        """


class TrainedModel:
    """The model of a run."""

    def __init__(self, trained: Trained, seq_len: int | None = None) -> None:
        """seq_len  the longest input, which the model has to allow; None: the run's"""
        self.trained, self.model = trained, trained.model
        self.max_length, self.end_of_text = seq_len or trained.config.seq_len, trained.tokenizer.eot_token
        self.ends = ends_of(trained.tokenizer)
        self.encode = encoder(trained.tokenizer)
        self.decode = trained.tokenizer.decode

    def size(self, tokens: Sequence[int]) -> int:
        return len(self.trained.tokenizer.decode_bytes([t for t in tokens if t != self.end_of_text]))

    @torch.inference_mode()
    def scores(self, inputs: Tensor, targets: Tensor, document_starts: Tensor | None = None) -> Scores:
        device = self.model.wte.weight.device
        inputs, targets = inputs.to(device), targets.to(device)
        starts = None if document_starts is None else document_starts.to(device)
        with self.trained.autocast():
            chosen = targets != IGNORE_INDEX
            hidden = self.model.hidden(inputs, document_starts=starts)[chosen]  # (N, C)
            pieces = [
                scores_of(self.model.logits(rows), wanted)
                for rows, wanted in zip(hidden.split(ROWS), targets[chosen].split(ROWS), strict=True)
            ]
        return joined(pieces)

    def generate(self, requests: Sequence[Request], slots: int) -> Iterator[tuple[Request, int]]:
        yield from Engine(self.model, requests, GREEDY, slots=slots, dtype=self.trained.dtype).run()


class ExportedModel:
    """A folder with the model and the tokenizer of `transformers`."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype, seq_len: int | None = None) -> None:
        """
        dtype    of matrix products; the weights are fp32, as in training
        seq_len  the longest input; None: the model's longest

        Raises ConfigError where transformers cannot open the folder, or its tokenizer does not fit the model.
        """
        check_data_alone(folder)
        try:
            opened = open_folder(folder)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"run={folder} is in Hugging Face's format, which needs: pip install transformers"
            ) from error
        except Exception as error:  # tokenizers and models raise exceptions of many types
            raise ConfigError(
                f"run={folder} cannot be opened by transformers ({brief(error)}); export it again."
            ) from error
        if missing := sorted(opened.loaded["missing_keys"]):
            raise ConfigError(f"run={folder} lacks the weights {', '.join(missing[:3])}; export it again.")
        self.tokenizer, self.model = opened.tokenizer, opened.model.to(device)
        self.model.generation_config.max_length = None  # each request has a limit
        config, self.dtype = self.model.config, dtype
        if len(self.tokenizer) > config.vocab_size:
            raise ConfigError(
                f"run={folder} has a tokenizer of {len(self.tokenizer)} tokens and a model of {config.vocab_size}; "
                "put the model's tokenizer there."
            )
        if self.tokenizer.eos_token_id is None:
            raise ConfigError(f"run={folder} has a tokenizer without an end-of-text token; set its eos_token.")
        longest = config.max_position_embeddings
        rotary = getattr(config, "rope_parameters", None) is not None
        if seq_len is not None and seq_len > longest and not rotary:
            raise ConfigError(f"seq_len={seq_len} is more than the {longest} positions of run={folder}; lower it.")
        self.max_length, self.end_of_text = seq_len or longest, self.tokenizer.eos_token_id
        given = self.model.generation_config.eos_token_id
        self.ends = {self.end_of_text, *(given if isinstance(given, list) else [given])} - {None}

    def encode(self, text: str) -> np.ndarray:
        return np.array(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], np.int64)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens)))

    def size(self, tokens: Sequence[int]) -> int:
        return len(self.decode([t for t in tokens if t != self.end_of_text]).encode())

    @torch.inference_mode()
    def scores(self, inputs: Tensor, targets: Tensor, document_starts: Tensor | None = None) -> Scores:
        if document_starts is not None:
            raise ConfigError("A model in Hugging Face's format cannot separate packed documents; name the run folder.")
        inputs, targets = inputs.to(self.model.device), targets.to(self.model.device)
        chosen = targets != IGNORE_INDEX
        with self.autocast():
            logits = self.model(inputs, use_cache=False).logits[chosen]
        pieces = zip(logits.split(ROWS), targets[chosen].split(ROWS), strict=True)
        return joined([scores_of(rows, wanted) for rows, wanted in pieces])

    def generate(self, requests: Sequence[Request], slots: int) -> Iterator[tuple[Request, int]]:
        for request in requests:
            given = torch.tensor([request.prompt], device=self.model.device)
            options: dict[str, Any] = {"max_new_tokens": request.limit, "do_sample": False}
            with self.autocast():
                made = self.model.generate(
                    given, attention_mask=torch.ones_like(given), pad_token_id=self.end_of_text, **options
                )
            for token in made[0, len(request.prompt) :].tolist():
                if not request.finished:
                    request.tokens.append(token)
                    request.finished = len(request.tokens) == request.limit
                    yield request, token

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.model.device.type, self.dtype, enabled=self.dtype is not torch.float32)


def check_data_alone(folder: Path) -> None:
    """Raise ConfigError for a folder in Hugging Face's format that contains or names code that transformers would run,
    and for one without a tokenizer, for which transformers would substitute another."""
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "adapter_config.json"):
        path = folder / name
        try:
            content = [read_json(path)]
        except FileNotFoundError:
            continue
        except (OSError, UntrustedError) as error:
            raise ConfigError(f"{path} cannot be read ({error}); export the model again.") from error
        if name == "adapter_config.json":
            raise ConfigError(f"run={folder} is an adapter of another model; merge the two, and name that folder.")
        while content:
            if asked := sorted(RUNS_CODE & {key for item in content if isinstance(item, dict) for key in item}):
                raise ConfigError(
                    f"{path} has {asked[0]}, for which transformers may run code that comes with the model; name a "
                    "folder without it, such as sample.py exports."
                )
            content = [child for item in content for child in children(item)]
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise ConfigError(f"run={folder} has no tokenizer; put the model's tokenizer.json there.")


def scores_of(logits: Tensor, targets: Tensor) -> Scores:
    """The scores of targets (N,) by logits (N, vocab_size)."""
    logits = logits.float()
    chosen = logits.gather(1, targets[:, None])[:, 0]
    return chosen - logits.logsumexp(dim=1), logits.argmax(dim=1) == targets


def joined(pieces: list[Scores]) -> Scores:
    """The scores of successive pieces."""
    return torch.cat([logs for logs, _ in pieces]), torch.cat([likeliest for _, likeliest in pieces])
