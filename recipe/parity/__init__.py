"""Checks, during a run, that an attention computes the same as the reference."""
