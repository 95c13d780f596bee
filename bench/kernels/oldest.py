"""Compiles attention's kernels for GPUs, which this machine need not have, and prints a JSON line for each GPU.

TRITON_INTERPRET=0 python -m bench.kernels.oldest sm_80 sm_90a

    {"gpu": "sm_80", "kernels": 6, "refusal": null}

`refusal` is the first error of Triton, where a kernel does not compile; the exit status is then 1.
"""

import json
import sys
from functools import partial
from typing import Any

from bench.kernels.compiler import Launch, collect, compiled
from bench.kernels.hopper import BOTH, launch
from bench.kernels.plain import calls, dropping

ARCHITECTURES = {"sm_80": 80, "sm_90a": 90, "sm_100": 100, "sm_120": 120}
T = 4096


def compile_for(name: str) -> dict[str, Any]:
    """The forward and the backward of calls on every path that the GPU has, and their count."""
    asked, count, refusal = calls(1, 2, T), 0, None
    causal, everything = (asked["causal"], 64), (dropping(asked["everything"]), 128)
    # On Hopper GPUs the plain kernels differ from those of others by their loads alone.
    launched = [("plain", *causal), ("hopper", *causal), ("hopper", *everything)]
    if name != "sm_90a":
        launched = [("plain", *causal), ("plain", *everything)]
    try:
        launches = [Launch(path, partial(launch, call, D, T, BOTH, path=path)) for path, call, D in launched]
        for kernel in collect(ARCHITECTURES[name], launches):
            compiled(kernel)
            count += 1
    except Exception as error:  # of Triton's compiler, whose errors have no common class
        refusal = f"{type(error).__name__}: {error}".strip().splitlines()[-1]
    return {"gpu": name, "kernels": count, "refusal": refusal}


if __name__ == "__main__":
    reports = []
    for name in sys.argv[1:] or ARCHITECTURES:
        reports.append(compile_for(name))
        print(json.dumps(reports[-1]), flush=True)
    sys.exit(any(report["refusal"] for report in reports))
