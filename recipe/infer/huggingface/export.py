"""The exported folder: weights, configurations, tokenizer and card, written completely or not at all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from data.chat import ChatTemplate
from data.tokenizers import Tokenizer
from model.gpt import GPT
from recipe.infer.huggingface.card import Origin, model_card
from recipe.infer.huggingface.loading import WEIGHTS
from recipe.infer.huggingface.reload import check_reloaded
from recipe.infer.huggingface.settings import WeightsError
from recipe.infer.huggingface.tokenizer import special_tokens, to_tokenizers, token_id, tokenizer_config
from recipe.infer.huggingface.weights import describe


def export(
    model: GPT, tokenizer: Tokenizer, folder: Path, origin: Origin, template: ChatTemplate | None = None
) -> None:
    """Write a folder that AutoModelForCausalLM, AutoTokenizer and pipeline("text-generation") read.

    folder    is made, or empty; nothing is overwritten
    origin    of the weights, for the model card
    template  of the conversations that the model was trained on

    The folder gets its name when transformers has read it back as the same model. Raises WeightsError where no
    architecture describes the model, or the folder cannot be written.
    """
    check_folder(folder)
    described = describe(model, origin.config["attention"]["dropout"])
    special = special_tokens(tokenizer, template)
    ids = {f"{name}_id": token_id(tokenizer, token) for name, token in special.items()}
    files = {
        "config.json": described.config | {name: ids[name] for name in ("bos_token_id", "eos_token_id")},
        # Without it, transformers' pipeline asks for 256 tokens, and learned positions may end before. With max_length
        # instead, every call that gives max_new_tokens would warn.
        "generation_config.json": {
            **ids,
            "max_new_tokens": max(1, min(256, model.seq_len // 2)),
        },
        "tokenizer_config.json": tokenizer_config(
            model.seq_len, special, None if template is None else template.source
        ),
    }
    (architecture,) = described.config["architectures"]
    folder = folder.absolute()
    card = model_card(folder.name, architecture, origin)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of an export that was killed
    try:
        partial.mkdir(parents=True)
        save_file(described.tensors, partial / WEIGHTS, metadata={"format": "pt"})
        to_tokenizers(tokenizer).save(str(partial / "tokenizer.json"))
        for name, content in files.items():
            (partial / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        (partial / "README.md").write_text(card, encoding="utf-8")
        (partial / WEIGHTS).chmod((partial / "README.md").stat().st_mode)  # the library lets its owner alone read it
        check_reloaded(partial, model, tokenizer)
        partial.replace(folder)  # an empty folder gives way, a full one does not
    except (OSError, SafetensorError) as error:
        raise unwritable(folder, (isinstance(error, OSError) and error.strerror) or str(error)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_folder(folder: Path) -> None:
    """Raise WeightsError where there is something at `folder` already."""
    try:
        if folder.is_dir() and any(folder.iterdir()):
            raise unwritable(folder, "it is not empty")
        if folder.exists() and not folder.is_dir():
            raise unwritable(folder, "it is a file")
    except OSError as error:
        raise unwritable(folder, error.strerror or str(error)) from error


def unwritable(folder: Path, reason: str) -> WeightsError:
    """The refusal of a folder."""
    return WeightsError(f"export={folder} cannot be written as a folder ({reason}); name another folder.")
