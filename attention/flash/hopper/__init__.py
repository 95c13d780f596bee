"""The Hopper path of attention=flash: warp-specialised kernels in Gluon, Triton's lower level."""
