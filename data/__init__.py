"""Text to batches: corpora, tokenizers, prepared tokens, and the batch as a function of the step."""
