"""The step is a function of its number, and the loop logs, saves, stops and fails where it should."""

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from attention import AttentionConfig, DropoutRng, build_attention
from data.batches import Batch, Batches
from data.tasks import TASKS
from model.gpt import GPT, Computation
from model.options import GPTConfig, Positions
from recipe.distributed.world import World
from recipe.run.build import build_trainer
from recipe.run.config import Config
from recipe.run.meters import StepMeter
from recipe.run.profiler import Profiler
from recipe.training import loop
from recipe.training.device import OutOfMemory, Precision, oom_guard
from recipe.training.interruption import Interruption
from recipe.training.loop import NullRecord, Run, fit, too_large_step
from recipe.training.optimizer import OptimizerConfig
from recipe.training.options import TrainingConfig
from recipe.training.recall import PositionLoss, Recall, TaskRecall
from recipe.training.step import NonFiniteError, Trainer

CPU = torch.device("cpu")
T, B, SEED = 32, 4, 7
TEXT = np.frombuffer(Path(os.__file__).read_bytes(), np.uint8)  # real text that every machine has
MODEL = GPTConfig(n_layers=2, n_heads=2, n_embd=32)
TRAINING = TrainingConfig(steps=20, batch_size=B, precision=Precision.fp32)
OPTIMIZER = OptimizerConfig(lr=3e-3)


def build(
    attention: AttentionConfig | None = None,
    model: GPTConfig = MODEL,
    optimizer: OptimizerConfig = OPTIMIZER,
    computation: Computation | None = None,
    **training: Any,
) -> Trainer:
    """A trainer whose other options are those of `training.*`."""
    torch.manual_seed(SEED)
    gpt = GPT(model, 256, T, build_attention(attention or AttentionConfig(dropout=0.1)), computation)
    config = Config(SEED, model=model, optimizer=optimizer, training=replace(TRAINING, **training))
    config.schedule.warmup_steps = 5
    return build_trainer(config, gpt, CPU, World())


def batches(trainer: Trainer) -> Batches:
    return Batches(TEXT, trainer.model.seq_len, trainer.global_batch, SEED)


def micro_batches(trainer: Trainer, step: int) -> list[Batch]:
    return [batches(trainer).stored(step, m).widened() for m in range(trainer.micro_steps)]


def losses(trainer: Trainer, steps: range) -> list[float]:
    return [float(trainer.update(step, micro_batches(trainer, step))["train/loss"]) for step in steps]


def weights(trainer: Trainer) -> list[Tensor]:
    return [p.detach().clone() for p in trainer.model.parameters()]


def equal(these: list[Tensor], those: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(these, those, strict=True))


def test_a_step_depends_on_its_number_and_the_weights_alone():
    model = replace(MODEL, dropout=0.2)
    straight, wandering = build(model=model), build(model=model)
    expected = losses(straight, range(4))
    assert losses(wandering, range(2)) == expected[:2]
    torch.manual_seed(99)  # other code draws random numbers and runs the model
    torch.rand(10)
    wandering.evaluate([batches(wandering).stored(50).widened()])
    assert losses(wandering, range(2, 4)) == expected[2:]
    assert equal(weights(straight), weights(wandering))


@pytest.mark.parametrize(
    ("attention", "dropout"),
    [(AttentionConfig(), 0.5), (AttentionConfig("sdpa", dropout=0.5, rng=DropoutRng.torch), 0.0)],
    ids=["replayed", "torch's"],
)
def test_dropout_differs_from_step_to_step_and_micro_step_to_micro_step(attention, dropout):
    trainer = build(attention, replace(MODEL, dropout=dropout))
    inputs, targets, *_ = batches(trainer).stored(0).widened()
    places = ((0, 0), (0, 1), (1, 0), (0, 0))
    keys = (trainer.dropout_key_for(*place) for place in places)
    assert len({trainer.model(inputs, targets, dropout_key=key).item() for key in keys}) == 3


def test_the_probe_compares_with_the_masks_of_the_step():
    trainer, probe = build(model=replace(MODEL, dropout=0.3)), Mock()
    (batch,) = micro_batches(trainer, 1)
    loop.compare(probe, trainer, 1, batch)
    model, _, key, _ = probe.measure.call_args.args
    expected = model(batch.inputs, batch.targets, dropout_key=key).item()
    assert losses(trainer, range(1, 2)) == pytest.approx([expected], abs=1e-6)


