"""What tests of several files of this folder ask for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.programs import train


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """refused(*overrides): what train.py says as it refuses them."""

    def said(*overrides: str) -> str:
        assert train(*overrides) == 1
        return capsys.readouterr().err

    return said
