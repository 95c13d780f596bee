"""The stages of a pipeline in shared memory, which some roles of a program fill and others empty.

Step i uses stage i % n. A barrier's phase is the parity of how often it was waited for, so it follows from the step.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


class Stage(NamedTuple):
    """The stage of a step: its index, and how many steps used it before."""

    index: Any
    uses: Any


@gluon.jit
def stage_of(i_step, STAGES):
    """The Stage of step i_step in a pipeline of so many."""
    return Stage(i_step % STAGES, i_step // STAGES)


@gluon.jit
def wait_full(barriers, stage, is_there=True):
    """Wait until the stage is filled for this step, if it will be."""
    mbarrier.wait(barriers.index(stage.index), stage.uses & 1, pred=is_there)


@gluon.jit
def wait_empty(barriers, stage):
    """Wait until the stage is free for this step: until the step that used it before is done with it."""
    mbarrier.wait(barriers.index(stage.index), (stage.uses & 1) ^ 1)
