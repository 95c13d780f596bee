"""The work of test_context.py in four processes: attention with sequences split over the processes.

python -m tests.recipe.distributed.context_ranks <folder> <port>
"""

import gc
import os
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    gc.disable()  # until all is imported: the collector would take a third of the time

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

from attention import AttentionConfig, DropoutKey, Layout, Score, build_attention, documents
from attention.score import take_rows
from recipe.distributed.context import WRAPPERS, ContextBy, rows_of
from recipe.distributed.ranks import joined
from recipe.distributed.world import World

CPU = torch.device("cpu")
KEY = DropoutKey(seed=1, step=2, layer=3, first_sequence=4)
B, T, D = 2, 128, 16
# Tensors by head, by a number computed from the head, by sequence and key, and the head's number itself.
FORMULA = "s * (1 + 0.1 * h) - slope[h] * (i - j) / 32 + table[h // 2, min(i - j, 9)] + x[b, j]"
# name -> heads, key/value heads, attention, score, documents
CASES: dict[str, tuple[int, int, AttentionConfig, Score, bool]] = {
    "plain": (4, 4, AttentionConfig("tiled", 0.2, block_q=16, block_k=16), Score(), False),
    "grouped": (8, 4, AttentionConfig("naive", 0.2), Score(window=37, sinks=True, alibi=True), False),
    "documents": (4, 4, AttentionConfig("tiled", 0.2), Score(soft_cap=5.0), True),
    "odd heads": (5, 5, AttentionConfig("tiled", 0.2), Score(window=50, sinks=True), True),
    "grouped odd heads": (6, 3, AttentionConfig("naive", 0.2), Score(alibi=True), False),
    "formula": (4, 4, AttentionConfig("tiled", 0.2), Score(formula=FORMULA, window=50), True),
    "formula, grouped": (8, 4, AttentionConfig("naive"), Score(formula=FORMULA), False),
    "sinks and slopes": (
        2,
        2,
        AttentionConfig("naive"),
        Score(formula="s - slope[h] * (i - j) / 32", sinks=True),
        False,
    ),
    "dropout": (2, 1, AttentionConfig("naive", 0.2), Score(window=37), False),
}

# Each is compiled by one of two ranks, beside the other as it is.
COMPILED = {ContextBy.heads: "sinks and slopes", ContextBy.keys: "dropout"}


def attend(case: str, by: ContextBy | None, compiled: bool = False) -> dict[str, Any]:
    """out, lse and gradients of this rank's rows, shared out by `by`; of all rows where `by` is None."""
    H, H_kv, config, score, packed = CASES[case]
    generator = torch.Generator().manual_seed(0)
    q, k, v, d_out = (torch.randn(B, h, T, D, generator=generator) for h in (H, H_kv, H_kv, H))
    names = {"sinks": [H]} if score.sinks else {}
    of_formula = {"slope": [H], "table": [H // 2, 10], "x": [B, T]}
    names |= {name: shape for name, shape in of_formula.items() if f"{name}[" in str(score.formula)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in names.items()}
    layout = Layout()
    if packed:
        starts = torch.zeros(B, T, dtype=torch.int32)
        starts[0, 40:], starts[0, 100:], starts[1, 77:] = 40, 100, 77
        layout = documents(starts)
    function = build_attention(config)
    if by is not None:
        group = dist.group.WORLD
        assert group is not None
        rows = rows_of(group.rank(), group.size(), T, by)
        q, k, v, d_out = (take_rows(x, rows, dim=2) for x in (q, k, v, d_out))
        function = WRAPPERS[by](function, group)
        function.add_score(score, H)  # as a model does
    call = torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function
    inputs = {"q": q, "k": k, "v": v} | tensors
    inputs = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    result = call(
        *(inputs[name] for name in "qkv"),
        score=score,
        layout=layout,
        dropout_key=KEY,
        tensors={name: inputs[name] for name in tensors},
        return_lse=True,
    )
    result.out.backward(d_out)
    gradients = {f"d{name}": x.grad for name, x in inputs.items()}
    return {"out": result.out.detach(), "lse": result.lse, **gradients}


def main(rank: int, folder: Path, port: int) -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for size in (2, 4):
        if rank < size:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port + size))
            with joined(World(rank, size), CPU, timeout_s=200):
                for case, (H, H_kv, *_) in CASES.items():
                    for by in (ContextBy.heads, ContextBy.keys):
                        if by is ContextBy.keys or (H % size == 0 and H_kv % size == 0):
                            found[f"{case}, {size} by {by.value}"] = attend(case, by)
                if size == 2:
                    for compiling, (by, case) in enumerate(COMPILED.items()):
                        found[f"compiled by {by.value}"] = attend(case, by, compiled=rank == compiling)
    torch.save(found, folder / f"{rank}.pt")


if __name__ == "__main__":
    # Forked, the four share what this process has imported. torch.compile would import both when it is first called.
    import torch._dynamo
    import torch._inductor.compile_fx

    gc.freeze()
    gc.enable()
    start_processes(main, (Path(sys.argv[1]), int(sys.argv[2])), nprocs=4, start_method="fork")
