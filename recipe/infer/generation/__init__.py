"""Text from a trained model, with a cache of keys and values.

engine.py    many prompts at a time, token by token: start reading here
steps.py     the device's part: prompts and tokens through the model
sampling.py  the next token from the logits and random numbers
text.py      prompts from a file, tokens to text, texts to a file
"""

from recipe.infer.generation.engine import Engine, Request, generate
from recipe.infer.generation.sampling import GenerationError, Sampling

__all__ = ["Engine", "GenerationError", "Request", "Sampling", "generate"]