def test_accumulated_micro_batches_are_one_batch_with_the_same_masks():
    model = replace(MODEL, dropout=0.2)
    whole = build(model=model, batch_size=8)
    parts = build(model=model, batch_size=2, batch_tokens=8 * T)
    assert (whole.micro_steps, parts.micro_steps) == (1, 4)
    assert losses(parts, range(3)) == pytest.approx(losses(whole, range(3)), rel=1e-6)
    for a, b in zip(weights(whole), weights(parts), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("culprit", ["loss", "gradient"])
def test_a_step_that_is_not_finite_stops_before_its_update_and_is_named(culprit):
    trainer, reference = build(), build()
    losses(reference, range(4))
    losses(trainer, range(4))
    if culprit == "gradient":
        handle = next(trainer.model.parameters()).register_hook(lambda gradient: gradient * torch.nan)
    else:
        handle = trainer.model.ln_f.register_forward_hook(lambda *arguments: arguments[-1] * torch.inf)
    losses(trainer, range(4, 5))
    handle.remove()
    losses(trainer, range(5, 8))
    # Later steps were finite again, and nothing checked in between: the first bad step is still reported and undone.
    with pytest.raises(NonFiniteError, match=r"Step 5 was not finite \(loss .*, gradient norm nan\)"):
        trainer.raise_failure()
    assert equal(weights(trainer), weights(reference))


def test_an_overflow_of_scaled_gradients_is_skipped_with_a_smaller_scale():
    trainer = build(precision=Precision.fp16)
    trainer.scale.fill_(2.0**40)
    before = weights(trainer)
    trainer.update(0, micro_batches(trainer, 0))
    trainer.raise_failure()
    assert equal(weights(trainer), before)
    assert trainer.scale.item() == 2.0**39
    trainer.scale.fill_(2.0**8)
    trainer.update(1, micro_batches(trainer, 1))
    assert not equal(weights(trainer), before)


@pytest.mark.parametrize("precision", [Precision.bf16, Precision.fp16])
def test_half_precision_trains_like_full_precision(precision):
    assert losses(build(precision=precision), range(5)) == pytest.approx(losses(build(), range(5)), abs=0.02)


def test_evaluation_is_the_mean_loss_without_dropout_and_changes_nothing():
    trainer = build(model=replace(MODEL, dropout=0.3))
    windows = [batches(trainer).stored(step).widened() for step in (10, 11)]
    before = weights(trainer)
    measured = trainer.evaluate(windows)
    model = trainer.model.eval()
    with torch.no_grad():
        logits = torch.cat([model(inputs) for inputs, *_ in windows]).flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, torch.cat([t for _, t, *_ in windows]).flatten())
    assert measured == pytest.approx(expected.item(), rel=1e-6)
    assert equal(weights(trainer), before)


