"""The parts of a run, built from its configuration."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from attention import AttentionShape, build_attention
from data.chat import ChatTemplate
from data.feed import Data, Feed
from data.options import Documents
from data.store import PreparedData
from data.tasks import TaskData
from data.tokenizers import save_tokenizer
from model.counting import flops_per_token
from model.gpt import GPT, Computation
from model.options import GPTConfig
from model.score import attention_scores
from recipe.distributed.ranks import from_first_rank
from recipe.distributed.sharing import Sharing
from recipe.distributed.world import World
from recipe.files import plain
from recipe.run.config import Config, ConfigError
from recipe.run.describe import describe_run
from recipe.run.meters import StepMeter, product_precision
from recipe.run.profiler import Profiler
from recipe.run.record import Record, RunMetadata, recorded_out_of_memory
from recipe.run.starting import Weights
from recipe.training.checkpoint import Manifest
from recipe.training.device import cpu_memory_limit, oom_guard, resolve_precision
from recipe.training.interruption import Interruption
from recipe.training.loop import NullRecord, Run
from recipe.training.optimizer import build_optimizer, learning_rate
from recipe.training.parity_probe import ParityProbe
from recipe.training.recall import PositionLoss, build_recall
from recipe.training.restoring import restore
from recipe.training.step import Trainer, can_replay, compiled


def attention_shape(config: Config, device: torch.device, dtype: torch.dtype) -> AttentionShape:
    """The requirements of the model in training, which computes in `dtype`, for its attention."""
    model = config.model
    return AttentionShape(
        head_dim=model.head_size,
        n_heads=model.n_heads,
        n_kv_heads=model.kv_heads,
        dtype=dtype,
        device=device,
        scores=attention_scores(config.score, model),
        documents=config.data.documents is not Documents.ignore,
        training=True,
    )


def build_gpt(config: Config, vocab_size: int, device: torch.device, dtype: torch.dtype) -> GPT:
    """A model that will compute on `device` in `dtype`, on the CPU, with random weights."""
    training = config.training
    return GPT(
        config.model,
        vocab_size,
        config.seq_len,
        build_attention(config.attention),
        Computation(training.recompute, residual_in_fp32=training.residual_in_fp32, device=device, dtype=dtype),
        score=config.score,
        documents=config.data.documents is not Documents.ignore,
        restart_positions=config.data.documents is Documents.restart,
    )


def build_model(
    config: Config,
    vocab_size: int,
    device: torch.device,
    dtype: torch.dtype,
    world: World,
    weights: Weights | None = None,
) -> GPT:
    """The model with its initial weights, drawn from the seed or loaded from `init_from` by `weights`.

    Where ranks keep shards of it, only the first one builds it whole, and the others on the meta device.
    """
    shards = config.parallel.shards and world.size > 1
    torch.manual_seed(config.seed if config.init_seed is None else config.init_seed)
    with torch.device("meta") if config.init_from or (shards and world.rank > 0) else nullcontext():
        model = build_gpt(config, vocab_size, device, dtype)
    if config.init_from is not None:
        assert weights is not None
        if not shards or world.rank == 0:
            model.materialise("cpu" if shards else device)  # the weights once, which are then read tensor by tensor
        read = partial(weights.load, model, config.init_from)
        from_first_rank(read) if shards else read()
    return model


def too_large_model(model: GPTConfig, device: torch.device) -> str:
    """The sentence for a model that does not fit even without training."""
    return (
        f"A model with model.n_layers={model.n_layers} and model.n_embd={model.n_embd} does not fit in the memory of "
        f"{device} with gradients and optimizer state; choose smaller ones, or a device with more memory."
    )


def build_trainer(config: Config, model: GPT, device: torch.device, world: World) -> Trainer:
    """The trainer of a model, which moves to `device`."""
    training = replace(config.training, precision=resolve_precision(config.training.precision, device))
    micro_steps = training.share(model.seq_len, world).micro_steps
    mixes = bool(config.model.mixers)
    in_blocks = mixes or config.parallel.shards
    sharing = Sharing(model, world, config.parallel, device, training.precision.dtype)
    optimizer = sharing.share_update(build_optimizer(sharing.model, config.optimizer))
    return Trainer(
        sharing,
        optimizer,
        sharing.exchange(optimizer, micro_steps),
        compiled(sharing.computing, in_blocks) if training.compile else sharing.computing,
        training,
        config.seed,
        learning_rate=partial(learning_rate, steps=training.steps, peak=config.optimizer.lr, config=config.schedule),
        clip=config.optimizer.clip,
        replayed=can_replay(training, config.attention.rng, micro_steps, in_blocks, mixes),
    )


def one_document(config: Config) -> ConfigError:
    """The error of a run that separates documents where the training text is a single one."""
    remedy = "choose another score=" if config.score.name == "documents" else "use data.documents=ignore"
    return ConfigError(
        f"data.documents={config.data.documents.name} has no effect on data={config.data.name}, whose training text is "
        f"one document; {remedy}, or text of more documents: files of a folder, or rows of .jsonl or .parquet."
    )


def build_run(
    config: Config,
    fed: Feed,
    folder: Path,
    overrides: list[str],
    checkpoint: Manifest | None,
    world: World,
    device: torch.device,
    weights: Weights,
) -> Run:
    """The run of a configuration in its folder, which trains on what it is fed, from a checkpoint on. Raises UserError.

    In this order: model, trainer, what measures them, and the record, which writes into the folder.
    """
    torch.compiler.reset()  # drops compiled code of an earlier job of a sweep in this process
    training, data, recorded = config.training, fed.data, plain(config)
    T = config.seq_len
    texts = data.parts.values() or [data] if isinstance(data, PreparedData) and data.train.answers is None else []
    if config.data.documents is not Documents.ignore and any(len(text.train.documents) < 2 for text in texts):
        raise one_document(config)
    with (
        recorded_out_of_memory(folder, recorded, overrides, device, world),
        oom_guard(too_large_model(config.model, device)),
        cpu_memory_limit(training.cpu.memory_gib if device.type == "cpu" else None),
    ):
        dtype = resolve_precision(training.precision, device).dtype
        model = build_model(config, data.vocab_size, device, dtype, world, weights)
        pieces = fed.batches.stored(0).pieces()
        full, causal = (flops_per_token(model, T, causal, pieces) for causal in (False, True))
        trainer = build_trainer(config, model, device, world)
    start = 0
    if checkpoint is not None:
        restore(trainer, checkpoint, config.data.name, data.identity)
        start = checkpoint.step
    text = partial(validation_text, data)
    recalls = [build_recall(name, T, data.vocab_size, config.data.name, text) for name in config.probes]
    shape = replace(model.shape, training=True)
    probe = ParityProbe(config.parity, config.attention, shape) if config.parity.every else None
    path = model.attend.path(shape, T)
    record, notes = NullRecord(trainer), list[str]()
    meter = StepMeter(
        device,
        tokens_per_step=trainer.tokens_per_step,
        flops_per_token_full=full,
        flops_per_token_causal=causal,
        precision=product_precision(trainer.training.precision.value, model.attend.config.allow_tf32),
        device_count=world.size,
    )
    if world.rank == 0:  # which keeps the run folder
        if isinstance(data, PreparedData):
            notes = data.notes
            save_tokenizer(data.tokenizer, folder)
            if template := data.manifest["recipe"]["source"].get("template"):
                ChatTemplate(**template).save(folder)
        origin = RunMetadata(recorded, overrides, data.identity, shape, path, notes)
        record = Record(folder, config.tracking, trainer, meter, origin, start, again=config.resume is not None)
    profiler = Profiler(
        folder,
        device,
        profile=training.profile and world.rank == 0,
        start=start,
        steps=training.steps,
        print=record.print,
    )
    for line in describe_run(config, trainer, path):
        record.print(line)
    return Run(
        trainer, fed.batches, fed.windows, meter, probe, profiler, record, Interruption(), start, recalls, fed.mixture
    )


def validation_text(data: Data) -> np.ndarray:
    """The tokens of a text that are not trained on, 1-D. Raises ConfigError for a task."""
    if isinstance(data, TaskData):
        raise ConfigError(
            f"probes={PositionLoss.name} measures a text, and data={data.task.name} is none; leave it out."
        )
    return data.val.tokens
