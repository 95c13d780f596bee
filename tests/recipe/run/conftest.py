"""What tests of several files of this folder ask for."""

import pytest

from tests.programs import train


@pytest.fixture
def refused(capsys):
    """refused(*overrides): what train.py says as it refuses them."""

    def said(*overrides):
        assert train(*overrides) == 1
        return capsys.readouterr().err

    return said
