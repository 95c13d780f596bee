"""The model, score and tokenizer of a folder of transformers, for a run that starts from it."""

from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from data.own_tokenizer import read as read_tokenizer
from data.tokenizers import Tokenizer, gpt2_tokenizer
from data.untrusted import SETTINGS, UntrustedError, read_json
from model.options import GPTConfig
from model.score import ScoreConfig
from recipe.infer.huggingface.loading import ADAPTER, beyond, find, settings_of
from recipe.infer.huggingface.settings import Settings, WeightsError, checkpoint_in
from recipe.run.config import Config

TOKENIZER = "tokenizer.json"


class Start(NamedTuple):
    """A folder's model.

    tokenizer  as data.tokenizer= names it
    """

    folder: Path
    settings: Settings
    tokenizer: str | None

    def options(self) -> dict[str, Any]:
        """The options that differ from a run's, by name: model.*, score.* and data.tokenizer."""
        options = differing("model", self.settings.model, GPTConfig())
        options |= differing("score", self.settings.score, ScoreConfig())
        return options | ({} if self.tokenizer is None else {"data.tokenizer": self.tokenizer})

    def config(self) -> Config:
        """The configuration of a run with this model, at its longest input."""
        return Config(seq_len=self.settings.longest, model=self.settings.model, score=self.settings.score)

    def load_tokenizer(self) -> Tokenizer:
        """The folder's. Raises DataError, or WeightsError where it has none."""
        if self.tokenizer is None:
            raise WeightsError(f"{self.folder} has no {TOKENIZER}; put the model's there.")
        if self.tokenizer == "gpt2":
            return gpt2_tokenizer()
        tokenizer = read_tokenizer(Path(self.tokenizer))
        for flaw in beyond(tokenizer, self.settings.model.vocab_size or 0, str(self.folder)):
            raise WeightsError(flaw)
        tokenizer.ends |= self.ends()
        with suppress(OSError, UntrustedError, AttributeError):  # AttributeError: no mapping
            begin = read_json(self.folder / "tokenizer_config.json", SETTINGS).get("bos_token")
            begin = begin.get("content") if isinstance(begin, dict) else begin
            token = tokenizer.model.token_to_id(begin) if isinstance(begin, str) else None
            tokenizer.begin = tokenizer.begin if token is None else token
        return tokenizer

    def ends(self) -> set[int]:
        """The tokens at which transformers ends a generated text."""
        found = []
        for name in ("config.json", "generation_config.json"):
            with suppress(OSError, UntrustedError, AttributeError):  # AttributeError: no mapping
                given = read_json(self.folder / name, SETTINGS).get("eos_token_id")
                found += given if isinstance(given, list) else [given]
        return {token for token in found if isinstance(token, int)}


def is_folder(folder: Path) -> bool:
    """Whether this is a model of transformers, and no run."""
    found = (folder / "config.json").is_file() or (folder / ADAPTER).is_file() or checkpoint_in(folder) is not None
    return folder.suffix == ".pt" or (found and not (folder / ".hydra").exists())


def start_from(source: str) -> Start:
    """A folder, or a model's name on the Hugging Face hub. Raises WeightsError."""
    folder = find(source)
    settings = settings_of(folder, source)
    tokenizer = str(folder / TOKENIZER) if (folder / TOKENIZER).is_file() else None
    return Start(folder, settings, "gpt2" if tokenizer is None and settings.family.kind == "gpt2" else tokenizer)


def differing(prefix: str, value: Any, default: Any) -> dict[str, Any]:
    """The options of a dataclass that are not its defaults, and the sizes, which presets set."""
    options: dict[str, Any] = {}
    for field in fields(value):
        chosen, usual = getattr(value, field.name), getattr(default, field.name)
        if is_dataclass(chosen):
            options |= differing(f"{prefix}.{field.name}", chosen, usual)
        elif chosen != usual or field.name in ("n_layers", "n_heads", "n_embd"):
            options[f"{prefix}.{field.name}"] = chosen.value if isinstance(chosen, Enum) else chosen
    return options
