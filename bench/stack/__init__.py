"""The kernels with every supported release of Triton."""
