"""The record of a run: its metrics, its checkpoints and, at the end, its summary."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attention import Attention, AttentionShape, DropoutKey, Layout, documents
from attention.from_file import digest_of, file_of, is_in_file
from data.atomic import write_atomically
from model.counting import num_parameters
from recipe.distributed.world import World
from recipe.errors import refusals, sentence_of
from recipe.run.memory import AllocationMeter
from recipe.run.meters import GIB, StepMeter, process_peak
from recipe.run.metrics import read_metrics
from recipe.run.run_folder import write_recorded
from recipe.run.summary import environment, write_summary
from recipe.run.tracker import Tracker, TrackingConfig
from recipe.training.ablation import measure as measure_ablation
from recipe.training.checkpoint import save_checkpoint
from recipe.training.device import OutOfMemory
from recipe.training.loop import NullRecord
from recipe.training.parity import summarise
from recipe.training.step import NonFiniteError, Trainer


@dataclass(frozen=True)
class RunMetadata:
    """The origin of a run.

    config     as plain values
    overrides  of the command line
    data       identity of the prepared tokens
    shape      the model's requirements for its attention
    path       the kernels of its attention
    notes      sentences on what is amiss with the text
    """

    config: dict[str, Any]
    overrides: list[str]
    data: str
    shape: AttentionShape
    path: str | None
    notes: list[str]


class Record(NullRecord):
    """Keeps a run folder, and writes its summary.json at the end of the `with` block, also after an exception."""

    def __init__(
        self,
        folder: Path,
        tracking: TrackingConfig,
        trainer: Trainer,
        meter: StepMeter,
        origin: RunMetadata,
        start: int,
        again: bool,
    ) -> None:
        """
        start  updates done already
        again  whether the folder belongs to this run; lines logged beyond `start` are then replaced
        """
        super().__init__(trainer)
        self.folder, self.meter, self.origin = folder, meter, origin
        self.environment = environment(trainer.device, trainer.world.size)
        if again and start == 0:
            (folder / "metrics.jsonl").unlink(missing_ok=True)
        name, self.attention_file = origin.config["attention"]["name"], None
        if is_in_file(name):  # its copy is to read; nothing imports it
            file = file_of(name)
            write_atomically(folder / file.name, file.read_bytes())
            self.attention_file = digest_of(file)
        # Written before metrics.jsonl, because a sweep only continues a run with recorded overrides.
        write_recorded(folder, origin.config, origin.overrides)
        self.tracker = Tracker(
            folder,
            tracking,
            recorded=origin.config | self.environment,
            steps=trainer.training.steps,
            resume_step=start or None,
        )
        self.step = self.start = start
        self.started = datetime.now(UTC)
        lines = read_metrics(folder / "metrics.jsonl")
        # The time that the run took before it was resumed.
        last = lines[-1] if lines else {"throughput/elapsed_s": 0.0}
        self.clock_zero = time.monotonic() - last["throughput/elapsed_s"]
        self.tokens_before = int(last.get("train/tokens", start * meter.tokens_per_step))

    @property
    def elapsed(self) -> float:
        """Seconds of the run, including those before it was resumed."""
        return time.monotonic() - self.clock_zero

    @property
    def tokens(self) -> int:
        """Tokens that the run has trained on, those before it was resumed included."""
        return self.tokens_before + (self.step - self.start) * self.meter.tokens_per_step

    def print(self, text: str) -> None:
        self.tracker.print(text)

    def log(self, n: int, metrics: dict[str, Any]) -> None:
        self.step = n
        self.tracker.log(n, metrics | {"train/tokens": self.tokens, "throughput/elapsed_s": self.elapsed})

    def save(self, n: int, val_loss: float | None) -> None:
        save_checkpoint(
            self.folder / "checkpoints",
            self.trainer.state(),
            n,
            keep_last=self.trainer.training.keep_last,
            metadata={
                "val_loss": val_loss,
                "config": self.origin.config,
                "data": self.origin.data,
                "attention_file": self.attention_file,
                "tokens_per_step": self.trainer.tokens_per_step,
                "cpu_threads": torch.get_num_threads() if self.trainer.device.type == "cpu" else None,
            },
        )

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        ended = self.step >= self.trainer.training.steps or self.reached is not None
        if isinstance(error, OutOfMemory):
            status = "out_of_memory"
        elif isinstance(error, KeyboardInterrupt) or (error is None and not ended):
            status = "interrupted"
        else:
            status = "completed" if error is None else "failed"
        sentence = None if error is None else repr(error)
        if isinstance(error, refusals()):
            sentence = sentence_of(error)
        non_finite_step = error.step if isinstance(error, NonFiniteError) else None
        with self.tracker:
            self.tracker.finish(self.summary(status, sentence, non_finite_step))

    def summary(self, status: str, message: str | None, non_finite_step: int | None) -> dict[str, Any]:
        """The content of summary.json. Losses come from all lines of metrics.jsonl, also from before a resume."""
        trainer, lines = self.trainer, read_metrics(self.folder / "metrics.jsonl")
        evaluated = [(float(line["val/loss"]), line["step"]) for line in lines if "val/loss" in line]
        best_val_loss, best_val_step = min((e for e in evaluated if math.isfinite(e[0])), default=(None, None))
        last = {name: value for line in lines for name, value in line.items()}
        return {
            "status": status,
            "message": message,
            "non_finite_step": non_finite_step,
            "attention": trainer.model.attend.name,
            "attention_exact": trainer.model.attend.exact,
            "attention_path": self.origin.path,
            "config": self.origin.config,
            "overrides": self.origin.overrides,
            "data_notes": self.origin.notes,
            "step": self.step,
            "steps": trainer.training.steps,
            "train_loss": last.get("train/loss"),
            "val_loss": last.get("val/loss"),
            "val_loss_ema": last.get("val/loss_ema"),
            "best_val_loss": best_val_loss,
            "best_val_step": best_val_step,
            "target": self._target(),
            "median": self.meter.medians(),
            **self._memory(status),
            "flops_per_token": self.meter.flops_per_token["causal"],
            "parity": summarise(lines),
            "probes": self.details,
            "ablation": measure_ablation(trainer.model.attend.config),
            "wall_time_s": self.elapsed,
            "tokens": self.tokens,
            "parameters": num_parameters(trainer.model),
            "precision": trainer.training.precision.value,
            **self.environment,
            "started": self.started.isoformat(timespec="seconds"),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        }

    def _target(self) -> dict[str, float] | None:
        """The cost of reaching training.target_loss; None where there is no target, or the run did not reach it.

        Its seconds count training alone: steps times their median, without evaluation and compilation.
        """
        if self.reached is None:
            return None
        milliseconds = self.meter.medians().get("throughput/step_ms", math.nan)
        return {"step": self.reached, "tokens": self.tokens, "seconds": self.reached * milliseconds / 1e3}

    def _memory(self, status: str) -> dict[str, Any]:
        """The memory's peak and its source.

        A CPU has no counter of a model's memory: there the peak is that of one layer's attention alone, beside that of
        the process. Attention whose formula reads tensors of the model is not measured alone, nor are mixers.
        """
        model, shape = self.trainer.model, self.origin.shape
        if shape.device.type != "cpu":
            return {"peak": self.meter.peaks(), "memory_source": "cuda"}
        formulas = [score for score in shape.scores if score.formula is not None]
        possible = bool(shape.scores) and not any(len(score.tensors()) > len(score.head_tensors) for score in formulas)
        peak = dict[str, float]()
        if possible and status in ("completed", "interrupted"):
            alone = attention_peak(model.attend, shape, self.trainer.training.batch_size, model.seq_len)
            peak["memory/peak_allocated_gib"] = alone / GIB
        return {"peak": peak, "memory_source": "attention" if peak else None, "process_peak_gib": process_peak() / GIB}


@contextmanager
def recorded_out_of_memory(
    folder: Path, config: dict[str, Any], overrides: list[str], device: torch.device, world: World
) -> Iterator[None]:
    """Enter while the model is built, before there is a record. If it runs out of memory, a summary.json is written,
    because that is a result of a sweep."""
    try:
        yield
    except OutOfMemory as error:
        if world.rank == 0:
            write_recorded(folder, config, overrides)
            summary = {
                "status": "out_of_memory",
                "message": str(error),
                "step": 0,
                "steps": config["training"]["steps"],
                "attention": config["attention"]["name"],
                "config": config,
                "overrides": overrides,
            }
            write_summary(folder / "summary.json", summary | environment(device, world.size))
        raise


def attention_peak(attend: Attention, shape: AttentionShape, B: int, T: int) -> int:
    """Bytes that a forward and backward pass of `attend` over B sequences of T tokens takes at its peak, above q, k, v
    and the output's gradient: saved tensors, workspace, output and gradients.

    The score is the first layer's, and dropout is as `attend` was configured. Leaves the generators alone.
    """
    score, generator = shape.scores[0], torch.Generator(shape.device).manual_seed(0)

    def random(heads: int) -> Tensor:
        x = torch.randn(B, heads, T, shape.head_dim, generator=generator, device=shape.device)
        return x.to(shape.dtype).requires_grad_()

    q, k, v = random(shape.n_heads), random(shape.n_kv_heads), random(shape.n_kv_heads)
    do = torch.ones_like(q)
    tensors = {
        tensor.name: torch.zeros(shape.n_heads, device=shape.device, requires_grad=True)
        for tensor in score.head_tensors
        if tensor.learned
    }
    layout = documents(torch.zeros(B, T, dtype=torch.int32, device=shape.device)) if shape.documents else Layout()
    key = DropoutKey(seed=0, step=0, layer=0, first_sequence=0)
    with torch.random.fork_rng(devices=[]), AllocationMeter() as meter:
        out = attend(q, k, v, score=score, layout=layout, dropout_key=key, tensors=tensors).out
        torch.autograd.grad(out, (q, k, v), do)
    return meter.peak
