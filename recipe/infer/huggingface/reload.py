"""An exported folder, read back by transformers: the same logits and the same tokens, or a refusal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from data.errors import brief
from data.tokenizers import Tokenizer
from model.gpt import GPT
from recipe.infer.huggingface.settings import WeightsError
from recipe.infer.huggingface.weights import REMEDY

TOKENS = 256  # of the text whose logits are compared, at least; longer than a window in any case
TOLERANCE = 1e-4  # of the largest logit: rounding in fp32 stays below a tenth of it
TEXT = "Déjà vu: 木 x_1 = 12345;\n\n  two  blanks\tand a tab"


class Opened(NamedTuple):
    """A folder, opened by transformers.

    loaded  names of weights that are missing, unexpected or of another shape, by kind
    """

    tokenizer: Any
    model: Any
    loaded: dict[str, Any]


def open_folder(folder: Path) -> Opened:
    """The tokenizer and the model in fp32, from safetensors, without code from the folder and without the network.

    Raises ImportError without transformers, and whatever its classes raise.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    here: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    weights: dict[str, Any] = {"dtype": torch.float32, "use_safetensors": True, "output_loading_info": True}
    with silent():
        tokenizer = AutoTokenizer.from_pretrained(folder, **here)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, **weights, **here)
    return Opened(tokenizer, model[0].eval(), model[1])


def check_reloaded(folder: Path, model: GPT, tokenizer: Tokenizer) -> None:
    """Raise WeightsError unless transformers reads `folder` as this model and this tokenizer."""
    try:
        opened = open_folder(folder)
    except ModuleNotFoundError as error:
        raise WeightsError(
            f"An export is read back and compared, for which {error.name} is missing; install it with: "
            "pip install transformers"
        ) from error
    except Exception as error:  # architectures raise exceptions of many types
        raise WeightsError(f"transformers does not read the exported folder ({brief(error)}); {REMEDY}") from error
    for kind, names in opened.loaded.items():
        if names:
            raise WeightsError(
                f"transformers reads other weights than this model has ({kind}: {', '.join(map(str, names))[:200]}); "
                f"{REMEDY}"
            )
    gap, largest = difference(opened.model, model)
    if not gap <= TOLERANCE * largest:
        raise WeightsError(
            f"With the exported weights {type(opened.model).__name__} computes other logits than this model: they are "
            f"up to {gap:.3g} apart, where the largest is {largest:.3g}; {REMEDY}"
        )
    if opened.tokenizer(TEXT, verbose=False)["input_ids"] != tokenizer.encode_ordinary(TEXT):
        raise WeightsError("transformers reads other tokens than this tokenizer; export a run with another tokenizer.")


@contextmanager
def silent() -> Iterator[None]:
    """Without transformers' progress bars and warnings."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@torch.no_grad()
def difference(theirs: Any, model: GPT) -> tuple[float, float]:
    """The largest difference between the logits of two models on random tokens, and the largest logit."""
    windows = [score.window for score in model.scores if score.window is not None]
    T = min(model.seq_len, max(TOKENS, *(window + 1 for window in windows)) if windows else TOKENS)
    tokens = torch.randint(model.vocab_size, (1, T), generator=torch.Generator().manual_seed(0))
    ours = model(tokens).float()
    return (theirs(tokens).logits - ours).abs().max().item(), ours.abs().max().item()
