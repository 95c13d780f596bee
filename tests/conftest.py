"""The tests' models are small: threads would wait for each other longer than they work."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, and for the processes that tests start
