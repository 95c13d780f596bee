"""Everything that turns attention/, model/ and data/ into runs and answers.

This file imports nothing of it, so that tab completion can answer before torch is loaded.
"""

from pathlib import Path

CONF = Path(__file__).parents[1] / "conf"
