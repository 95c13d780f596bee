"""The model of a run folder, for the programs that use what train.py has made."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from attention import AttentionConfig, ProductPrecision, build_attention
from data.config import Documents
from data.tokenizers import Tokenizer, load_tokenizer
from model.config import Positions
from model.gpt import GPT
from recipe.config import Config, ConfigError, register
from recipe.device import resolve_device, resolve_precision
from recipe.training.checkpoint import CheckpointError, best_checkpoint, load_checkpoint, newest_valid
from recipe.training.state import AVERAGE


class CheckpointChoice(Enum):
    """The checkpoint to take."""

    best = "best"
    newest = "newest"


class WeightsChoice(Enum):
    """The weights to take from it."""

    trained = "trained"
    ema = "ema"  # their moving average (training.ema)


@dataclass(frozen=True)
class Trained:
    """A run's model, ready for use.

    config      of the run
    model       in evaluation mode, on its device
    dtype       in which it computes
    checkpoint  that its weights come from
    """

    config: Config
    model: GPT
    tokenizer: Tokenizer
    dtype: torch.dtype
    checkpoint: Path

    def autocast(self) -> torch.autocast:
        """The precision that the run was trained in."""
        device = self.model.wte.weight.device.type
        return torch.autocast(device, self.dtype, enabled=self.dtype is not torch.float32)


def read_config(run: Path) -> Config:
    """The configuration of the run. Raises ConfigError."""
    register()  # the resolvers that the experiments' files use
    path = run / ".hydra" / "config.yaml"
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(path)))  # type: ignore
    except OSError as error:
        raise ConfigError(
            f"run={run} is not a run folder, as {path} cannot be read ({error.strerror}); name the folder that "
            "train.py printed."
        ) from error
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{path} is not a configuration of this version ({reason}); use the version that trained the run."
        ) from error


def load_trained(
    run: Path,
    which: CheckpointChoice = CheckpointChoice.best,
    weights: WeightsChoice = WeightsChoice.trained,
    *,
    attention: str | None = None,
    precision: ProductPrecision = ProductPrecision.inputs,
    device: str = "auto",
    seq_len: int | None = None,
    documents: bool = False,
) -> Trained:
    """The model of a run, with the weights of its best or newest checkpoint.

    attention  an implementation other than the run's
    precision  of attention's products
    seq_len    the longest input, which rotary positions allow to exceed the run's; None: the run's
    documents  whether the model will tell packed documents apart, if the run does

    Raises UserError.
    """
    config = read_config(run)
    on = resolve_device(device)
    dtype = resolve_precision(config.training.precision, on).dtype
    longest = max(config.seq_len, seq_len or 0)
    if longest > config.seq_len and config.model.positions is Positions.learned:
        raise ConfigError(
            f"seq_len={seq_len} is longer than the run's {config.seq_len}, and it has learned positions for those "
            f"alone; use seq_len={config.seq_len} or less, or a run with model.positions=rotary."
        )
    tokenizer = load_tokenizer(run)
    chosen = config.attention if attention is None else AttentionConfig(name=attention)
    model = GPT(
        config.model,
        tokenizer.n_vocab,
        longest,
        build_attention(replace(chosen, precision=precision)),
        score=config.score,
        documents=documents and config.data.documents is not Documents.ignore,
        restart_positions=config.data.documents is Documents.restart,
        residual_in_fp32=config.training.residual_in_fp32,
        device=on,
        dtype=dtype,
    )
    checkpoint = load_weights(model, run, which, weights)
    return Trained(config, model.eval().to(on), tokenizer, dtype, checkpoint)


def load_weights(model: GPT, run: Path, which: CheckpointChoice, weights: WeightsChoice) -> Path:
    """Load a checkpoint of the run and print which; if the best is damaged, say so and load the newest intact one."""
    folder = run / "checkpoints"
    path = best_checkpoint(folder) if which is CheckpointChoice.best else None
    state, damaged = None, list[str]()
    if path is not None:
        try:
            state = load_checkpoint(path)
        except CheckpointError as error:
            damaged.append(str(error))
    if path is None or state is None:
        path, rejected = newest_valid(folder)
        damaged += rejected
        state = load_checkpoint(path)
    print(*dict.fromkeys(damaged), f"{path}:", sep="\n", file=sys.stderr)
    if (tokens := int(state["model"]["wte.weight"].any(dim=1).sum())) != model.vocab_size:  # padding is zero
        raise ConfigError(
            f"{run / 'tokenizer.json'} has {model.vocab_size} tokens and the model of {path} has {tokens}; put this "
            "run's own tokenizer back."
        )
    chosen = state["model"]
    if weights is WeightsChoice.ema:
        averages = {name: value for name, value in state["training"].items() if name.startswith(AVERAGE)}
        if not averages:
            raise ConfigError(f"{path} has no moving average, as training.ema was 0; leave weights=ema out.")
        chosen = {name.removeprefix(AVERAGE): value for name, value in averages.items()}
    model.load_state_dict(chosen)
    return path
