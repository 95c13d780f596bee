"""`gpt-attention check` on a GPU."""

import re
import time

import pytest

from attention.check.cli import main


@pytest.mark.slow
def test_a_check_tries_every_input_in_some_precision_within_a_minute_and_flash_is_correct(capsys):
    """Beside other tests, the first minutes go into compiling, where Triton's cache is empty, and try what they can."""
    for _ in range(4):
        started = time.monotonic()
        assert main(["flash", "--device", "cuda"]) == 0
        assert time.monotonic() - started < 70  # with the start of its processes, and their end
        page = capsys.readouterr().out
        assert re.search(r"^flash is correct in all \d+ checks", page, flags=re.MULTILINE)
        if not (untried := re.findall("for none with.*|.*no time was left", page)):
            break
    assert not untried
