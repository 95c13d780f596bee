"""What has to be decided before torch and Triton are imported, also for the processes that tests start."""

import os

# The tests' models are small: threads would wait for each other longer than they work.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():
    # Without a GPU the Triton kernels run in Triton's interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")
