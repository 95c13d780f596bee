"""All kernels of the record, and compiling many of them at the same time."""

import multiprocessing
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache

from bench.kernels import hopper, plain, small
from bench.kernels.compiler import Kernel, Report, collect, compiled
from bench.kernels.record import Record

FEW = 50  # kernels, for which other processes would begin too late to be worth their processor time


@cache
def kernels() -> dict[str, Kernel]:
    """Name -> kernel."""
    launches = {sm: [*plain.launches(sm), *small.launches(sm)] for sm in (80, 90)}
    launches[90] += hopper.launches()
    kernels: dict[str, Kernel] = {}
    for architecture, calls in launches.items():
        for kernel in collect(architecture, calls):
            assert kernels.setdefault(kernel.name, kernel).sources == kernel.sources, kernel.name
    return kernels


def changed(record: Record) -> list[str]:
    """The kernels whose sources differ from the record's."""
    return [name for name, kernel in kernels().items() if not record.has(name, kernel.sources)]


def one_of_each_kind() -> list[str]:
    """The first kernel of each group and kind, the first two words of its name: for short sequences, where there are
    such kernels, because they compile in a quarter of the time."""
    ordered = sorted(kernels(), key=lambda name: "-short/" not in name)
    return list({tuple(name.split("/")[:2]): name for name in reversed(ordered)}.values())


def compile_all(names: Sequence[str]) -> Iterator[tuple[str, Report]]:
    """Compile kernels, the same one only once, in as many processes as there are processors."""
    same: dict[str, list[str]] = {}
    for name in names:
        same.setdefault(kernels()[name].sources, []).append(name)
    for first, report in in_processes([group[0] for group in same.values()]):
        for name in same[kernels()[first].sources]:
            yield name, report


def in_processes(names: Sequence[str]) -> Iterable[tuple[str, Report]]:
    """Compile different kernels. A new process needs five seconds until it begins."""
    if len(names) <= FEW:
        yield from map(compile_one, names)
        return
    processes = min(os.cpu_count() or 1, len(names) // FEW)
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        for done in as_completed(pool.submit(compile_one, name) for name in names):
            yield done.result()


def compile_one(name: str) -> tuple[str, Report]:
    """A kernel's name and report."""
    return name, compiled(kernels()[name])
