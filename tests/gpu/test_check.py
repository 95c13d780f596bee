"""`gpt-attention check` on a GPU."""

import re
import time

import pytest

from attention.check.cli import main


@pytest.mark.slow
@pytest.mark.whole_gpu  # it measures a time
def test_a_check_tries_every_input_in_some_precision_within_a_minute_and_flash_is_correct(capsys):
    """Twice: where Triton's cache is empty, the first minute goes into compiling, and tries what it can."""
    for _ in range(2):
        started = time.monotonic()
        assert main(["flash", "--device", "cuda"]) == 0
        assert time.monotonic() - started < 70  # with the start of its processes, and their end
        page = capsys.readouterr().out
        assert re.search(r"^flash is correct in all \d+ checks", page, flags=re.MULTILINE)
        assert "no time was left" not in page
    assert not re.findall("for none with.*", page)
