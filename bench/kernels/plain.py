"""Launches of the plain Triton kernels: every entry of the tables of blocks, and every kind of score and rate."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from attention import Score, UnsupportedAttention
from attention.flash import call as tables
from attention.flash.backward import Tensors, launch_dkdv, launch_dq
from attention.flash.call import ConfigKey, KernelCall, Problem
from attention.flash.forward import forward
from attention.flash.horizon import find_horizons
from attention.flash.op import check_backward
from attention.flash.tiles import rows_like
from attention.spec import Inputs, Spec
from bench.kernels.compiler import Launch

TABLES = {80: tables.OLDER, 90: tables.HOPPER}  # architecture -> its blocks
B, H, H_KV, T = 2, 4, 2, 100
CAUSAL = Spec(Score(), scale=0.125)
EVERYTHING = Score(window=1024, soft_cap=50.0, alibi=True, sinks=True)


def calls(B: int, H: int, T: int) -> dict[str, KernelCall]:
    """Kind of score -> a call with it for B sequences of T tokens and H heads, without dropout."""
    per_head, starts = torch.zeros(H), torch.zeros(B, T, dtype=torch.int32)
    together = Inputs(slopes=per_head, sinks=per_head, starts=starts, ends=starts)

    def call(score: Score, **inputs: Tensor) -> KernelCall:
        return KernelCall(CAUSAL._replace(score=score, documents="starts" in inputs), Inputs(**inputs))

    return {
        "causal": call(Score()),
        "full": call(Score(causal=False)),
        "window": call(Score(window=1024)),
        "wide_window": call(Score(window=8192)),
        "documents": call(Score(), starts=starts, ends=starts),
        "alibi": call(Score(alibi=True), slopes=per_head, horizons=torch.zeros(B, H, dtype=torch.int32)),
        "soft_cap": call(Score(soft_cap=50.0)),
        "sinks": call(Score(sinks=True), sinks=per_head),
        "everything": KernelCall(
            CAUSAL._replace(score=EVERYTHING, documents=True, offsets=True), together, q_start=3, k_start=2
        ),
    }


def launches(architecture: int) -> Iterator[Launch]:
    """The launches of an architecture. In fp32 a head size has one entry for all calls, which uses every option."""
    asked = calls(B, H, T) | {"fp8": KernelCall(CAUSAL._replace(precision="fp8"), Inputs())}

    def launch_of(kind: str, key: ConfigKey, dtype: torch.dtype = torch.bfloat16) -> Launch:
        call = dropping(asked[kind]) if key.dropout else asked[kind]
        label = kind if dtype == torch.bfloat16 else f"{kind}-{str(dtype).removeprefix('torch.')}"
        name = f"attention/plain-sm{architecture}/{label}-{key.head_dim}-{'dropout' if key.dropout else 'exact'}"
        length = "" if key.length == float("inf") else f"-{key.length}"
        return Launch(name + length, partial(launch, architecture, key, call, dtype))

    for key in TABLES[architecture]:
        yield launch_of("causal", key)
    for head_dim, dropout in itertools.product((64, 128, 256), (False, True)):
        for kind in asked:
            if kind not in ("causal", "wide_window", "fp8"):  # a wide window has the blocks of a narrow one
                yield launch_of(kind, ConfigKey(head_dim, dropout))
        if dropout:
            yield launch_of("everything", ConfigKey(head_dim, dropout), torch.float32)
    yield launch_of("causal", ConfigKey(64, True), torch.float16)
    if architecture == 90:
        yield launch_of("fp8", ConfigKey(128, False))
    q, k = torch.empty(B, H, T, 64), torch.empty(B, H_KV, T, 64)
    spec = CAUSAL._replace(score=Score(alibi=True))
    yield Launch(f"attention/plain-sm{architecture}/horizons", partial(find_horizons, q, k, torch.zeros(H), spec))


def dropping(call: KernelCall) -> KernelCall:
    """The same call with dropout."""
    inputs = call.inputs._replace(key=torch.zeros(7, dtype=torch.int64))
    return call._replace(spec=call.spec._replace(threshold=26), inputs=inputs)


def launch(
    architecture: int, key: ConfigKey, call: KernelCall, dtype: torch.dtype, queries: int = T, keys: int = T
) -> None:
    """A forward with the blocks for `key` and, where there is one, a backward, which does not read sinks."""

    def tensor(heads: int, length: int) -> Tensor:
        return torch.empty(B, length, heads, key.head_dim, dtype=dtype).transpose(1, 2)

    of_q, of_k = (H, queries), (H_KV, keys)
    q, k, v, do, out = (tensor(*size) for size in (of_q, of_k, of_k, of_q, of_q))
    length = int(min(key.length, 2**20))
    blocks = tables.choose(Problem(call.spec, key.head_dim, dtype, length, length, divmod(architecture, 10)))
    _, lse2 = forward(q, k, v, out, call, blocks.forward)
    if call.spec.precision == "fp8":
        return
    score = replace(call.spec.score, sinks=False)
    call = call._replace(spec=call.spec._replace(score=score), inputs=call.inputs._replace(sinks=None))
    try:
        check_backward(key.head_dim, dtype, q.device)
    except UnsupportedAttention:
        return
    x = Tensors(q, k, v, out, do, lse2, rows_like(q), tensor(*of_q), tensor(*of_k), tensor(*of_k))
    launch_dq(x, call, blocks.dq)
    launch_dkdv(x, call, blocks.dkdv)
