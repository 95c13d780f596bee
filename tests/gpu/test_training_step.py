"""The step on a GPU: replayed as a graph or not, it computes the same, and it never makes the host wait."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.testing import assert_close

from attention import AttentionConfig, DropoutKey, DropoutRng, build_attention
from attention.dropout import keep_mask
from attention.flash import op
from data.batches import Batch
from model.dropout import LAYER, draw_masks, drop
from model.gpt import GPT, Computation
from model.loss import LossKind, capped, cross_entropy
from model.options import GPTConfig, Recompute
from model.score import ScoreConfig
from model.softmax_kernel import launch_softmax_gradient
from recipe.distributed.world import World
from recipe.run.build import build_trainer
from recipe.run.config import Config
from recipe.training.device import Precision
from recipe.training.optimizer import OptimizerConfig, ScheduleConfig
from recipe.training.options import TrainingConfig
from recipe.training.step import WARMUP_CALLS
from tests.equal import assert_equal
from tests.gpu.needs import TWO_GPUS

DEVICE = torch.device("cuda")
T, B, VOCAB = 128, 4, 1000


def trainer(
    attention="flash",
    loss=LossKind.chunked,
    score=None,
    optimizer="adamw",
    rng=DropoutRng.replay,
    replayed=True,
    **options: Any,
):
    config = TrainingConfig(steps=20, batch_size=B, precision=Precision.bf16, compile=True, **options)
    torch.manual_seed(0)
    attention_config = AttentionConfig(name=attention, dropout=0.1, rng=rng)
    attend = build_attention(attention_config)
    size = GPTConfig(n_layers=2, n_heads=2, n_embd=128, dropout=0.1)
    computation = Computation(config.recompute, loss, device=DEVICE, dtype=torch.bfloat16)
    model = GPT(size, VOCAB, T, attend, computation, score=score)
    schedule = ScheduleConfig(warmup_steps=2)
    whole = Config(
        7, attention=attention_config, optimizer=OptimizerConfig(optimizer), schedule=schedule, training=config
    )
    built = build_trainer(whole, model, DEVICE, World())
    if not replayed:
        built.replay = None
    return built


def batch(step, micro_steps=1):
    tokens = torch.randint(VOCAB, (micro_steps, 2, B, T), generator=torch.Generator().manual_seed(step)).to(DEVICE)
    return [Batch(inputs, targets) for inputs, targets in tokens]


def assert_same_update(launched, replayed, step, batches):
    expected, given = launched.update(step, batches), replayed.update(step, batches)
    for name, value in expected.items():
        assert float(value) == float(given[name]), f"{name} of step {step}"


@pytest.mark.parametrize(
    "options",
    [
        *({"recompute": recompute} for recompute in Recompute),
        {"optimizer": "muon", "ema": 0.9, "batch_tokens": 5 * B * T},
        {"batch_tokens": 2 * B * T},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_a_replayed_step_is_bitwise_the_launched_one(options):
    launched, replayed = (trainer(replayed=graph, **options) for graph in (False, True))
    assert launched.replay is None
    assert replayed.replay is not None
    for step in range(WARMUP_CALLS + 4):
        assert_same_update(launched, replayed, step, batch(step, replayed.micro_steps))
    assert replayed.replay.graph is not None
    assert_equal(*({**x.state()["model"], **x.state()["training"]} for x in (launched, replayed)))


def test_a_compiled_step_around_attention_launches_its_kernel_once(monkeypatch):
    kernel, results = Mock(wraps=op.replayed), []
    monkeypatch.setattr(op, "replayed", kernel)
    for recompute, times in ((Recompute.block, 2), (Recompute.around_attention, 1)):
        torch.compiler.reset()
        trained = trainer(recompute=recompute, replayed=False)
        trained.update(0, batch(0))
        kernel.reset_mock()
        results.append({name: float(value) for name, value in trained.update(1, batch(1)).items()})
        forwards = [call for call in kernel.call_args_list if call.args[0] is op.compute_forward]
        assert len(forwards) == times * len(trained.model.h)
    assert results[1] == pytest.approx(results[0], rel=2**-8)  # compiled, they differ by bf16's rounding


@pytest.mark.parametrize("attention", ["naive", "tiled", "flash"])
def test_a_replayed_step_takes_the_documents_of_its_batch(attention):
    score = ScoreConfig(window=50, sinks=True, layers=[{}, {"window": None}])
    launched, replayed = (trainer(attention, score=score, replayed=graph) for graph in (False, True))
    for step in range(WARMUP_CALLS + 4):
        (inputs, targets, *_), first = batch(step)[0], 20 + 10 * step  # two documents in each row
        starts = first * (torch.arange(T, device=DEVICE) >= first).int().expand(B, T)
        assert_same_update(launched, replayed, step, [Batch(inputs, targets, starts.contiguous())])
    assert replayed.replay is not None
    assert replayed.replay.graph is not None


def test_micro_steps_with_torchs_generators_are_not_replayed():
    """They are seeded for each."""
    options: dict[str, Any] = {"attention": "sdpa", "rng": DropoutRng.torch}
    assert trainer(batch_tokens=2 * B * T, **options).replay is None
    assert trainer(**options).replay is not None


def test_a_replayed_step_counts_its_memory():
    trained = trainer()
    assert trained.replay is not None
    for step in range(WARMUP_CALLS + 1):
        torch.cuda.reset_peak_memory_stats()
        trained.update(step, batch(step))
        if step == WARMUP_CALLS - 1:
            launched = torch.cuda.max_memory_allocated()
    assert trained.replay.peak_bytes == pytest.approx(launched, rel=0.2)


@pytest.mark.parametrize(
    ("replayed", "optimizer", "ema"), [(True, "adamw", 0.0), (True, "muon", 0.9), (False, "muon", 0.9)]
)
def test_no_step_makes_the_host_wait(replayed, optimizer, ema):
    trained = trainer(replayed=replayed, optimizer=optimizer, ema=ema)
    batches = [batch(step) for step in range(10)]
    for step in range(WARMUP_CALLS + 2):
        trained.update(step, batches[step])
    try:
        torch.cuda.set_sync_debug_mode("error")
        for step in range(WARMUP_CALLS + 2, 10):
            trained.update(step, batches[step])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    trained.raise_failure()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_that_is_not_finite_changes_no_weight_in_a_replay_either(optimizer):
    trained = trainer(optimizer=optimizer)
    for step in range(WARMUP_CALLS + 1):
        trained.update(step, batch(step))
    with torch.no_grad():
        trained.model.get_parameter("ln_f.weight")[0] = torch.inf
    before = [p.clone() for p in trained.model.parameters()]
    trained.update(WARMUP_CALLS + 1, batch(WARMUP_CALLS + 1))
    assert trained.failure[0] == WARMUP_CALLS + 1
    assert_equal(list(trained.model.parameters()), before)


@pytest.mark.parametrize(
    ("n_sites", "B", "T", "C"), [(3, 2, 40, 96), (5, 1, 1, 30), (25, 2, 1024, 768), (1, 1, 4100, 1600)]
)
@pytest.mark.parametrize("p", [1 / 256, 0.1, 255 / 256])
def test_residual_masks_are_those_of_the_cpu(p, n_sites, B, T, C):
    key = DropoutKey(seed=1337, step=2, layer=0, first_sequence=5)
    for ours, theirs in zip(
        *(draw_masks(key, p, n_sites, B, T, C, torch.device(d)) for d in ("cuda", "cpu")), strict=True
    ):
        assert torch.equal(ours.bits.cpu(), theirs.bits)


@TWO_GPUS
def test_kernels_run_on_the_gpu_of_their_tensors():
    """Tensors on another GPU than the current one give the same results as on the current one."""
    key, results = DropoutKey(seed=1, step=2, layer=0, first_sequence=3), []
    for device in (torch.device("cuda:0"), torch.device("cuda:1")):
        x = torch.randn(5, 10_048, generator=torch.Generator().manual_seed(0)).to(device)
        losses = launch_softmax_gradient(x, torch.arange(5, device=device), 10_007)
        bits = draw_masks(key, 0.1, 3, 2, 40, 96, device)[0].bits
        results.append([tensor.cpu() for tensor in (x, losses, bits)])
    assert torch.cuda.current_device() == 0
    assert_equal(*results)


def test_compiled_residual_dropout_drops_by_the_keep_mask():
    n_sites, B, T, C = 5, 4, 100, 320
    key = DropoutKey(seed=1337, step=2, layer=0, first_sequence=5)
    x = torch.randn(B, T, C, device=DEVICE, requires_grad=True)

    @torch.compile(fullgraph=True)
    def dropped(x):
        for mask in draw_masks(key, 0.1, n_sites, B, T, C, DEVICE):
            x = 0.9 * drop(x, mask)
        return x

    out = dropped(x)
    keep = keep_mask(key.at_layer(LAYER), 0.1, B, n_sites, T, C, device=DEVICE)
    weight = torch.prod(keep * (0.9 * 256 / (256 - 26)), dim=1)
    assert_close(out, x * weight)
    out.sum().backward()
    assert_close(x.grad, weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_chunked_loss_is_as_exact_as_plain(dtype):
    generator = torch.Generator(DEVICE).manual_seed(0)
    hidden = torch.randn(3, 5000, 96, device=DEVICE, generator=generator, requires_grad=True)
    weight = torch.randn(10_048, 96, device=DEVICE, generator=generator).mul_(0.3).requires_grad_()
    targets = torch.randint(10_007, (3, 5000), device=DEVICE, generator=generator)
    targets[0, :100] = -100
    results = []
    for kind, kind_dtype in ((LossKind.plain, torch.float64), (LossKind.plain, dtype), (LossKind.chunked, dtype)):
        h, w = (t.detach().double().requires_grad_() if kind_dtype is torch.float64 else t for t in (hidden, weight))
        with torch.autocast("cuda", dtype, enabled=kind_dtype in (torch.bfloat16, torch.float16)):
            loss = cross_entropy(h, w, targets, 10_007, kind)
        results.append((loss, *torch.autograd.grad(1000 * loss, (h, w))))
    for exact, plain, chunked in zip(*results, strict=True):
        floor = 1e-6 * exact.norm()
        assert (chunked - exact).norm() <= 1.5 * (plain - exact).norm() + floor


@pytest.mark.whole_gpu
def test_chunked_loss_takes_a_fraction_of_the_memory():
    peaks = {}
    for kind in (LossKind.plain, LossKind.chunked):
        hidden = torch.randn(32_768, 256, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(50_304, 256, device=DEVICE, requires_grad=True)
        targets = torch.randint(50_257, (32_768,), device=DEVICE)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", torch.bfloat16):
            cross_entropy(hidden, weight, targets, 50_257, kind).backward()
        peaks[kind] = torch.cuda.max_memory_allocated() - before
    assert peaks[LossKind.chunked] < 1.2 * 2**30 < 12 * 2**30 < peaks[LossKind.plain]


@pytest.mark.parametrize(("vocab_size", "cap"), [(50_257, None), (50_257, 5.0), (8192, None), (100, 5.0)])
def test_softmax_kernel_equals_torchs(vocab_size, cap):
    x = 4 * torch.randn(300, -(-vocab_size // 64) * 64, device=DEVICE)
    targets = torch.randint(vocab_size, (300,), device=DEVICE)
    targets[::7] = -100
    logits = x[:, :vocab_size].clone().requires_grad_()
    expected = torch.nn.functional.cross_entropy(capped(logits, cap), targets, reduction="none")
    (gradient,) = torch.autograd.grad(expected.sum(), logits)
    assert_close(launch_softmax_gradient(x, targets, vocab_size, cap), expected.detach())
    assert_close(x[:, :vocab_size], gradient)
    assert not x[:, vocab_size:].any()


def test_the_loss_of_capped_logits_in_bf16_is_off_by_their_rounding_alone():
    x, targets = (4 * torch.randn(300, 50_304, device=DEVICE)).bfloat16(), torch.randint(50_257, (300,), device=DEVICE)
    logits = x[:, :50_257].double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(capped(logits, 15.0), targets, reduction="none")
    (gradient,) = torch.autograd.grad(expected.sum(), logits)
    assert (launch_softmax_gradient(x, targets, 50_257, 15.0) - expected).abs().max() < 15 * 2**-11
    assert (x[:, :50_257] - gradient).norm() < 1.1 * (gradient.bfloat16() - gradient).norm()
