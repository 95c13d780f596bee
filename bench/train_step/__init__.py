"""Whole training steps: their speed and memory beside those of nanoGPT."""
