"""The cost of the online softmax compared with the native and the safe one, on a GPU.

    python -m bench.attention.softmax           half a minute

Milakov and Gimelshein (2018), figures 1 and 2: softmax of the rows of a matrix, of 4,000 rows and of 10. A program
walks over its row in tiles: twice for native softmax (sum, result), three times for safe softmax (maximum, sum, result)
and twice for online softmax (maximum and sum together, result). torch's softmax is timed with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import torch
import triton
import triton.language as tl
from torch import Tensor

from bench.machine import device_name, require_gpu
from bench.measure import Timing, in_turns
from bench.record import Recorder, Row, command_line, command_of, measurement, result_file

ROWS = (4000, 10)
LENGTHS = (1_000, 4_000, 16_000, 64_000, 256_000)
TILE = 1024
LOWEST = tl.constexpr(-3.0e38)  # finite: exp(-inf - LOWEST) is 0, where exp(-inf + inf) would be NaN


@triton.jit
def load(x, i_n, N, TILE: tl.constexpr):
    """A tile of the row that x points to, -inf beyond its end."""
    o_n = i_n + tl.arange(0, TILE)
    return tl.load(x + o_n, mask=o_n < N, other=-float("inf"))


@triton.jit
def store(y, b_y, i_n, N, TILE: tl.constexpr):
    o_n = i_n + tl.arange(0, TILE)
    tl.store(y + o_n, b_y, mask=o_n < N)


@triton.jit
def native_kernel(x, y, N, TILE: tl.constexpr):
    """y = exp(x) / sum of exp(x): overflows above 88.7."""
    i_row = tl.program_id(0).to(tl.int64) * N
    l = tl.zeros([TILE], tl.float32)
    for i_n in range(0, N, TILE):
        l += tl.exp(load(x + i_row, i_n, N, TILE))
    l = tl.sum(l, 0)
    for i_n in range(0, N, TILE):
        store(y + i_row, tl.exp(load(x + i_row, i_n, N, TILE)) / l, i_n, N, TILE)


@triton.jit
def safe_kernel(x, y, N, TILE: tl.constexpr):
    """y = exp(x - m) / sum of exp(x - m) with m the maximum, which takes a separate pass."""
    i_row = tl.program_id(0).to(tl.int64) * N
    m = tl.full([TILE], LOWEST, tl.float32)
    for i_n in range(0, N, TILE):
        m = tl.maximum(m, load(x + i_row, i_n, N, TILE))
    m = tl.max(m, 0)
    l = tl.zeros([TILE], tl.float32)
    for i_n in range(0, N, TILE):
        l += tl.exp(load(x + i_row, i_n, N, TILE) - m)
    l = tl.sum(l, 0)
    for i_n in range(0, N, TILE):
        store(y + i_row, tl.exp(load(x + i_row, i_n, N, TILE) - m) / l, i_n, N, TILE)


@triton.jit
def online_kernel(x, y, N, TILE: tl.constexpr):
    """The same in two passes: where the maximum grows from m to m', the sum so far is multiplied by exp(m - m')."""
    i_row = tl.program_id(0).to(tl.int64) * N
    m = tl.full([TILE], LOWEST, tl.float32)
    l = tl.zeros([TILE], tl.float32)
    for i_n in range(0, N, TILE):
        b_x = load(x + i_row, i_n, N, TILE)
        m_new = tl.maximum(m, b_x)
        l = l * tl.exp(m - m_new) + tl.exp(b_x - m_new)
        m = m_new
    m_row = tl.max(m, 0)
    l = tl.sum(l * tl.exp(m - m_row), 0)
    for i_n in range(0, N, TILE):
        store(y + i_row, tl.exp(load(x + i_row, i_n, N, TILE) - m_row) / l, i_n, N, TILE)


KERNELS = {"native": native_kernel, "safe": safe_kernel, "online": online_kernel}


def softmax(x: Tensor, kind: str) -> Tensor:
    """softmax of the rows of x (M, N), fp32, by one of KERNELS."""
    y = torch.empty_like(x)
    KERNELS[kind][(x.shape[0],)](x, y, x.shape[1], TILE=TILE, enable_fp_fusion=True)
    return y


def measure(rows: int, length: int, seconds: float) -> list[Row]:
    """The time of each kind on one matrix, and its largest error relative to torch's in fp64."""
    x = torch.randn(rows, length, device="cuda")
    functions: dict[str, Callable[[], Tensor]] = {kind: partial(softmax, x, kind) for kind in KERNELS}
    functions["torch"] = partial(torch.softmax, x, -1)
    exact = torch.softmax(x[:10].double(), -1)
    results: list[Row] = []
    for name, timing in in_turns(functions, x.device, seconds).items():
        if not isinstance(timing, Timing):
            raise timing
        error = float(((functions[name]()[:10] - exact).abs() / exact).max())
        results.append({"name": name, "rows": rows, "length": length, "error": error, **timing.as_dict()})
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write bench/results/softmax-<device>.json."""
    parser = command_line("bench.attention.softmax", __doc__, "softmax")
    parser.add_argument("--seconds", type=float, default=0.2, help="to spend on each time")
    args = parser.parse_args(arguments)
    require_gpu(parser)
    device = torch.device("cuda")
    path = result_file(args.name, device_name(device), args.results)
    names = [f"{name + ', ms':>12}" for name in (*KERNELS, "torch")]
    print(f"{'rows':>6}{'length':>9}  {''.join(names)}  safe/online")
    with Recorder(path, ("name", "rows", "length"), measurement(command_of(parser, arguments), device)) as recorder:
        for rows, length in product(ROWS, LENGTHS):
            cells = measure(rows, length, args.seconds)
            recorder.add(*cells)
            ms = {cell["name"]: cell["ms"] for cell in cells}
            times = "".join(f"{value:>12.4f}" for value in ms.values())
            print(f"{rows:>6}{length:>9,}  {times}  {ms['safe'] / ms['online']:>11.2f}", flush=True)
    print(f"results: {path}")


if __name__ == "__main__":
    main()
