"""Tests one commit with every supported release of torch, Triton and Python: `make stack`.

noxfile.py at the top makes an environment for each pair of releases. In it `python -m bench.stack` runs.
"""

NVIDIA = ("sm_80", "sm_90a", "sm_100", "sm_120")
OTHERS = ("gfx942",)  # AMD's MI300X, on which the project does not run
