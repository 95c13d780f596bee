"""The parts of a run, built from its configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attention import AttentionShape, DropoutRng, build_attention
from data.batches import Batch, Batches, Source, check_window, eval_batches
from data.chat import ChatTemplate
from data.mixing import MixedBatches
from data.options import Documents
from data.packing import ChatBatches, PackedRows, chat_windows
from data.store import PreparedData
from data.tasks import TaskBatches, TaskData, validation_batches
from data.tokenizers import save_tokenizer
from model.counting import flops_per_token
from model.gpt import GPT, Computation
from model.options import Recompute
from model.score import attention_scores
from recipe.distributed.options import DataParallel
from recipe.distributed.ranks import from_first_rank
from recipe.distributed.sharing import Sharing, shards_weights
from recipe.distributed.world import World
from recipe.run.config import Config, ConfigError, as_plain
from recipe.run.meters import StepMeter, product_precision
from recipe.run.profiler import Profiler
from recipe.run.record import Record, RunMetadata
from recipe.run.starting import Weights
from recipe.training.checkpoint import newest_valid, read_manifest
from recipe.training.device import resolve_precision
from recipe.training.interruption import Interruption
from recipe.training.loop import NullRecord, Run
from recipe.training.optimizer import build_optimizer, learning_rate
from recipe.training.parity_probe import ParityProbe
from recipe.training.recall import PositionLoss, Recall, build_recall
from recipe.training.step import Trainer

Data = PreparedData | TaskData
# Else the compiler times several orders of a sum and takes the fastest, which differs between ranks and runs.
COMPILER_OPTIONS: dict[str, Any] = {"deterministic": True}


def attention_shape(config: Config, device: torch.device) -> AttentionShape:
    """The requirements of the model in training for its attention."""
    return AttentionShape(
        head_dim=config.model.head_size,
        n_heads=config.model.n_heads,
        n_kv_heads=config.model.kv_heads,
        dtype=resolve_precision(config.training.precision, device).dtype,
        device=device,
        scores=attention_scores(config.score, config.model),
        documents=config.data.documents is not Documents.ignore,
        training=True,
    )


def build_gpt(config: Config, vocab_size: int, device: torch.device) -> GPT:
    """A model for `device`, on the CPU, with random weights."""
    training = config.training
    dtype = resolve_precision(training.precision, device).dtype
    return GPT(
        config.model,
        vocab_size,
        config.seq_len,
        build_attention(config.attention),
        Computation(
            training.recompute,
            residual_in_fp32=training.residual_in_fp32,
            device=device,
            dtype=dtype,
        ),
        score=config.score,
        documents=config.data.documents is not Documents.ignore,
        restart_positions=config.data.documents is Documents.restart,
    )


def build_model(
    config: Config, vocab_size: int, device: torch.device, world: World, weights: Weights | None = None
) -> GPT:
    """The model with its initial weights, drawn from the seed or loaded from `init_from` by `weights`.

    Where ranks keep shards of it, only the first one builds it whole, and the others on the meta device.
    """
    shards = shards_weights(config.parallel, world)
    torch.manual_seed(config.seed if config.init_seed is None else config.init_seed)
    with torch.device("meta") if config.init_from or (shards and world.rank > 0) else nullcontext():
        model = build_gpt(config, vocab_size, device)
    if config.init_from is not None:
        assert weights is not None
        if not shards or world.rank == 0:
            model.materialise("cpu" if shards else device)  # the weights once, which are then read tensor by tensor
        read = partial(weights.load, model, config.init_from)
        from_first_rank(read) if shards else read()
    return model


def build_trainer(config: Config, model: GPT, device: torch.device, world: World) -> Trainer:
    """The trainer of a model, which moves to `device`."""
    training = replace(config.training, precision=resolve_precision(config.training.precision, device))
    sharing = Sharing(model, world, config.parallel, device, training.precision.dtype)
    micro_steps = training.micro_steps(model.seq_len, world.data_size)
    optimizer = sharing.share_update(build_optimizer(sharing.model, config.optimizer), micro_steps)
    return Trainer(
        sharing,
        optimizer,
        training,
        config.seed,
        learning_rate=partial(learning_rate, steps=training.steps, peak=config.optimizer.lr, config=config.schedule),
        clip=config.optimizer.clip,
        network=compiled(sharing.computing, config),
        replayed=can_replay(config, micro_steps),
    )


def compiled(model: GPT, config: Config) -> Callable[..., Tensor]:
    """The model, compiled if the configuration says so."""
    if not config.training.compile:
        return model
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(is_no_reminder_of_policies)
    if config.parallel.data is DataParallel.replicate:
        return torch.compile(model, options=COMPILER_OPTIONS)
    # FSDP2 gathers weights between blocks, so blocks are compiled one by one; also on one rank, for the same bits.
    for block in (*model.h, *([] if model.further is None else [model.further.block])):
        # Without FSDP2's hooks, which block.compile() would trace.
        block.forward = torch.compile(block.forward, options=COMPILER_OPTIONS)
    return model


def is_no_reminder_of_policies(record: logging.LogRecord) -> bool:
    """Whether a record of torch's log is anything but the reminder that recomputed code with a policy, which is what
    model/blocks.py compiles, may contain no operator that works in place. It contains none."""
    return "context_fn is passed" not in record.getMessage()


def can_replay(config: Config, micro_steps: int) -> bool:
    """Whether a step on a GPU can be replayed as a CUDA graph."""
    training = config.training
    # A replay takes the generators' seed once, and each micro-step has a different one.
    reseeds = config.attention.rng is DropoutRng.torch and micro_steps > 1
    # Outside compiled code, recomputation saves the generators' states, which cannot be read while recording.
    recomputes = config.parallel.data is DataParallel.shard and training.recompute is not Recompute.none
    # A profile assigns kernels to the operations that launch them; a replay has no such operations.
    # Chunks that begin at each document are counted on the host; the package's kernels tune themselves.
    mixes = bool(config.model.mixers)
    return training.compile and not (reseeds or recomputes or mixes or training.profile)


def build_batches(config: Config, data: Data, trainer: Trainer) -> tuple[Source, list[Batch]]:
    """The training batches of this rank, and the batches for the validation loss.

    Raises ConfigError where documents are to be separated and there is only one.
    """
    T, training, documents = config.seq_len, config.training, config.data.documents is not Documents.ignore
    if isinstance(data, TaskData):
        windows = validation_batches(data.task, T, training.batch_size, training.eval_batches)
        return TaskBatches(data.task, T, trainer.global_batch, config.seed), windows
    if isinstance(data, PreparedData) and data.train.answers is not None:
        path, end, first = Path(str(config.data.path)).expanduser(), data.tokenizer.eot_token, len(data.train.documents)
        train = PackedRows(data.train, T, end, path)
        val = PackedRows(data.val, T, end, path, first)
        windows = chat_windows(val, training.batch_size, training.eval_batches)
        return ChatBatches(train, trainer.global_batch, config.seed), windows
    if data.parts:
        of_texts: list[Any] = [build_batches(config, part, trainer) for part in data.parts.values()]
        mixed = MixedBatches([source for source, _ in of_texts], list(config.data.mixture.values()))
        return mixed, [window for _, windows in of_texts for window in windows]
    if documents and len(data.train.documents) < 2:
        raise one_document(config)
    of_train, of_val = (split.documents if documents else None for split in (data.train, data.val))
    batches = Batches(data.train.tokens, T, trainer.global_batch, config.seed, of_train)
    count, span = training.eval_batches, training.eval_span
    return batches, eval_batches(data.val.tokens, T, training.batch_size, count, span, of_val)


def check_text(config: Config, data: Data) -> None:
    """Raise DataError where the tokens of a split do not fill a window of `seq_len`."""
    if isinstance(data, PreparedData) and data.train.answers is None:
        for text in data.parts.values() or [data]:
            check_window(text.train.tokens, config.seq_len, "training")
            check_window(text.val.tokens, config.seq_len, "validation")


def one_document(config: Config) -> ConfigError:
    """The error of a run that separates documents where the training text is a single one."""
    remedy = "choose another score=" if config.score.name == "documents" else "use data.documents=ignore"
    return ConfigError(
        f"data.documents={config.data.documents.name} has no effect on data={config.data.name}, whose training text is "
        f"one document; {remedy}, or text of more documents: files of a folder, or rows of .jsonl or .parquet."
    )


def build_run(config: Config, folder: Path, overrides: list[str], data: Data, trainer: Trainer, start: int) -> Run:
    """The run of a trainer, in its folder, that continues after `start` updates. Raises ConfigError, TrackingError."""
    batches, windows = build_batches(config, data, trainer)
    meter = build_meter(trainer, batches.stored(0).pieces())
    shape, first = attention_shape(config, trainer.device), trainer.world.rank == 0
    record = NullRecord(trainer)
    if first:  # the record keeps the run folder
        if not isinstance(data, TaskData):
            save_tokenizer(data.tokenizer, folder)
            if template := data.manifest["recipe"]["source"].get("template"):
                ChatTemplate(**template).save(folder)
        notes = [] if isinstance(data, TaskData) else data.notes
        origin = RunMetadata(as_plain(config), overrides, data.identity, shape, notes)
        record = Record(folder, config.tracking, trainer, meter, origin, start, again=config.resume is not None)
    profiler = Profiler(
        folder,
        trainer.device,
        profile=config.training.profile and first,
        start=start,
        steps=config.training.steps,
        print=record.print,
    )
    probe = ParityProbe(config.parity, config.attention, shape) if config.parity.every else None
    probes = build_probes(config, data)
    mixture = {
        path: (weight, build_batches(config, data.parts[path], trainer)[1])  # type: ignore[union-attr]
        for path, weight in config.data.mixture.items()
    }
    return Run(trainer, batches, windows, meter, probe, profiler, record, Interruption(), start, probes, mixture)


def build_probes(config: Config, data: Data) -> list[Recall]:
    """The probes of `probes=[...]`. Raises ConfigError and RecallError for one that does not fit the data."""

    def text() -> np.ndarray:
        if isinstance(data, TaskData):
            raise ConfigError(
                f"probes={PositionLoss.name} measures a text, and data={data.task.name} is none; leave it out."
            )
        return data.val.tokens

    return [build_recall(name, config.seq_len, data.vocab_size, config.data.name, text) for name in config.probes]


def build_meter(trainer: Trainer, pieces: Sequence[int]) -> StepMeter:
    """The meter of step times and operations.

    pieces  lengths of the documents that a sample of rows is cut into
    """
    T = trainer.model.seq_len
    return StepMeter(
        trainer.device,
        tokens_per_step=trainer.tokens_per_step,
        flops_per_token_full=flops_per_token(trainer.model, T, causal=False),
        flops_per_token_causal=flops_per_token(trainer.model, T, causal=True, pieces=pieces),
        precision=product_precision(trainer.training.precision.value, trainer.model.attend.config.allow_tf32),
        device_count=trainer.world.size,
    )


def find_checkpoint(config: Config, folder: Path, world: World) -> Path | None:
    """The newest valid checkpoint of a run to resume, if it has one: the same on every rank. Raises CheckpointError."""
    if config.resume is None or not any(folder.glob("checkpoints/step-*")):
        return None
    path, rejected = from_first_rank(lambda: newest_valid(folder / "checkpoints"))
    if world.rank == 0:
        print(*rejected, f"resuming from {path}", sep="\n")
    return path


def cpu_threads(config: Config, checkpoint: Path | None) -> int:
    """The number of threads of every rank on a CPU: as configured, else as in the checkpoint to resume, else as on the
    first rank."""
    recorded = None if checkpoint is None else read_manifest(checkpoint).metadata.get("cpu_threads")
    return config.training.cpu.threads or recorded or from_first_rank(torch.get_num_threads)


def restore(trainer: Trainer, config: Config, path: Path | None, data: Data) -> int:
    """Load a checkpoint, if there is one. Returns the updates done. Raises ConfigError or CheckpointError."""
    if path is None:
        return 0
    manifest = read_manifest(path)
    if manifest.metadata["data"] != data.identity:
        raise ConfigError(
            f"The text of data={config.data.name} has changed since {path}; start a new run without resume."
        )
    check_step_size(trainer, manifest.metadata, path)
    trainer.load(path)
    return manifest.step


def check_step_size(trainer: Trainer, metadata: dict[str, Any], path: Path) -> None:
    """Refuse steps whose size has changed with the number of ranks alone. Raises ConfigError."""
    then, now, training = metadata.get("tokens_per_step"), trainer.tokens_per_step, trainer.training
    unchanged = training.batch_tokens is None and training.batch_size == metadata["config"]["training"]["batch_size"]
    if then is not None and then != now and unchanged:
        smallest = trainer.model.seq_len * trainer.world.data_size  # tokens of one sequence for each rank
        fitting = next((n for n in range(training.batch_size, 0, -1) if then % (n * smallest) == 0), None)
        smaller = "" if fitting == training.batch_size else f" training.batch_size={fitting}"
        keep = f"training.batch_tokens={then}{smaller} to keep it, or " if fitting else ""
        raise ConfigError(
            f"{path} was trained with {then} tokens per step, and {trainer.world.size} ranks of "
            f"training.batch_size={training.batch_size} have {now}; set {keep}"
            f"training.batch_tokens={now} to continue with these."
        )
