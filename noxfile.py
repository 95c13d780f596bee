"""The supported releases of torch, each with its Triton, and of Python: `make stack`, or `nox` with nox's own options.

    nox --list                                the pairs
    nox -k 'torch_2_15 and python_3_14'       one of them

Each pair has an environment of its own, removed when its session ends. In it run the tests of what depends on the
releases, in Triton's interpreter, and kernels are compiled for GPUs that this machine need not have. A Python that this
machine does not have is skipped; uv can install most. What is downloaded stays in .nox/ until another release of torch
has its turn: up to 25 GB.
"""

import shutil
from pathlib import Path

import nox

nox.options.default_venv_backend = "uv"
nox.options.error_on_missing_interpreters = False
PYTHONS = ("3.14", "3.13", "3.12", "3.11")
TORCHES = ("2.15", "2.14", "2.13", "2.12", "2.11")
PAIRS = [
    nox.param(python, torch, id=f"torch_{torch.replace('.', '_')}-python_{python.replace('.', '_')}")
    for torch in TORCHES
    for python in PYTHONS
]
# Kernels and their operators, torch's compiler, its attention and optimizers, transformers, Hydra, checkpoints.
TESTS = (
    "tests/attention/test_flash.py",
    "tests/attention/test_interface.py",
    "tests/attention/test_formula.py",
    "tests/attention/test_tiled.py",
    "tests/attention/test_decode.py",
    "tests/attention/test_peers.py",
    "tests/attention/test_torch_sdpa.py",
    "tests/attention/test_transformers.py",
    "tests/model/test_gpt.py",
    "tests/recipe/training/test_optimizer.py",
    "tests/recipe/training/test_checkpoint.py",
    "tests/recipe/run/test_config.py",
    "tests/test_train.py",
)


def cache_of(torch: str) -> Path:
    """The folder for what uv downloads for a release of torch; those of other releases are removed."""
    folder = Path(".nox", f"cache-{torch}").absolute()
    for other in folder.parent.glob("cache-*"):
        if other != folder:
            shutil.rmtree(other)
    return folder


@nox.session
@nox.parametrize("python,torch", PAIRS)
def stack(session: nox.Session, torch: str) -> None:
    """A selection of the tests, and the kernels compiled for several GPUs."""
    try:
        # Triton 3.6's interpreter turns arrays of one element into numbers, which NumPy 2.4 refuses.
        packages = [f"torch=={torch}.*", "-e", ".[dev]", *(["numpy<2.4"] if torch == "2.11" else [])]
        session.install(*packages, env={"UV_CACHE_DIR": str(cache_of(torch))})
        session.run("python", "-m", "pytest", "-q", "-m", "not slow", *TESTS, *session.posargs)
        session.run("python", "-m", "bench.kernels.oldest", env={"TRITON_INTERPRET": "0"})
    finally:
        shutil.rmtree(session.virtualenv.location, ignore_errors=True)
