"""The model of a run folder, for programs that use trained models."""

import sys
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

import torch

from attention import IMPLEMENTATIONS, Ablation, AttentionConfig, ProductPrecision
from attention.from_file import is_in_file
from data.chat import end_at_answers
from data.options import Documents
from data.tasks import TASKS
from data.tokenizers import FILE, Tokenizer, load_tokenizer
from model.gpt import GPT
from model.options import Mixing, Positions, Recompute
from recipe.infer.huggingface.loading import load
from recipe.infer.huggingface.starting import is_folder, start_from
from recipe.run.build import build_gpt
from recipe.run.config import Config, ConfigError
from recipe.run.recorded import read_config
from recipe.run.resume import check_attention_file
from recipe.run.run_folder import CONFIG
from recipe.training.checkpoint import CheckpointError, best_checkpoint, load_checkpoint, newest_valid
from recipe.training.device import resolve_device, resolve_precision
from recipe.training.state import AVERAGE


class CheckpointChoice(Enum):
    """The checkpoint to take."""

    best = "best"
    newest = "newest"


class WeightsChoice(Enum):
    """The weights to take from it."""

    trained = "trained"
    ema = "ema"  # their moving average (training.ema)


@dataclass
class ModelChoice:
    """The arguments of sample.py and eval.py that choose a run's model, and how it computes.

    attention            an implementation other than the run's
    mixer                recurrent, chunked or fla, if not as in the run
    attention_precision  of attention's products
    """

    checkpoint: CheckpointChoice = CheckpointChoice.best
    weights: WeightsChoice = WeightsChoice.trained
    attention: str | None = None
    mixer: Mixing | None = None
    attention_precision: ProductPrecision = ProductPrecision.inputs
    device: str = "auto"


@dataclass(frozen=True)
class Loaded:
    """A run's model, ready for use.

    config      of the run
    model       in evaluation mode, on its device
    dtype       of its computations
    checkpoint  from which its weights come
    """

    config: Config
    model: GPT
    dtype: torch.dtype
    checkpoint: Path

    def autocast(self) -> torch.autocast:
        """Autocast in the precision of the run's training."""
        return torch.autocast(self.model.wte.weight.device.type, self.dtype, enabled=self.dtype is not torch.float32)


@dataclass(frozen=True)
class Trained(Loaded):
    """The model of a run that was trained on a text."""

    tokenizer: Tokenizer


def of_text(loaded: Loaded, run: Path | str) -> Trained:
    """The same model, of text. Raises UserError for another."""
    if not isinstance(loaded, Trained):
        raise ConfigError(
            f"run={run} was trained on data={loaded.config.data.name}, a task without text; name another run."
        )
    return loaded


def load_trained(run: Path, choice: ModelChoice) -> Trained:
    """As `load_any`, for a model of text. Raises UserError for another."""
    return of_text(load_any(run, choice), run)


