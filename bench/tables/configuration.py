"""docs/configuration.md and its second page."""

from __future__ import annotations

from bench.tables.blocks import block
from recipe.run import reference

block("configuration")(reference.configuration)
block("configuration-training")(reference.training)
