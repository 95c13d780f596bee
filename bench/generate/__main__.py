"""Tokens per second of generation, compared with transformers on the same shape.

    python -m bench.generate                  both cases, about three minutes on an H200
    python -m bench.generate --cases one      one prompt
    python -m bench.generate --device cpu     one prompt, in fp32

The model has GPT-2's shape with 124M parameters, room for 2,048 tokens and random weights, on which timing does not
depend. On a GPU it computes in bf16 with attention=flash, and all weights of transformers' model are in bf16. A run's
time is from the prompts on the host to the last token on the host, prefill included; compilation and the capture of
CUDA graphs are not. Runs alternate, and the median counts; many prompts run once.

one    one prompt of 337 tokens, continued by 512 (60 on a CPU). transformers has its static cache, compiled, on a GPU,
       and its default cache on a CPU
many   256 prompts of 16 to 900 tokens, each continued by 256, all at a time. transformers gets them as a batch, padded
       on the left, and adds only 128, because it takes long

Results go to bench/results/generate-<device>.json.
"""

from __future__ import annotations

import argparse
import gc
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from attention import AttentionConfig, build_attention
from bench.machine import device_name, require_gpu
from bench.measure import synchronise
from bench.record import Recorder, Row, command_line, command_of, measurement, result_file
from model.config import GPTConfig
from model.gpt import GPT, Computation
from recipe.infer.generation import Engine, Request, Sampling

SHAPE = GPTConfig(name="gpt2", n_layers=12, n_heads=12, n_embd=768, bias=True)
VOCABULARY, SEQ_LEN = 50257, 2048
PROMPT, PROMPTS, SHORTEST, LONGEST, ADDED = 337, 256, 16, 900, 256
GREEDY, SAMPLED = Sampling(temperature=0.0), Sampling(temperature=0.8, top_k=50)

Prompts = list[list[int]]
Run = Callable[[], int]  # returns the number of added tokens


def random_prompts(lengths: Sequence[int]) -> Prompts:
    """A prompt of each length."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def ours(model: GPT, prompts: Prompts, added: int, sampling: Sampling, dtype: torch.dtype, compile: bool) -> Run:
    """This project's engine, after one run."""
    requests = [Request(prompt, added) for prompt in prompts]
    engine = Engine(model, requests, sampling, slots=len(prompts), dtype=dtype, compile=compile)

    def run() -> int:
        for request in requests:
            request.tokens.clear()
            request.finished = False
        return sum(1 for _ in engine.run())

    run()
    return run


def theirs(prompts: Prompts, added: int, device: torch.device, dtype: torch.dtype, warm_up: int, **options: Any) -> Run:
    """transformers' greedy `generate`, after it has added `warm_up` tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_positions=SEQ_LEN, eos_token_id=None, bos_token_id=None, pad_token_id=0)
    with device:
        model = GPT2LMHeadModel(config).eval().to(dtype)
    longest = max(len(prompt) for prompt in prompts)
    padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])

    def run(added: int = added) -> int:
        given = {"inputs": padded.to(device), "attention_mask": mask.to(device)}
        out = model.generate(**given, do_sample=False, max_new_tokens=added, **options)
        return out[:, longest:].cpu().numel()

    run(warm_up)
    return run


def candidates(case: str, device: torch.device) -> dict[str, Callable[[], Run]]:
    """The measurements of a case: label -> preparation."""
    cuda = device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    attend = build_attention(AttentionConfig("flash" if cuda else "naive"))
    torch.manual_seed(0)
    with device:
        model = GPT(SHAPE, VOCABULARY, SEQ_LEN, attend, Computation(device=device, dtype=dtype)).eval()
    if case == "many":
        generator = torch.Generator().manual_seed(1)
        prompts = random_prompts(torch.randint(SHORTEST, LONGEST + 1, (PROMPTS,), generator=generator).tolist())
        return {
            "this project, 256 slots": lambda: ours(model, prompts, ADDED, GREEDY, dtype, False),
            "transformers, padded batch": lambda: theirs(prompts, ADDED // 2, device, dtype, 8),
        }
    prompts, added = random_prompts([PROMPT]), 512 if cuda else 60
    if not cuda:
        return {
            "this project": lambda: ours(model, prompts, added, GREEDY, dtype, False),
            "transformers": lambda: theirs(prompts, added, device, dtype, added),
        }
    return {
        "this project": lambda: ours(model, prompts, added, GREEDY, dtype, False),
        "this project, sampled": lambda: ours(model, prompts, added, SAMPLED, dtype, False),
        "this project, compiled": lambda: ours(model, prompts, added, GREEDY, dtype, True),
        "this project, compiled, sampled": lambda: ours(model, prompts, added, SAMPLED, dtype, True),
        "transformers, static cache, compiled": lambda: theirs(
            prompts, added, device, dtype, added, cache_implementation="static"
        ),
    }


def expression(text: str) -> re.Pattern[str]:
    """A regular expression of the command line."""
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text} is not a regular expression ({error})") from error


def measure(case: str, device: torch.device, rounds: int, only: re.Pattern[str] | None) -> Iterator[Row]:
    """Time each candidate `rounds` times, in turns: its row comes with its last time."""
    prepared: dict[str, Run] = {}
    for label, prepare in candidates(case, device).items():
        if only is None or only.search(label):
            begin = time.perf_counter()
            prepared[label] = prepare()
            print(f"{case}: {label} ready after {time.perf_counter() - begin:.0f} s", flush=True)
    seconds: dict[str, list[float]] = {label: [] for label in prepared}
    for done in range(1, rounds + 1):
        for label, run in prepared.items():
            synchronise(device)
            begin = time.perf_counter()
            added = run()
            seconds[label].append(time.perf_counter() - begin)
            if done == rounds:
                yield summary(case, label, added, seconds[label])


def summary(case: str, label: str, added: int, seconds: list[float]) -> Row:
    """The row of a candidate that added so many tokens each time."""
    median = statistics.median(seconds)
    return {
        "case": case, "by": label, "tokens": added, "tokens_per_s": round(added / median, 1),
        "seconds": round(median, 4), "fastest_s": round(min(seconds), 4), "slowest_s": round(max(seconds), 4),
        "runs": len(seconds),
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the cases that were asked for, and write each row as soon as it is there."""
    parser = command_line("bench.generate", __doc__, "generate")
    parser.add_argument("--cases", nargs="+", choices=["one", "many"], help="both on a GPU, one on a CPU")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--rounds", default=5, type=int, help="runs with one prompt")
    parser.add_argument("--only", type=expression, help="a regular expression for the names of candidates")
    args = parser.parse_args(arguments)
    device = torch.device(args.device)
    if args.device == "cuda":
        require_gpu(parser, "; add --device cpu")
    path = result_file(args.name, device_name(device), args.results)
    now = measurement(command_of(parser, arguments), device, ["transformers"])
    with Recorder(path, ("case", "by"), now) as recorder:
        for case in args.cases or (["one", "many"] if args.device == "cuda" else ["one"]):
            for row in measure(case, device, args.rounds if case == "one" else 1, args.only):
                print(" ".join(f"{name}={value}" for name, value in row.items()), flush=True)
                recorder.add(row)
            gc.collect()
    print(f"results: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
