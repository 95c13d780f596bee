"""The host's time of a call: what Python and the driver take before the GPU has its work.

    python -m bench.attention.host      six minutes on a GPU

B 1, H 8, T 256, D 64, bf16. Calls are queued behind a long kernel, so that the GPU's time does not count. The
candidates take turns, and the least counts: other programs only add time. Beside it what that leaves of the GPU's speed
where calls of 16 x 1,024 tokens, 2,048 channels, follow each other, and what a Llama takes in transformers: the median
of new processes, as one may be slower by a tenth than the next. Rows go to bench/results/host-<device>.json, with a
table beside it.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import get_context
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention import AttentionConfig, Score, build_attention, documents
from attention.decode.cache import Cache
from bench.attention.peers import KEY, Problem, from_package, installed
from bench.machine import require_gpu
from bench.record import command_line, read, recording, write_table
from recipe.wording import markdown_table as table

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
B, H, T, D = 1, 8, 256, 64
AT_1K = ("flash", "SDPA, cuDNN", "SDPA, FlashAttention-2", "FlashAttention-4")
LLAMAS = ("gpt_attention_flash", "sdpa")
CALLS, REPEATS, TURNS, PROCESSES, PAUSE_CYCLES = 40, 3, 6, 7, 200_000_000


def torchs(backend: SDPBackend) -> Attend:
    """torch's scaled_dot_product_attention by one of its kernels."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attend


def candidates(device: torch.device) -> dict[str, tuple[int, Attend]]:
    """name -> key/value heads, call."""
    plain, drops = (build_attention(AttentionConfig("flash", dropout=rate)) for rate in (0.0, 0.1))
    key, slopes = KEY.pack(device), torch.rand(H, device=device)
    layout = documents(torch.zeros(B, T, dtype=torch.int32, device=device))
    window, alibi = Score(window=64), Score(alibi=True)
    token, k, v = torch.randn(3, B, H, T, D, device=device, dtype=torch.bfloat16)
    cache = Cache(k, v, torch.full((B,), T, dtype=torch.int32, device=device))
    cudnn = torchs(SDPBackend.CUDNN_ATTENTION)
    calls = {
        "flash": (H, lambda q, k, v: plain(q, k, v).out),
        "flash, window": (H, lambda q, k, v: plain(q, k, v, score=window).out),
        "flash, dropout 0.1": (H, lambda q, k, v: drops(q, k, v, dropout_key=key).out),
        "flash, documents": (H, lambda q, k, v: plain(q, k, v, layout=layout).out),
        "flash, 2 key/value heads": (2, lambda q, k, v: plain(q, k, v).out),
        "flash, ALiBi": (H, lambda q, k, v: plain(q, k, v, score=alibi, slopes=slopes).out),
        "flash, one token from a cache": (H, lambda *_: plain.decode(token[:, :, :1], cache).out),
        "flash, compiled": (H, torch.compile(lambda q, k, v: plain(q, k, v).out)),
        "q + k + v, compiled": (H, torch.compile(lambda q, k, v: q + k + v)),
        "SDPA, cuDNN": (H, cudnn),
        "SDPA, cuDNN, compiled": (H, torch.compile(cudnn)),
        "SDPA, FlashAttention-2": (H, torchs(SDPBackend.FLASH_ATTENTION)),
    }
    if installed("flash_attn.cute"):
        problem = Problem(B, H, T, D, "causal", 0.0, torch.bfloat16, device)
        calls["FlashAttention-4"] = (H, from_package("flash_attn.cute", has_dropout=False)(problem))
    return calls


def measured(attend: Attend, heads: int, device: torch.device) -> dict[str, float]:
    """Microseconds of the host for a forward pass, and for both where there are gradients."""
    q, k, v = (
        torch.randn(B, n, T, D, device=device, dtype=torch.bfloat16, requires_grad=True) for n in (H, heads, heads)
    )
    with torch.no_grad():
        us = {"forward_us": 1e6 * least_s(partial(attend, q, k, v), queued=True)}
    if attend(q, k, v).requires_grad:
        us["both_us"] = 1e6 * least_s(partial(trained, attend, (q, k, v), torch.randn_like(q)), queued=True)
    return us


