"""The share of a GPU's memory bandwidth that attention to a cache reaches, beside torch's kernels.

    python -m bench.generate.decode           a minute

One new token of each sequence attends to its whole cache, in bf16, with 32 query and 8 key heads of 128. Every kernel
must read keys and values once, so a kernel's bandwidth is their bytes over its time. It is compared with the bandwidth
of a copy in the same run. Pages lie in memory in random order. Results go to bench/results/decode-<device>.json.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from attention import AttentionConfig, Cache, build_attention
from bench.machine import device_name, require_gpu
from bench.measure import Timing, in_turns, release
from bench.record import Recorder, Row, command_line, command_of, measurement, result_file

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SHAPES = ((1, 131_072), (16, 32_768))  # sequences, keys of each
PAGES = (16, 64, 256)
COPIED = 2**30  # bytes
BACKENDS = {
    "sdpa flash": SDPBackend.FLASH_ATTENTION,
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa math": SDPBackend.MATH,
}


def paged(cache: Cache, size: int) -> Cache:
    """The tokens of a contiguous cache in pages of `size`, in random order."""
    B, H_kv, L, D = cache.k.shape
    numbers = torch.randperm(B * L // size, device=cache.k.device)
    k, v = torch.empty(2, len(numbers), H_kv, size, D, dtype=cache.k.dtype, device=cache.k.device)
    for pages, rows in ((k, cache.k), (v, cache.v)):
        pages[numbers] = rows.view(B, H_kv, -1, size, D).transpose(1, 2).flatten(0, 1)
    return Cache(k, v, cache.lengths, numbers.view(B, -1).int())


def candidates(q: Tensor, cache: Cache) -> dict[str, Callable[[], Tensor]]:
    """The calls to time, by name: q (B, H, 1, D) attends to the whole of a contiguous cache."""
    attend = build_attention(AttentionConfig("flash"))
    calls: dict[str, Callable[[], Tensor]] = {"flash": lambda: attend.decode(q, cache).out}
    for size in PAGES:
        pages = paged(cache, size)
        calls[f"flash, pages of {size}"] = lambda pages=pages: attend.decode(q, pages).out  # type: ignore[misc]
    for name, backend in BACKENDS.items():

        def sdpa(backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, cache.k, cache.v, enable_gqa=True)

        calls[name] = sdpa
    # Without a block mask FlexAttention treats all keys as one block, which it does not split among programs.
    keys = cache.capacity
    mask = create_block_mask(lambda b, h, i, j: j < keys, None, None, 1, keys, device=q.device)
    compiled = torch.compile(flex_attention, dynamic=False)
    calls["flex decoding"] = lambda: compiled(q, cache.k, cache.v, block_mask=mask, enable_gqa=True)
    return calls


def measure(sequences: int, keys: int, seconds: float) -> list[Row]:
    """The time and bandwidth of each candidate and of a copy; a candidate's message where it failed."""
    shape = (2, sequences, KV_HEADS, keys, HEAD_DIM)
    k, v = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    cache = Cache(k, v, torch.full((sequences,), keys, device="cuda", dtype=torch.int32))
    q = torch.randn(sequences, HEADS, 1, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    calls: dict[str, Callable[[], Tensor]] = candidates(q, cache)
    expected = calls["flash"]()
    source = torch.empty(COPIED, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    calls = {"copy": lambda: target.copy_(source), **calls}
    measured: list[Row] = []
    for name, timing in in_turns(calls, q.device, seconds).items():
        row: Row = {"name": name, "sequences": sequences, "keys": keys}
        if isinstance(timing, Timing):
            moved = 2 * COPIED if name == "copy" else 2 * k.nbytes
            row |= {**timing.as_dict(), "gb_s": moved / timing.ms / 1e6}
            if name != "copy":
                row["of_copy"] = row["gb_s"] / measured[0]["gb_s"]
                row["difference"] = float((calls[name]() - expected).norm() / expected.norm())
        else:
            row["message"] = str(timing)[:300]
        measured.append(row)
    return measured


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write bench/results/decode-<device>.json."""
    parser = command_line("bench.generate.decode", __doc__, "decode")
    parser.add_argument("--seconds", type=float, default=0.2, help="to spend on each time")
    args = parser.parse_args(arguments)
    require_gpu(parser)
    device = torch.device("cuda")
    path = result_file(args.name, device_name(device), args.results)
    now = measurement(command_of(parser, arguments), device)
    with Recorder(path, ("name", "sequences", "keys"), now) as recorder:
        for sequences, keys in SHAPES:
            print(f"\n{sequences} x {keys:,} keys{'ms':>18}{'GB/s':>9}{'of a copy':>12}")
            for row in measure(sequences, keys, args.seconds):
                recorder.add(row)
                share = f"{row['of_copy']:>12.0%}" if "of_copy" in row else ""
                words = f"{row['ms']:>14.3f}{row['gb_s']:>9.0f}{share}" if "ms" in row else f"  {row['message'][:80]}"
                print(f"  {row['name']:<20}{words}", flush=True)
            release(device)
    print(f"results: {path}")


if __name__ == "__main__":
    main()
