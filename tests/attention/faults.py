"""Planted faults that the checker and the probe of a run catch, and correct attention that they must not accuse.

    python -m tests.attention.faults                  every fault in three precisions: five minutes on two cores
    python -m tests.attention.faults --right --quick  all correct attention of tests/right_attention.py: six minutes
    python -m tests.attention.faults --right          the same with all inputs of the check: hours

The first writes bench/results/attention-faults-<CPU>.json, the others attention-right-<CPU>.json. `make tables` pastes
the table beside it into docs/check.md.
"""

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch

from attention import AttentionConfig, AttentionShape, DropoutKey, build_attention
from attention.check.cli import check
from attention.check.printing import Report
from bench.record import Recorder, measurement, read, result_file, write_table
from data.batches import Batch
from model.gpt import GPT
from model.options import GPTConfig
from model.score import ScoreConfig
from recipe.training.parity import beyond_rounding, wrong_alone
from recipe.training.parity_probe import ParityConfig, ParityProbe
from recipe.wording import markdown_table as table
from tests import right_attention
from tests.attention.subjects import registered, subject_of
from tests.right_attention import ALLOWED
from tests.wrong_attention import FAULTS, Fault

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
VOCABULARY, B, T = 65, 3, 65
PROBES = 3  # of a run
NONE: frozenset[str] = frozenset()

Row = dict[str, Any]
Job = Callable[[], list[Row]]
stack = ExitStack()  # of a process that measures


def checked(
    config: AttentionConfig, dtypes: Sequence[str], seed: int = 0, quick: bool = False, allowed: frozenset[str] = NONE
) -> Report:
    """The checker on an implementation, without a limit of time."""
    subject = subject_of(config, f"build_attention({config})")
    return replace(check(subject, dtypes=dtypes, seed=seed, quick=quick, seconds=3600), allowed=allowed)


def failing(config: AttentionConfig, dtypes: Sequence[str]) -> list[str]:
    """The lines that fail, of a quick check or, if that sees nothing, of a whole one."""
    failed = checked(config, dtypes, quick=True).failed() or checked(config, dtypes).failed()
    return [line.name for line in failed]


def batches(seed: int, documents: bool, count: int) -> Iterator[tuple[Batch, DropoutKey]]:
    """Random tokens, cut into documents at places that differ from sequence to sequence."""
    generator = torch.Generator().manual_seed(seed)
    for step in range(1, count + 1):
        tokens = torch.randint(VOCABULARY, (B, T + 1), generator=generator)
        cuts = torch.randint(1, T, (B, 3), generator=generator)
        position = torch.arange(T)[:, None]
        starts = torch.where(cuts[:, None] <= position, cuts[:, None], 0).amax(dim=-1).int()
        batch = Batch(tokens[:, :-1], tokens[:, 1:], starts if documents else None)
        yield batch, DropoutKey(seed=seed, step=step, layer=0, first_sequence=0)


def probed(fault: Fault, dtype: str, seed: int = 0, count: int = PROBES, n_layers: int = 2) -> Row:
    """The results of a run's probe on a small model with initial weights: for each layer alone, in the run's precision
    and in a higher one, and for the whole model."""
    torch.manual_seed(seed)
    n_kv_heads = 2 if fault.grouped else 4
    asked = fault.score
    fields = {name: getattr(asked, name) for name in ("window", "soft_cap", "alibi", "sinks", "formula")}
    attend = build_attention(fault.attention)
    model = GPT(
        GPTConfig(n_layers=n_layers, n_heads=4, n_kv_heads=n_kv_heads, n_embd=64),
        VOCABULARY,
        T,
        attend,
        score=ScoreConfig(**fields),
        documents=fault.documents,
    )
    shape = AttentionShape(16, 4, n_kv_heads, DTYPES[dtype], torch.device("cpu"))
    probe = ParityProbe(ParityConfig(every=1), fault.attention, shape)
    found = [probe.measure(model, batch, key) for batch, key in batches(seed, fault.documents, count)]
    return {
        "layers": max(x["parity/attention_error"] for x in found),
        "layers_higher": max(x.get("parity/attention_error_higher", 0.0) for x in found),
        "warned": next((sentence for x in found if (sentence := wrong_alone(x))), None),
        "whole_model": any(beyond_rounding(x) for x in found),
    }


