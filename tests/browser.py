"""Pages in a browser without a window, where one is installed."""

import shutil
import subprocess
from pathlib import Path

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome is installed")


def opened(address: str, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """The browser's output: the page's document after ten seconds of virtual time, and the messages of its console."""
    command = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--enable-logging=stderr",
        f"--user-data-dir={folder}", "--virtual-time-budget=10000", *flags, "--dump-dom", address,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
