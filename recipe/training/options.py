"""The options of training, and mistakes in them."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from data.batches import GlobalBatch
from model.options import Recompute
from recipe.distributed.world import World
from recipe.training.device import Precision


@dataclass
class CPUConfig:
    """The option `training.cpu`.

    threads     of each process; None: the resumed checkpoint's, else OMP_NUM_THREADS, else one for each core
    memory_gib  limit of the process's memory
    """

    threads: int | None = None
    memory_gib: float | None = None


@dataclass
class TrainingConfig:
    """The options under `training.*`.

    steps             updates of the weights
    batch_size        sequences per rank and micro-batch
    batch_tokens      tokens of one step over all micro-batches and ranks; None: one micro-batch per rank
    precision         precision of the model's computations
    compile           torch.compile the model; on a GPU a step is then replayed as a CUDA graph
    recompute         the part that the backward pass recomputes: less memory, more time
    residual_in_fp32  in half precision, keep the residual stream in fp32: more exact and slower
    log_every         steps between two lines of metrics.jsonl
    eval_every        steps between two evaluations, the first before training, the last after it; 0: none
    eval_batches      micro-batches of one evaluation, divided among the ranks
    target_loss       end at the first evaluation with a validation loss of at most this; None: train all steps
    eval_span         tokens of validation text taken in one piece, a multiple of seq_len; None: one window
    checkpoint_every  steps between two checkpoints, the last after training; 0: none
    keep_last         checkpoints to keep, in addition to the best
    sample_tokens     tokens of text to print after training; 0: none
    cpu               how a run on a CPU computes
    ema               decay of a moving average of the weights, evaluated and saved beside them; 0: none
    profile           record the time of a few steps by category
    """

    steps: int = 900
    batch_size: int = 12
    batch_tokens: int | None = None
    precision: Precision = Precision.auto
    compile: bool = False
    recompute: Recompute = Recompute.none
    residual_in_fp32: bool = True
    log_every: int = 10
    eval_every: int = 200
    eval_batches: int = 20
    target_loss: float | None = None
    eval_span: int | None = None
    checkpoint_every: int = 500
    keep_last: int = 2
    sample_tokens: int = 200
    cpu: CPUConfig = field(default_factory=CPUConfig)
    ema: float = 0.0
    profile: bool = False

    def share(self, seq_len: int, world: World) -> GlobalBatch:
        """The sequences of a step, and this rank's."""
        tokens = self.batch_size * seq_len * world.data_size
        micro_steps = 1 if self.batch_tokens is None else self.batch_tokens // tokens
        return GlobalBatch(self.batch_size, world.data_rank, world.data_size, micro_steps)

    def is_due(self, every: int, n: int) -> bool:
        """Whether work that is due every so many steps (0: never) is due after n updates; always due after the last."""
        return every > 0 and (n % every == 0 or n == self.steps)


def training_mistakes(config: TrainingConfig, seq_len: int, world: World) -> Iterator[str]:
    """A sentence for each value that cannot train, with the change that helps. `seq_len` is at least 1."""
    lowest = {"steps": 1, "batch_size": 1, "log_every": 1, "eval_every": 0, "eval_batches": 1}
    lowest |= {"checkpoint_every": 0, "keep_last": 1, "sample_tokens": 0}
    for name, least in lowest.items():
        if getattr(config, name) < least:
            yield f"training.{name}={getattr(config, name)} must be at least {least}."
    if config.cpu.threads is not None and config.cpu.threads < 1:
        yield f"training.cpu.threads={config.cpu.threads} must be at least 1, or null for the usual number."
    if config.cpu.memory_gib is not None and not config.cpu.memory_gib > 0:
        yield f"training.cpu.memory_gib={config.cpu.memory_gib} must be above 0, or null for no limit."
    if not 0 <= config.ema < 1:
        yield f"training.ema={config.ema} must lie in [0, 1), such as 0.999; 0 keeps no average."
    if config.target_loss is not None and not config.target_loss > 0:
        yield f"training.target_loss={config.target_loss} must be above 0, or null to train all steps."
    if config.target_loss is not None and config.eval_every == 0:
        yield "training.target_loss is reached at an evaluation, and training.eval_every=0 has none; set it."
    micro_batch = max(config.batch_size, 1) * seq_len * world.data_size
    ranks = f" * {world.data_size} ranks" if world.data_size > 1 else ""
    of_micro_batch = f"training.batch_size={config.batch_size} * seq_len={seq_len}{ranks}"
    units = {
        "eval_span": (seq_len, f"seq_len={seq_len}"),
        "batch_tokens": (micro_batch, f"the {micro_batch} tokens of a micro-batch ({of_micro_batch})"),
    }
    for name, (unit, what) in units.items():
        value = getattr(config, name)
        if value is not None and (value < 1 or value % unit):
            use = f"use training.{name}={max(1, round(value / unit)) * unit}"
            yield f"training.{name}={value} is not a multiple of {what}; {use}."
