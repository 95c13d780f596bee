"""Measuring everything that README and docs/ show, in parts that can run on different days."""
