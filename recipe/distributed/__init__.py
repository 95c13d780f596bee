"""Several ranks: joining them, and sharing a step, weights or sequences among them."""
