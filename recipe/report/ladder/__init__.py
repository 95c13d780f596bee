"""The report of a ladder: the law of each arm, its prediction beside what was measured, and differences over size."""
