"""The fastest correct attention: what `gpt-attention check --recommend` measures, as a result file.

    python -m bench.recommend                             the shape of docs/peers.md
    python -m bench.recommend --shapes 4x16x8192x64       others

Every implementation with a name is judged, then timed alone on the GPU. Results go to
bench/results/recommend-<GPU>.json, those that do not run with the reason.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict

import torch

from attention.check.recommend import compared, ordered, table, wanted
from bench.machine import device_name, require_gpu
from bench.record import Recorder, command_line, command_of, measurement, result_file

SHAPES = ("8x16/4x4096x128",)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the shapes one by one, print each table, and write its rows."""
    parser = command_line("bench.recommend", __doc__, "recommend")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="BxHxTxD", help="BxH/H_kvxTxD too")
    parser.add_argument("--dtype", choices=["bf16", "fp16"], default="bf16")
    parser.add_argument("--seconds", type=float, help="start no implementation of a shape after this time")
    args = parser.parse_args(arguments)
    require_gpu(parser)
    device = torch.device("cuda")
    now = measurement(command_of(parser, arguments), device, ("flash-attn-4", "transformers"))
    with Recorder(
        result_file(args.name, device_name(device), args.results), ("shape", "dtype", "name"), now
    ) as recorder:
        for shape in args.shapes:
            case = wanted(shape, [args.dtype], None, True)
            candidates = ordered(compared(case, device, seconds=args.seconds))
            print(table(candidates, case, device), flush=True)
            rows = [{"shape": shape, "dtype": args.dtype} | asdict(x) | {"correct": x.correct} for x in candidates]
            recorder.replace({"shape": shape, "dtype": args.dtype}, rows)
    print(f"results: {recorder.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
