"""Measurements that can be repeated: `python -m bench.<name>` writes JSON and figures to bench/results/."""
