"""The supported releases of torch, each with its Triton, and of Python: `make stack`, or `nox` with nox's own options.

    nox --list                          the pairs
    nox --python 3.14 -k torch_2_15     one of them

Each pair has an environment of its own, removed when its session ends: about 6 GB, of which uv's cache keeps a copy.
bench.stack runs in it, records a row in .cache/stack/ and prints the table of all rows. A Python that this machine does
not have is skipped; uv can install most.
"""

import shutil

import nox

nox.options.default_venv_backend = "uv"
nox.options.error_on_missing_interpreters = False
PYTHONS = ("3.14", "3.13", "3.12", "3.11")
TORCHES = ("2.15", "2.14", "2.13", "2.12", "2.11")


@nox.session(python=PYTHONS)
@nox.parametrize("torch", [nox.param(torch, id=f"torch_{torch.replace('.', '_')}") for torch in TORCHES])
def stack(session: nox.Session, torch: str) -> None:
    """A selection of the tests, and the kernels compiled for several GPUs."""
    try:
        # Triton 3.6's interpreter turns arrays of one element into numbers, which NumPy 2.4 refuses.
        session.install(f"torch=={torch}.*", "-e", ".[dev]", *(["numpy<2.4"] if torch == "2.11" else []))
        session.run("python", "-m", "bench.stack", *session.posargs)
    finally:
        shutil.rmtree(session.virtualenv.location, ignore_errors=True)
