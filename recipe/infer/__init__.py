"""Trained models: generation, evaluation, Hugging Face."""
