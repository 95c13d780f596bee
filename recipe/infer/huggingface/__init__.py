"""Models of Hugging Face: a run starts from one, and a trained model becomes one.

starting.py   the options of a run that starts from a folder, and its tokenizer
loading.py    the weights of a folder
settings.py   config.json as options and back, by the tables of families.py; nanoGPT's ckpt.pt
export.py     a folder for AutoModelForCausalLM, AutoTokenizer and pipeline, written and read back by transformers
weights.py    the architecture that computes the same as the model, and the weights under its names
"""

from collections.abc import Iterator, Sequence
from typing import Any

from attention import Score
from model.gpt import GPT
from model.options import GPTConfig


class HuggingFace:
    """The weights of a folder of transformers, or of a name on the hub, whose client takes a tenth of a second to
    import; see recipe.run.starting."""

    def options(self, source: str) -> dict[str, Any]:
        from recipe.infer.huggingface.starting import start_from

        return start_from(source).options()

    def mistakes(
        self, source: str, model: GPTConfig, scores: Sequence[Score], seq_len: int, tokenizer: str
    ) -> Iterator[str]:
        from recipe.infer.huggingface.loading import folder_mistakes

        return folder_mistakes(source, model, scores, seq_len, tokenizer)

    def load(self, model: GPT, source: str) -> None:
        from recipe.infer.huggingface.loading import load

        load(model, source)
