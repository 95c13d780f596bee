"""Compile the GPU kernels without a GPU, compare their resources with bench/kernels/record.json, and renew the record.

    python -m bench.kernels             all of them, with the installed Triton: some minutes on two cores
    python -m bench.kernels --changed   kernels whose sources changed since, and one of each kind
    python -m bench.kernels --check     write nothing

No kernel may take more registers, spill more or have more serialised products than recorded, none may outgrow its GPU,
and no barrier may overlap other shared memory. Where more registers are intended, --accept-growth records them. A
Triton that the record lacks may take more: --changed then compares only kernels whose sources changed.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import triton
from rich.progress import track

from bench.kernels.compiler import REGISTERS, SHARED, Kernel, Report
from bench.kernels.grid import changed, compile_all, kernels, one_of_each_kind
from bench.kernels.record import FILE, Entry, Figures, Record

NEW = Figures("", REGISTERS, 0, 0, 0)  # the bound of a kernel that is not in the record


def faults(kernel: Kernel, report: Report) -> Iterator[str]:
    """Why a kernel must not be used."""
    shared = SHARED[kernel.target.arch]
    at_most = REGISTERS // report.threads // 8 * 8
    if report.figures.shared > shared:
        yield f"{kernel.name} needs {report.figures.shared} bytes of shared memory; its GPU has {shared}"
    if report.figures.registers > at_most:
        yield f"{kernel.name} needs {report.figures.registers} registers a thread; its {report.threads} have {at_most}"
    if not kernel.options.get("enable_fp_fusion"):
        yield f"{kernel.name} is launched without enable_fp_fusion=True, which Triton 3.10 no longer implies"
    if report.overlaps:
        yield f"{kernel.name} has barriers that overlap other shared memory, at {report.overlaps}"


def bound(record: Record, kernel: Kernel, version: str) -> Figures | None:
    """The most that a kernel may use; None for an unchanged kernel that this Triton version has not compiled yet."""
    if record.has(kernel.name, kernel.sources):
        return record.kernels[kernel.name].versions.get(version)
    return record.bound(kernel.name, version) or NEW


def growth(kernel: Kernel, report: Report, bound: Figures) -> Iterator[str]:
    """A sentence for each resource of which a kernel uses more than its bound."""
    for field, unit in (
        ("registers", "registers a thread"),
        ("spilled", "spilled bytes"),
        ("serialised", "serialised products"),
    ):
        now, most = getattr(report.figures, field), getattr(bound, field)
        if now > most:
            yield f"{kernel.name} has {now} {unit}; at most {most} are recorded"


def renewed(record: Record, today: dict[str, Kernel], reports: dict[str, Report], version: str) -> Record:
    """The record of today's kernels with new reports. The old figures of changed kernels become bounds."""
    entries = {}
    for name, kernel in today.items():
        entry = record.kernels.get(name, Entry(kernel.sources, {}))
        versions = dict(entry.versions)
        if entry.sources != kernel.sources:
            versions = {other: figures._replace(ptx="") for other, figures in versions.items()}
        if name in reports:
            versions[version] = reports[name].figures
        entries[name] = Entry(kernel.sources, versions)
    return Record(entries)


def other_code(record: Record, reports: dict[str, Report], version: str) -> Iterator[str]:
    """The kernels whose PTX differs from the recorded one, although their sources are the same."""
    for name, report in reports.items():
        recorded = record.kernels[name].versions.get(version)
        if recorded is not None and recorded.ptx and report.figures != recorded:
            yield f"{name} compiles to other code than recorded, though its sources are the same; run make kernels"


def main(arguments: Sequence[str] | None = None, file: Path = FILE) -> int:
    """Returns 1 if a kernel grew or does not fit its GPU; the record then stays as it is."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--changed", action="store_true", help="only what changed since, and one kernel of each kind")
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--accept-growth", action="store_true", help="record kernels that use more registers")
    args = parser.parse_args(arguments)
    if triton.knobs.runtime.interpret:
        parser.error("kernels are compiled, and TRITON_INTERPRET=1 asks for the interpreter; unset it")
    record, version = Record.read(file), triton.__version__
    stale = changed(record)
    names = sorted({*stale, *one_of_each_kind()}) if args.changed else list(kernels())
    print(f"Triton {version}: {len(names)} of {len(kernels())} kernels, of which {len(stale)} changed since the record")
    quiet = not sys.stdout.isatty()
    reports = dict(track(compile_all(names), "compiling", total=len(names), transient=True, disable=quiet))
    wrong = [line for name, report in reports.items() for line in faults(kernels()[name], report)]
    if not args.accept_growth:
        for name, report in reports.items():
            if most := bound(record, kernels()[name], version):
                wrong += growth(kernels()[name], report, most)
    if args.changed:
        wrong += other_code(record, {name: report for name, report in reports.items() if name not in stale}, version)
    print(*wrong, sep="\n", end="\n" if wrong else "")
    if wrong:
        print(f"{file.name} stays as it is", file=sys.stderr)
        return 1
    if args.check:
        return 0
    renewed(record, kernels(), reports, version).write(file)
    print(f"wrote {file.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
