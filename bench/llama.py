"""Llama's block at the sizes of its presets: 1.2 billion parameters on a GPU, and 162 million on a CPU.

    python -m bench.llama --cases train     1B, 8 x 4,096 tokens a step, bf16: tokens/s and MFU, two minutes
    python -m bench.llama --cases decode    1B, one prompt, bf16, beside the bandwidth bound, a minute
    python -m bench.llama --cases cpu       160M in fp32, steps of 512 and 2,048 tokens, beside transformers' eager

train   train.py with model=llama-1b attention=flash and torch.compile, the residual stream in bf16 and in fp32; the
        median step counts. MFU is a share of the peak for dense bf16 products; it counts the operations of causal or
        of full attention, as torchtitan does
decode  a prompt of 337 tokens continued by 512, greedily, weights in bf16, compiled. The bound is the GPU's bandwidth
        over the bytes that each token reads: all weights, of which the embedding is the head too
cpu     a step of one sequence is forward, backward, clipping and AdamW. Steps alternate; the median counts. Ours has
        attention=sdpa, and training.cpu_products=onednn except where it says "BLAS"

Results go to bench/results/llama-<device>.json.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from bench.generate.__main__ import ours, random_prompts
from bench.machine import device_name, require_gpu
from bench.measure import synchronise
from bench.record import Recorder, Row, command_line, command_of, measurement, result_file
from bench.runs import train
from data.batches import Batch
from model.counting import num_parameters
from model.linear import products_by
from recipe.distributed.world import World
from recipe.infer.generation import Sampling
from recipe.run.build import build_model, build_trainer
from recipe.run.compose import composed, to_config
from recipe.run.tracker import TrackingMode

# Bytes per second: NVIDIA's datasheets of the H200 SXM and of the H100 SXM.
BANDWIDTHS = {"H200": 4.8e12, "H100": 3.35e12}
ONE_B, VOCABULARY = "model=llama-1b", 128_256
PROMPT, ADDED = 337, 512
SMALL_VOCABULARY, CPU_TOKENS = 32_000, (512, 2048)  # 2,048: the longest input of llama-160m
ONEDNN = "training.cpu_products=onednn"
OURS = {"": [ONEDNN], ", compiled": [ONEDNN, "training.compile=true"], ", BLAS": []}


def trained(steps: int, fp32: bool) -> Row:
    """The training step of 1B, with the residual stream in fp32 or in bf16."""
    overrides = [
        ONE_B, f"model.vocab_size={VOCABULARY}", "attention=flash", "seq_len=4096", "training.batch_size=8",
        "training.precision=bf16", "training.compile=true", f"training.steps={steps}", "training.log_every=5",
        "training.eval_every=0", "training.checkpoint_every=0", "training.sample_tokens=0", "schedule.warmup_steps=10",
        f"training.residual_in_fp32={fp32}", "tracking=disabled",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        row = train(overrides, Path(folder))
        metrics = Path(folder) / "metrics.jsonl"
        lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    for line in lines:
        rate, causal, full = (line.get(f"throughput/{name}") for name in ("tokens_per_s", "mfu_causal", "mfu_full"))
        if None not in (rate, causal, full):
            print(f"step {line['step']}: {rate:,.0f} tokens/s, MFU {causal:.1%} causal, {full:.1%} full", flush=True)
    shown = ("status", "message", "tokens_per_s", "step_ms", "mfu_full", "mfu_causal", "peak_allocated_gib")
    by = f"this project, residual stream in {'fp32' if fp32 else 'bf16'}"
    return {"case": "train", "by": by} | {name: row[name] for name in shown if name in row}


def decoded(device: torch.device, rounds: int) -> Row:
    """One prompt continued by 1B, and the share of the bandwidth bound."""
    config = to_config(composed([ONE_B, f"model.vocab_size={VOCABULARY}", "attention=flash", "seq_len=2048"]))
    with device:
        model = build_model(config, VOCABULARY, device, World()).to(device).eval()
    run = ours(model, random_prompts([PROMPT]), ADDED, Sampling(temperature=0.0), torch.bfloat16, True)
    seconds = []
    for _ in range(rounds):
        synchronise(device)
        begin = time.perf_counter()
        added = run()
        seconds.append(time.perf_counter() - begin)
    median, read = statistics.median(seconds), 2 * num_parameters(model)
    bandwidth = next((rate for name, rate in BANDWIDTHS.items() if name in device_name(device)), None)
    bound = None if bandwidth is None else bandwidth / read
    return {
        "case": "decode", "by": "this project, compiled", "tokens_per_s": added / median, "weights_gb": read / 1e9,
        "bound_tokens_per_s": bound, "share_of_bound": None if bound is None else added / median / bound,
    }  # fmt: skip


def steps_on_cpu(length: int) -> dict[str, Callable[[], Any]]:
    """Name -> a training step of 160M on so many tokens, by this project and by transformers."""
    import transformers

    device, tokens = torch.device("cpu"), torch.randint(SMALL_VOCABULARY, (1, length + 1))
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    made: dict[str, Callable[[], Any]] = {}
    for name, extra in OURS.items():
        given = ["model=llama", f"seq_len={length}", "attention=sdpa", "device=cpu", "training.batch_size=1", *extra]
        config = to_config(composed(given))
        config.tracking.mode = TrackingMode.disabled
        trainer = build_trainer(config, build_model(config, SMALL_VOCABULARY, device, World()), device, World())
        made[f"this project{name}"] = products_by(config.training.cpu_products)(partial(trainer.update, 1, [batch]))
    options = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
    llama = transformers.AutoConfig.for_model("llama", vocab_size=SMALL_VOCABULARY, **options)
    theirs: Any = transformers.AutoModelForCausalLM.from_config(llama, attn_implementation="eager").train()
    optimizer = torch.optim.AdamW(theirs.parameters(), 6e-4, fused=True)

    def step() -> None:
        theirs(batch.inputs, labels=tokens[:, :-1], use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return made | {"transformers, eager": step}


def on_cpu(length: int, rounds: int) -> Iterator[Row]:
    """The row of each, timed in turns; the first step of each does not count."""
    prepared = steps_on_cpu(length)
    seconds: dict[str, list[float]] = {name: [] for name in prepared}
    for done in range(rounds + 1):
        for name, step in prepared.items():
            begin = time.perf_counter()
            step()
            if done:
                seconds[name].append(time.perf_counter() - begin)
            print(f"round {done} of {rounds}: {name} {time.perf_counter() - begin:.2f} s", flush=True)
    of_theirs = statistics.median(seconds["transformers, eager"])
    for name, times in seconds.items():
        median = statistics.median(times)
        row = {"tokens_per_s": length / median, "step_s": median, "times_transformers": of_theirs / median}
        yield {"case": "cpu", "by": name, "tokens": length, "threads": torch.get_num_threads()} | row


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure one case or several, and write each row at once."""
    parser = command_line("bench.llama", __doc__, "llama")
    parser.add_argument("--cases", nargs="+", choices=["train", "decode", "cpu"], required=True)
    parser.add_argument("--rounds", default=5, type=int, help="repeats of decoding, and of steps on a CPU")
    parser.add_argument("--steps", default=20, type=int, help="of training 1B")
    parser.add_argument("--tokens", nargs="+", default=CPU_TOKENS, type=int, help="of a step on a CPU")
    args = parser.parse_args(arguments)
    cuda = set(args.cases) != {"cpu"}
    if cuda:
        require_gpu(parser, "; --cases cpu needs none")
    device = torch.device("cuda" if cuda else "cpu")
    path = result_file(args.name, device_name(device), args.results)
    now = measurement(command_of(parser, arguments), device, ["transformers"])
    rows: dict[str, Callable[[], Iterable[Row]]] = {
        "train": lambda: (trained(args.steps, fp32) for fp32 in (False, True)),
        "decode": lambda: [decoded(device, args.rounds)],
        "cpu": lambda: chain.from_iterable(on_cpu(length, args.rounds) for length in args.tokens),
    }
    with Recorder(path, ("case", "by", "tokens"), now) as recorder:
        for case in args.cases:
            for row in rows[case]():
                print(" ".join(f"{name}={value}" for name, value in row.items()), flush=True)
                recorder.add(row)
    print(f"results: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
