"""What some tests on a GPU need besides one."""

import pytest
import torch

TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
A_HOPPER_GPU = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)
# Head sizes of the Hopper kernels: with two backward kernels, one, and tiles of 64 keys.
EACH_SIZE = pytest.mark.parametrize("D", [64, 128, 256])
# Those that most models have.
COMMON_SIZES = pytest.mark.parametrize("D", [64, 128])
