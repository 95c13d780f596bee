"""Python reads this file as it starts, where the fixture `forked` asks for it: the command runs in a fork of server.py.

This process stays in its place: it passes signals on, takes the command with it when it is killed, and ends as the
command ends. A command with flags of Python but -u starts as always, and so does one that the server refuses.
"""

import os
import sys


def run(arguments: list[str]) -> None:
    """Run a command in a fork of the server, and end as it ends; return if the server refuses it."""
    import contextlib
    import json
    import signal
    import socket

    passed_on = {signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
    signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)  # until the command's number is known
    server = socket.socket(socket.AF_UNIX)
    server.connect(os.environ["FORK_SERVER"])
    request = {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ), "client": os.getpid()}
    socket.send_fds(server, [json.dumps(request).encode() + b"\n"], [0, 1, 2])
    replies = server.makefile()
    command = int(replies.readline())

    def pass_on(number, frame):
        with contextlib.suppress(ProcessLookupError):
            os.kill(command, number)

    if command:
        for number in passed_on:
            signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
    if not command:
        return
    status = int(replies.readline() or "1")
    if status < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


command = [argument for i, argument in enumerate(sys.orig_argv) if i > 1 or argument != "-u"][1:]
if command and (command[0] in ("-m", "-c") or not command[0].startswith("-")):
    run(command)
