"""A trained model as a folder that Hugging Face's AutoModelForCausalLM, AutoTokenizer and pipeline read.

export.py     the folder, written and read back by transformers
weights.py    the architecture that computes the same as the model, and the weights under its names
tokenizer.py  the run's tokenizer in the format of `tokenizers`
nanogpt.py    nanoGPT's ckpt.pt
card.py       README.md with the run's figures

Written as the files that transformers documents; it is imported to read them back.
"""

from recipe.infer.huggingface.card import Origin, read_origin
from recipe.infer.huggingface.export import check_folder, export

__all__ = ["Origin", "check_folder", "export", "read_origin"]