class Recorder(NullRecord):
    """Records the calls of the loop, and can run a function at a step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(build(**options))
        self.events: list[tuple[str, int, Any]] = []
        self.at: dict[int, Any] = {}

    def log(self, n: int, metrics: dict[str, Any]) -> None:
        self.events.append(("log", n, metrics))
        self.at.get(n, lambda: None)()

    def save(self, n: int, val_loss: float | None) -> None:
        self.events.append(("save", n, val_loss))

    def steps(self, kind: str, metric: str = "") -> list[int]:
        return [n for event, n, content in self.events if event == kind and (not metric or metric in content)]


def run(recorder: Recorder, interruption: Interruption | None = None, probes: Sequence[Recall] = ()) -> int:
    trainer = recorder.trainer
    profiler = Profiler(Path(), CPU, profile=False, start=0, steps=trainer.training.steps)
    work: dict[str, Any] = {"tokens_per_step": B * T, "flops_per_token_full": 1.0, "flops_per_token_causal": 1.0}
    meter, windows = StepMeter(CPU, **work, precision="fp32"), [batches(trainer).stored(100).widened()]
    parts = trainer, batches(trainer), windows, meter, None, profiler, recorder, interruption or Interruption()
    return fit(Run(*parts, recalls=probes))


def test_lines_evaluations_and_checkpoints_come_when_they_are_due():
    recorder = Recorder(steps=11, log_every=3, eval_every=4, checkpoint_every=5)
    assert run(recorder) == 11
    assert recorder.steps("log") == [0, 3, 4, 5, 6, 8, 9, 10, 11]
    logged = {n: line["train/loss"] for event, n, line in recorder.events if event == "log" and n}
    expected = losses(build(steps=11), range(11))
    assert logged == {n: expected[n - 1] for n in recorder.steps("log")[1:]}  # of the line's own update
    assert recorder.steps("log", "val/loss") == [0, 4, 8, 11]
    assert recorder.steps("save") == [5, 10, 11]
    # A checkpoint is written after its step is logged, and has a validation loss only if that step was evaluated.
    assert [event for event, n, _ in recorder.events if n == 11] == ["log", "save"]
    val_loss = {n: content for event, n, content in recorder.events if event == "save"}
    assert val_loss[5] is None
    assert val_loss[11] == recorder.events[-2][2]["val/loss"]


def test_a_run_ends_at_the_first_evaluation_that_reaches_its_target():
    training = {"steps": 11, "log_every": 100, "eval_every": 2, "checkpoint_every": 100}
    whole = Recorder(**training)
    assert run(whole) == 11
    assert whole.reached is None
    losses = {n: content["val/loss"] for event, n, content in whole.events if event == "log"}
    assert losses[6] < losses[4]
    recorder = Recorder(**training, target_loss=losses[6])
    assert run(recorder) == 6
    assert recorder.reached == 6
    assert recorder.steps("save") == [6]


def test_probes_come_with_every_evaluation_and_change_no_bit_of_the_training():
    model = replace(MODEL, positions=Positions.rotary, dropout=0.1)
    plain, probed = (Recorder(model=model, steps=6, log_every=1, eval_every=3) for _ in range(2))
    run(plain)
    run(probed, probes=[TaskRecall(TASKS["needle"], T), PositionLoss(TEXT[:4000], T)])
    assert probed.steps("log", "probe/needle") == probed.steps("log", "probe/in_context_score") == [0, 3, 6]
    assert probed.steps("log", "probe/needle_x8") == probed.steps("log", "probe/loss_beyond_x8") == [6]
    assert probed.details.keys() == {"needle", "position_loss"}
    first, second = (
        [found.get("train/loss") for event, _, found in recorder.events if event == "log"]
        for recorder in (plain, probed)
    )
    assert first == second
    assert equal(weights(plain.trainer), weights(probed.trainer))


def test_the_time_of_logging_counts_as_training_and_that_of_saving_does_not():
    recorder, pause = Recorder(steps=9, log_every=1, eval_every=0, checkpoint_every=3), 0.5
    recorder.at = {n: lambda: time.sleep(pause) for n in (4, 6)}  # after step 6 a checkpoint is saved
    run(recorder)
    seconds = {n: line["throughput/step_ms"] / 1e3 for event, n, line in recorder.events if event == "log" and n > 3}
    assert seconds[5] > pause
    assert seconds[7] < pause


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_ends_the_run_after_the_step_with_a_checkpoint(number):
    recorder, before = Recorder(log_every=1, eval_every=0, checkpoint_every=1000), signal.getsignal(number)
    handlers = []
    recorder.at[3] = lambda: os.kill(os.getpid(), number)
    recorder.at[4] = lambda: handlers.append(signal.getsignal(number))
    interruption = Interruption()
    assert run(recorder, interruption) == 4
    assert interruption.number == number
    assert handlers == [before]  # a second one acts at once
    assert recorder.events[-1][:2] == ("save", 4)


@pytest.fixture
def group():
    """Ranks that ask each other, of which this process is the only one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_a_signal_that_comes_while_ranks_ask_each_other_counts_after_the_next_step(monkeypatch):
    """The other ranks did not learn of it in this exchange, and would continue alone."""
    reduce = dist.all_reduce

    def interrupted(number, op, async_op):
        work = reduce(number, op, async_op=async_op)
        work.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        return work

    with Interruption() as interruption:
        monkeypatch.setattr(dist, "all_reduce", interrupted)
        assert not interruption.agreed(waits=True)
        monkeypatch.undo()
        assert interruption.agreed(waits=True)
        assert interruption.number == signal.SIGTERM


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(("step_s", "asked"), [(0.01, 6), (0.5, 50), (2.0, 100)])
def test_ranks_ask_each_other_about_once_a_second_and_a_signal_ends_the_run_within_a_step_and_a_second(
    monkeypatch, step_s, asked
):
    reduce, calls, now = dist.all_reduce, list[float](), 0.0

    def counted(number, op, async_op):
        calls.append(now)
        return reduce(number, op, async_op=async_op)

    monkeypatch.setattr(dist, "all_reduce", counted)
    with Interruption(clock=lambda: now) as interruption:
        for _ in range(100):
            now += step_s
            assert not interruption.agreed(waits=False)
        assert len(calls) == asked
        now += step_s
        assert not interruption.agreed(waits=True)  # a host asks before it waits for its device
        assert len(calls) == asked + 1
        os.kill(os.getpid(), signal.SIGTERM)
        received = now
        now += step_s
        while not interruption.agreed(waits=False):
            now += step_s
        assert now - received <= step_s + 1


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        MemoryError(),
        RuntimeError("[enforce] can't allocate memory: 9"),
        RuntimeError("can't start new thread"),
    ],
)
def test_running_out_of_memory_ends_with_a_sentence_on_smaller_settings(error):
    sentence = r"attention=naive with seq_len=32 and training.batch_size=4 .*tiled"
    with pytest.raises(OutOfMemory, match=sentence), oom_guard(too_large_step(build())):
        raise error
    assert "tiled or sdpa" not in too_large_step(build(AttentionConfig("tiled")))  # whose memory is linear


def test_other_errors_are_not_taken_for_a_lack_of_memory():
    with pytest.raises(RuntimeError, match="another"), oom_guard("too large"):
        raise RuntimeError("another")


@pytest.mark.parametrize(("seconds", "printed"), [(6.0, ["about 61 minutes for 100 steps on this CPU"]), (0.5, [])])
def test_a_long_run_on_a_cpu_says_its_time_in_advance(monkeypatch, seconds, printed):
    """100 steps of two micro-batches, each as long as three evaluations of one; and three evaluations of four."""
    monkeypatch.setattr(loop, "time_of", lambda work: seconds)
    training = TrainingConfig(steps=100, eval_every=50)
    trainer = SimpleNamespace(device=CPU, world=World(), training=training, micro_steps=2)
    lines: list[str] = []
    record = SimpleNamespace(print=lines.append)
    loop.announce_cost(SimpleNamespace(trainer=trainer, windows=[None] * 4, start=0, record=record))  # type: ignore[arg-type]
    assert lines == printed