def load_any(run: Path, choice: ModelChoice, seq_len: int | None = None, documents: bool = False) -> Loaded | Trained:
    """The model of a run, or of a folder of transformers; a `Trained`, unless it was trained on a task.

    seq_len    the longest input, which rotary positions allow to exceed the run's; None: the run's
    documents  whether the model separates packed documents, if the run does

    Raises UserError.
    """
    start = start_from(str(run)) if is_folder(run) else None
    config = read_config(run) if start is None else start.config()
    on, attention = resolve_device(choice.device), choice.attention
    dtype = resolve_precision(config.training.precision, on).dtype
    longest = max(config.seq_len, seq_len or 0)
    if longest > config.seq_len and config.model.positions is Positions.learned:
        raise ConfigError(
            f"seq_len={seq_len} is longer than the run's {config.seq_len}, and it has learned positions for those "
            f"alone; use seq_len={config.seq_len} or less, or a run with model.positions=rotary."
        )
    tokenizer = None
    if task := TASKS.get(config.data.name):
        vocab_size = task.vocab_size
    else:
        tokenizer = load_tokenizer(run) if start is None else start.load_tokenizer()
        if start is None:
            end_at_answers(tokenizer, run)
        vocab_size = tokenizer.n_vocab
    trained_with = config.attention.name
    if is_in_file(trained_with) and Path(attention or "").name != Path(trained_with).name:
        raise ConfigError(
            f"run={run} was trained with attention={trained_with}, and what is in a file runs only where the command "
            f"names it; use attention={trained_with}."
        )
    if attention is None or attention == trained_with or is_in_file(trained_with):
        chosen = replace(config.attention, name=attention or trained_with)
    else:
        chosen = AttentionConfig(name=attention)
        for reason in filter(None, map(inexact, (config.attention, chosen))):
            raise ConfigError(
                f"{reason}, so attention={attention} may compute something else than the run's; leave it out."
            )
    used = replace(
        config,
        seq_len=longest,
        model=replace(config.model, mixer=choice.mixer or config.model.mixer),
        attention=replace(chosen, precision=choice.attention_precision),
        data=config.data if documents else replace(config.data, documents=Documents.ignore),
        training=replace(config.training, recompute=Recompute.none),  # it is for training alone
    )
    if start is None:
        model = build_gpt(used, vocab_size, on, dtype)
        checkpoint = load_weights(model, run, choice)
        check_attention_file(run, checkpoint, used.attention.name, False)
    else:
        for name in ("checkpoint", "weights"):  # of which a folder of transformers has one
            if (value := getattr(choice, name)) is not getattr(ModelChoice, name):
                raise ConfigError(
                    f"{name}={value.value} has no effect on {run}, a model of transformers; leave it out."
                )
        with torch.device("meta"):
            model = build_gpt(used, vocab_size, on, dtype)
        model.materialise(on)
        load(model, str(run))
        checkpoint = run
    loaded = Loaded(config, model.eval().to(on), dtype, checkpoint)
    return Trained(**vars(loaded), tokenizer=tokenizer) if tokenizer else loaded


def inexact(attention: AttentionConfig) -> str | None:
    """Why no other implementation may replace this one, as the beginning of a sentence; None where others may."""
    if attention.ablate is not Ablation.none:
        return f"attention.ablate={attention.ablate.value} leaves out a line of the run's attention"
    if is_in_file(attention.name):
        return f"attention={attention.name} is in a file"
    known = IMPLEMENTATIONS.get(attention.name)
    if known is None or known.exact:
        return None
    return f"attention={attention.name} does not declare that it is exact (docs/add-an-attention.md)"


def load_weights(model: GPT, run: Path, choice: ModelChoice) -> Path:
    """Load a checkpoint of the run and print which. One that is damaged is named, and another loaded: for the best,
    the best of those whose manifests can be read, else the newest intact one."""
    folder, average = run / "checkpoints", choice.weights is WeightsChoice.ema
    part, prefix = ("training", AVERAGE) if average else ("model", "")
    path, unreadable = best_checkpoint(folder) if choice.checkpoint is CheckpointChoice.best else (None, {})
    chosen, damaged = None, list(unreadable.values())
    if path is not None:
        try:
            chosen = load_checkpoint(path, parts=[part], prefix=prefix)[part]
        except CheckpointError as error:
            damaged.append(str(error))
    if path is None or chosen is None:
        path, rejected = newest_valid(folder, [part])
        damaged += rejected
        chosen = load_checkpoint(path, parts=[part], prefix=prefix)[part]
    print(*dict.fromkeys(damaged), f"{path}:", sep="\n", file=sys.stderr)
    if average and not chosen:
        raise ConfigError(f"{path} has no moving average, as training.ema was 0; leave weights=ema out.")
    chosen = {name.removeprefix(prefix): value for name, value in chosen.items()}
    tokens = int(chosen.get("wte.weight", torch.zeros(0, 1)).any(dim=1).sum())  # padding is zero
    if tokens != model.vocab_size and model.config.vocab_size is None:
        of_data = run / FILE if (run / FILE).exists() else "The run's task"
        raise ConfigError(
            f"{of_data} has {model.vocab_size} tokens and the model of {path} has {tokens}; put this run's tokenizer "
            "back, or train again."
        )
    try:
        model.load_state_dict(chosen)
    except RuntimeError as error:  # lists every name and shape
        raise ConfigError(
            f"{path} does not hold the weights of the model in {run / CONFIG}; put the run's file back."
        ) from error
    return path
