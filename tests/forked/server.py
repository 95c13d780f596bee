"""A Python process that has imported the libraries of the commands, and forks for each: they start in 0.1 s, not 4 s.

`python -m tests.forked.server <socket>` ends when its standard input does. It imports nothing until the first command
comes. A command gets its arguments, environment, folder, input and output. A command is refused if it has another value
for a variable that libraries read when they are imported.
"""

import atexit
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import select
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

COMMANDS = ("train", "compare", "sample", "matplotlib.figure", "scipy.stats", "torch._dynamo", "torch.distributed.run")
# Those of the tests, which xdist's workers import.
TESTS = ("datasets", "torch._inductor.compile_fx", "transformers.models.auto.modeling_auto")
READ_AT_IMPORT = ("HF_", "KMP_", "MKL_", "OMP_", "TRITON_")


def main() -> None:
    """Fork for each client until the standard input ends."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1])
    listener.listen()
    imported_with = read_at_import(os.environ)
    while listener in select.select([listener, sys.stdin], [], [])[0]:
        client, _ = listener.accept()
        for module in COMMANDS + TESTS:
            importlib.import_module(module)
        importlib.import_module("tests.composing").hasten()
        gc.freeze()  # else a fork that collects garbage copies all memory
        if os.fork() == 0:
            listener.close()
            serve(client, imported_with)
            os._exit(0)
        client.close()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    with suppress(ChildProcessError):
        while os.wait():
            pass
    os._exit(0)  # Triton would complain of what gc.freeze has kept from the collector


def read_at_import(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that libraries read as they are imported."""
    return {name: value for name, value in variables.items() if name.startswith(READ_AT_IMPORT)}


def serve(client: socket.socket, imported_with: dict[str, str]) -> None:
    """Start the client's command, send its process id and then its status. Kill it if the client disconnects."""
    message, files, _, _ = socket.recv_fds(client, 1 << 20, 3)
    while not message.endswith(b"\n"):
        message += client.recv(1 << 20)
    request = json.loads(message)
    if read_at_import(request["environment"]) != imported_with:
        client.sendall(b"0\n")
        return
    command = multiprocessing.get_context("fork").Process(target=run, args=(request, files, client))
    command.start()
    for file in files:
        os.close(file)
    record = Path(sys.argv[1]).with_name(str(request["client"]))
    record.write_text(str(command.pid))
    with suppress(BrokenPipeError):
        client.sendall(f"{command.pid}\n".encode())
        if client.fileno() in select.select([command.sentinel, client.fileno()], [], [])[0]:
            command.kill()
        command.join()
        client.sendall(f"{command.exitcode}\n".encode())
    record.unlink()


def process_of(started: int) -> int:
    """The process that runs a command: the one that was started, or a fork in its place."""
    record = Path(os.environ["FORK_SERVER"]).with_name(str(started))
    return int(record.read_text()) if record.exists() else started


def run(request: dict[str, Any], files: list[int], client: socket.socket) -> None:
    """Become the command."""
    client.close()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    kind, *rest = arguments = request["arguments"]
    folder = {"-m": os.getcwd(), "-c": ""}.get(kind, str(Path(kind).absolute().parent))
    sys.path[:1] = [folder, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    try:
        if kind == "-m":
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif kind == "-c":
            sys.argv = ["-c", *rest[1:]]
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = arguments
            runpy.run_path(kind, run_name="__main__")
    finally:
        atexit._run_exitfuncs()


if __name__ == "__main__":
    main()
