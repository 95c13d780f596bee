"""Everything that turns attention/, model/ and data/ into runs and answers."""

from pathlib import Path

CONF = Path(__file__).parents[1] / "conf"