def fault_rows(row: Row) -> list[Row]:
    """A row with everything that catches its fault in its precision: lines of the check, in that precision alone and in
    all precisions, and the probe."""
    fault, dtype = FAULTS[row["name"]], row["dtype"]
    alone = failing(fault.attention, (dtype,))
    caught = {"check": alone, "check_higher": alone or failing(fault.attention, tuple(DTYPES))}
    return [row | caught | probed(fault, dtype)]


def right_row(name: str, quick: bool) -> list[Row]:
    """What the check says about correct attention."""
    allowed = ALLOWED.get(name, NONE)
    report = replace(check(right_attention.subject(name), seconds=3600, quick=quick), allowed=allowed)
    largest = max(line.share for line in report.lines if line.share is not None and line.name not in allowed)
    accused = [line.name for line in report.failed()]
    calls = sum(line.calls for line in report.lines)
    return [{"name": name, "accused": accused, "allowed": sorted(allowed), "largest": largest, "calls": calls}]


CAUGHT: dict[str, Callable[[Row], bool]] = {
    "`gpt-attention check` in that precision alone": lambda row: bool(row["check"]),
    "`gpt-attention check` in all three precisions": lambda row: bool(row["check_higher"]),
    "the probe of a run in that precision": lambda row: row["warned"] is not None,
    "its calls of each layer in that precision alone": lambda row: not row["layers"] <= 1,
    "its comparison of whole models alone": lambda row: bool(row["whole_model"]),
}


def caught(rows: Sequence[Row]) -> str:
    """A line for each question, with the number of rows of each precision for which the answer is yes."""
    of = {dtype: [row for row in rows if row["dtype"] == dtype] for dtype in DTYPES}
    head = ["", *(f"{dtype}, of {len(of[dtype])}" for dtype in DTYPES)]
    return table(head, ([label, *(str(sum(map(true, of[x]))) for x in DTYPES)] for label, true in CAUGHT.items()))


def accused(rows: Sequence[Row]) -> str:
    """The number of correct implementations and of those that are accused."""
    wrong, most = [row["name"] for row in rows if row["accused"]], max(row["largest"] for row in rows)
    head = ["correct", "calls", "accused", "the largest error, as a share of the allowed one"]
    return table(head, [[str(len(rows)), f"{sum(row['calls'] for row in rows):,}", str(len(wrong)), f"{most:.2f}"]])


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def prepare() -> None:
    """Make a process ready to measure."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    stack.enter_context(registered())


def measure(recorder: Recorder, jobs: list[Job], per_core: int = 2) -> None:
    """Add the rows of all jobs, in several processes for each core."""
    workers = per_core * (os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, get_context("spawn"), prepare) as pool:
        for done in as_completed([pool.submit(job) for job in jobs]):
            recorder.add(*done.result())
            say(f"{len(recorder.rows)} rows: {done.result()[-1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--right", action="store_true", help="check correct attention instead of faults")
    parser.add_argument("--quick", action="store_true", help="with --right: a twelfth of the inputs")
    asked = parser.parse_args()
    now = measurement(["tests.attention.faults", *sys.argv[1:]], torch.device("cpu"))
    path = result_file("attention-right" if asked.right else "attention-faults", now["device"])
    with Recorder(path, ("name",) if asked.right else ("name", "dtype", "seed"), now) as recorder:
        jobs: list[Job] = [
            partial(fault_rows, {"name": name, "dtype": dtype, "seed": 0}) for name in FAULTS for dtype in DTYPES
        ]
        if asked.right:
            jobs = [partial(right_row, name, asked.quick) for name in right_attention.NAMES]
        measure(recorder, jobs)
    write_table(path.with_suffix(".md"), accused(read(path)) if asked.right else caught(read(path)), path)


if __name__ == "__main__":
    main()
