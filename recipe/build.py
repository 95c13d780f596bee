"""The parts of a run, built from its configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from attention import AttentionShape, build_attention
from data.config import Documents
from model.gpt import GPT, Computation
from model.score import layer_scores
from recipe.config import Config
from recipe.device import resolve_precision
from recipe.distributed.world import World
from recipe.parity.probe import ParityProbe
from recipe.profiling.meters import StepMeter
from recipe.profiling.peaks import product_precision
from recipe.profiling.profiler import Profiler
from recipe.training.step import Trainer


def attention_shape(config: Config, device: torch.device) -> AttentionShape:
    """The requirements of the model, which is to be trained, for its attention."""
    return AttentionShape(
        head_dim=config.model.n_embd // config.model.n_heads,
        n_heads=config.model.n_heads,
        n_kv_heads=config.model.n_kv_heads or config.model.n_heads,
        dtype=resolve_precision(config.training.precision, device).dtype,
        device=device,
        scores=layer_scores(config.score, config.model.n_layers),
        documents=config.data.documents is not Documents.ignore,
        training=True,
    )


def build_gpt(config: Config, vocab_size: int, device: torch.device) -> GPT:
    """A model of the configuration, on the CPU, with random weights."""
    training = config.training
    precision = resolve_precision(training.precision, device)
    return GPT(
        config.model,
        vocab_size,
        config.seq_len,
        build_attention(config.attention),
        Computation(training.recompute, training.loss, training.residual_in_fp32, device, precision.dtype),
        score=config.score,
        documents=config.data.documents is not Documents.ignore,
        restart_positions=config.data.documents is Documents.restart,
    )


def build_model(config: Config, vocab_size: int, device: torch.device) -> GPT:
    """The model with its initial weights, drawn from the seed or loaded from `init_from`."""
    torch.manual_seed(config.seed)
    model = build_gpt(config, vocab_size, device)
    if config.init_from is not None:
        from model.gpt2_weights import load_gpt2  # the hub's client takes a tenth of a second to import

        load_gpt2(model, config.init_from)
    return model


def build_meter(trainer: Trainer, pieces: Sequence[int] | None = None) -> StepMeter:
    """The meter of step times and operations.

    pieces  lengths of the documents that a sample of rows is cut into; None: rows of one document
    """
    T = trainer.model.seq_len
    return StepMeter(
        trainer.device,
        tokens_per_step=trainer.tokens_per_step,
        flops_per_token_full=trainer.model.flops_per_token(T, causal=False),
        flops_per_token_causal=trainer.model.flops_per_token(T, causal=True, pieces=pieces),
        precision=product_precision(trainer.training.precision.value, trainer.model.attend.config.allow_tf32),
        device_count=trainer.world.size,
    )


def build_probe(config: Config, device: torch.device) -> ParityProbe | None:
    """The parity probe, if the configuration asks for one."""
    if not config.parity.every:
        return None
    return ParityProbe(config.parity, config.attention, attention_shape(config, device))


def build_profiler(
    config: Config, folder: Path, device: torch.device, start: int, print: Callable[[str], None]
) -> Profiler:
    """The profiler of some steps after `start`, on the first rank, if the configuration asks for it."""
    wanted, first = config.training, World.from_environment().rank == 0
    return Profiler(
        folder,
        device,
        profile=wanted.profile and first,
        memory_snapshot=wanted.memory_snapshot and first,
        start=start,
        steps=wanted.steps,
        print=print,
    )
