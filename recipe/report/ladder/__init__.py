"""The report of a ladder: the law of each arm, its prediction beside the measurement, and differences over size."""
