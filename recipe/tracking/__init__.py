"""Tracking: metrics.jsonl, the progress line, summary.json, the loss curve, W&B."""
