"""A trained model as a folder that Hugging Face's AutoModelForCausalLM, AutoTokenizer and pipeline read.

export.py     the folder as a whole
weights.py    the architecture that computes what the model does, and its weights in that architecture's naming
tokenizer.py  the run's tokenizer in the format of `tokenizers`
card.py       README.md with the run's figures
reload.py     transformers reads the folder back, and has to compute the same

Written as the files that transformers documents; it is imported to read them back.
"""

from recipe.huggingface.card import Origin, read_origin
from recipe.huggingface.export import check_folder, export

__all__ = ["Origin", "check_folder", "export", "read_origin"]
