"""What a run tells: metrics.jsonl, the progress line, summary.json, the loss curve, W&B."""
