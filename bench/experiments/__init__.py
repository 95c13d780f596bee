"""The runs of train.py that the documents show, and their figures."""
