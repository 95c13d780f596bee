"""The probe on a GPU: it changes no compiled or replayed step, and stays within its memory."""

import gc

import pytest
import torch

from attention import AttentionConfig, AttentionShape, build_attention
from data.batches import Batch
from model.gpt import GPT, Computation
from model.options import GPTConfig
from recipe.distributed.world import World
from recipe.run.build import build_trainer
from recipe.run.config import Config
from recipe.run.meters import StepMeter
from recipe.training.device import Precision
from recipe.training.loop import compare
from recipe.training.optimizer import ScheduleConfig
from recipe.training.options import TrainingConfig
from recipe.training.parity import beyond_rounding
from recipe.training.parity_probe import ParityConfig, ParityProbe
from tests.equal import assert_equal

VOCAB, B, T, H, D = 1000, 4, 256, 2, 64


def clear_memory():
    """Free what earlier trainers left: compiled code and its caches hold on to models and their graphs' memory."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def cleared():
    clear_memory()


def shape(device, dtype=torch.bfloat16):
    return AttentionShape(head_dim=D, n_heads=H, n_kv_heads=H, dtype=dtype, device=device)


@pytest.fixture
def device():
    return torch.device("cuda", torch.cuda.current_device())


def trainer(device, attention, precision=Precision.bf16, **options):
    torch.manual_seed(0)
    size = GPTConfig(n_layers=2, n_heads=H, n_embd=H * D, dropout=0.1)
    model = GPT(size, VOCAB, T, build_attention(attention), Computation(device=device))
    training = TrainingConfig(steps=100, batch_size=B, precision=precision, **options)
    return build_trainer(Config(7, schedule=ScheduleConfig(warmup_steps=2), training=training), model, device, World())


def batch(step, device):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB, (B, 1), generator=generator) * torch.arange(1, T + 2) % VOCAB  # something to learn
    return Batch(tokens[:, :-1].to(device), tokens[:, 1:].to(device))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_run_with_the_probe_is_bitwise_the_run_without_it(compiled, device):
    config = AttentionConfig(name="flash", dropout=0.1)
    probe = ParityProbe(ParityConfig(every=3), config, shape(device))
    histories, peaks = [], []
    # The first run only makes cuBLAS allocate its workspaces, one for each stream, which it keeps until the end.
    for probed in (True, False, True):
        kept = torch.cuda.memory_allocated(device) / 2**30
        trained = trainer(device, config, compile=compiled)
        meter = StepMeter(
            device, tokens_per_step=B * T, flops_per_token_full=1, flops_per_token_causal=1, precision="bf16"
        )
        losses = []
        for step in range(9):
            meter.step_start()
            if probed and probe.is_due(step):
                with meter.paused():
                    compare(probe, trained, step, batch(step, device))
                meter.step_start()
            losses += [float(value) for value in trained.update(step, [batch(step, device)]).values()]
            meter.step_end()
        meter.interval()
        peaks.append(meter.peaks()["memory/peak_allocated_gib"] - kept)
        histories.append((losses, [p.clone() for p in trained.model.parameters()]))
        del trained
        clear_memory()
    _, (plain, weights), (watched, theirs) = histories
    assert watched == plain
    assert_equal(weights, theirs)
    assert peaks[2] == pytest.approx(peaks[1], rel=0.2)


@pytest.mark.parametrize("precision", [Precision.fp32, Precision.bf16])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_flash_is_naive_up_to_rounding(dropout, precision, device):
    config = AttentionConfig(name="flash", dropout=dropout)
    trained = trainer(device, config, precision)
    probe = ParityProbe(ParityConfig(every=10), config, shape(device, precision.dtype))
    for step in range(31):
        if probe.is_due(step):
            measured = compare(probe, trained, step, batch(step, device))
            assert measured["parity/grad_rel_err"] > 0
            if step == 0:  # rounding, and not other masks in another precision
                assert measured["parity/noise_grad_rel_err"] < (1e-4 if precision is Precision.fp32 else 0.1)
            assert beyond_rounding(measured) is None, measured
        trained.update(step, [batch(step, device)])


@pytest.mark.whole_gpu  # the probe takes as much as is free
def test_a_reference_that_does_not_fit_gets_less(device):
    config = AttentionConfig(name="flash")
    trained = trainer(device, config)
    # Hundreds of MiB: far more than the allocator keeps in segments that are partly in use.
    large = batch(0, device).map(lambda x: x.repeat(16, 1))
    probe = ParityProbe(ParityConfig(every=1), config, shape(device))

    def compared():
        measured = probe.measure(trained.model, large, trained.key)
        sequences, tokens = measured["parity/tokens"]
        return sequences * tokens

    assert compared() == large.inputs.numel()
    clear_memory()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    assert compared() == large.inputs.numel()
    wanted = torch.cuda.max_memory_allocated(device) - before
    # free_memory does not see this limit, so the probe meets it by running out. Segments that are partly in use, by
    # other tests too, stay reserved, and the probe may use what is free in them.
    reserved, total = torch.cuda.memory_reserved(device), torch.cuda.get_device_properties(device).total_memory
    assert reserved - before < wanted, "the memory reserved already is enough, whatever the limit"
    limit = (reserved + before + wanted) / 2
    torch.cuda.set_per_process_memory_fraction(limit / total, device)
    try:
        assert compared() < large.inputs.numel()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
