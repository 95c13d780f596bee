"""Which GPU kernels a measurement ran: a digest for each group of them, recorded with every result.

`python -m bench.release --status` compares the recorded digest with today's, and so tells which results are older than
the kernels that they measured. `kernel_digests` is the only place that says how a digest is made. It hashes the sources
that a group is compiled from: a comment changes the digest too, which costs a measurement and never hides a change.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

ROOT = Path(__file__).parents[1]
# group -> the files and folders that its kernels are compiled from
GROUPS = {
    "attention": ("attention/flash", "attention/dropout/kernel.py"),
    "cache": ("attention/decode", "attention/flash/decode.py", "attention/flash/decode_kernel.py"),
    "model": ("model/softmax_kernel.py", "model/dropout_kernel.py"),
    "softmax": ("bench/attention/softmax.py",),
}


def kernel_digests(root: Path = ROOT) -> dict[str, str]:
    """group -> digest of its kernels, of GROUPS, in the checkout at `root`."""
    return {group: digest(root, paths) for group, paths in GROUPS.items()}


def digest(root: Path, paths: tuple[str, ...]) -> str:
    """A digest of the names and contents of Python files."""
    state = hashlib.sha256()
    for path in paths:
        for file in sorted((root / path).rglob("*.py")) if (root / path).is_dir() else [root / path]:
            state.update(f"{file.relative_to(root)}\0".encode())
            state.update(file.read_bytes())
    return state.hexdigest()[:16]
