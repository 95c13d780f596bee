"""Generating text, and attention to a cache."""