def least_s(call: Callable[[], object], queued: bool, calls: int = CALLS) -> float:
    """Seconds of a call among so many that follow each other, the least of several repeats.

    queued  behind a long kernel, so that the host's time counts alone
    """
    samples = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        if queued:
            torch.cuda._sleep(PAUSE_CYCLES)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        if not queued:
            torch.cuda.synchronize()
        samples.append((time.perf_counter() - start) / calls)
    torch.cuda.synchronize()
    return min(samples)


def eager_tflops(attend: Attend, D: int, device: torch.device) -> list[float]:
    """TFLOP/s of the forward and the backward pass at 1,024 tokens, of calls that follow each other."""
    heads, sequences, tokens = 2048 // D, 16, 1024
    flops = 2 * sequences * heads * tokens**2 * D  # of two products of half a square
    q, k, v, do = (
        torch.randn(sequences, heads, tokens, D, device=device, dtype=torch.bfloat16, requires_grad=i < 3)
        for i in range(4)
    )

    with torch.no_grad():
        forward = least_s(partial(attend, q, k, v), queued=False)
    backward = least_s(partial(trained, attend, (q, k, v), do), queued=False) - forward
    return [round(flops / forward / 1e12), round(2.5 * flops / backward / 1e12)]


def trained(attend: Attend, inputs: tuple[Tensor, Tensor, Tensor], do: Tensor) -> None:
    """A forward and a backward pass."""
    torch.autograd.grad(attend(*inputs), inputs, do)


def llamas(device: torch.device) -> dict[str, list[float]]:
    """Of transformers' implementations, milliseconds of a forward and backward pass of 4 x 512 tokens through a Llama
    of 160M parameters, not compiled, and of 16 new tokens after 4 x 128. Each the median of turns."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    from attention.transformers import register

    register()
    tokens, calls = torch.randint(3, 32_000, (4, 512), device=device), {}
    for name in LLAMAS:
        config = LlamaConfig(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=name, dtype=torch.bfloat16).to(device)
        options = {"min_new_tokens": 16, "max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
        generate = partial(model.generate, tokens[:, :128], **options)
        calls[name] = lambda model=model: model(tokens, labels=tokens).loss.backward(), generate
    turns = [
        {name: [least_s(call, queued=False, calls=1) for call in calls[name]] for name in LLAMAS[:: (-1) ** turn]}
        for turn in range(TURNS)
    ]
    return {name: [1e3 * median(turn[name][i] for turn in turns) for i in (0, 1)] for name in LLAMAS}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line("bench.attention.host", __doc__, "host")
    args = parser.parse_args(arguments)
    require_gpu(parser)
    device = torch.device("cuda", torch.cuda.current_device())
    calls = candidates(device)
    with recording(args, arguments, ("name",), device, B=B, H=H, T=T, D=D) as recorder:
        turns = [
            {name: measured(attend, heads, device) for name, (heads, attend) in calls.items()} for _ in range(TURNS)
        ]
        for name, (_, attend) in calls.items():
            row = {"name": name, **{key: round(min(turn[name][key] for turn in turns), 1) for key in turns[0][name]}}
            if name in AT_1K:
                row |= {f"tflops_{D}": eager_tflops(attend, D, device) for D in (64, 128)}
            recorder.add(row)
        if installed("transformers"):
            with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
                runs = pool.map(llamas, [device] * PROCESSES, chunksize=1)
            for name in LLAMAS:
                recorder.add({"name": f"{name} in transformers", "llama_ms": [run[name] for run in runs]})
    sizes = [f"1k tokens, head size {D}: TFLOP/s forward/backward" for D in (64, 128)]
    head = ["microseconds of the host", "forward", "forward and backward", *sizes, "Llama: ms of a pass/of 16 tokens"]
    path = recorder.path
    rows = (
        [
            row["name"],
            *(f"{row[x]:.0f}" if x in row else "" for x in ("forward_us", "both_us")),
            *("/".join(map(str, row.get(f"tflops_{D}", []))) for D in (64, 128)),
            "/".join(f"{median(ms):.1f}" for ms in zip(*row.get("llama_ms", []), strict=True)),
        ]
        for row in read(path)
    )
    write_table(path.with_suffix(".md"), table(head, rows), path)


if __name__ == "__main__":
    main()
