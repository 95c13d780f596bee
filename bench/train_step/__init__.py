"""Whole training steps: their speed and memory beside nanoGPT's."""
