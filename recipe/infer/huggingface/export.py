"""The exported folder: weights, configurations, tokenizer and card, written completely or not at all.

The architecture is the one of transformers that computes exactly the same: writing the model's config.json for it and
reading this again gives the same model (settings.py). The folder gets its name when transformers has read it back: the
same logits and the same tokens, or a refusal.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from torch import Tensor

from attention.errors import Option
from data.chat import ChatTemplate
from data.errors import brief
from data.own_tokenizer import END_OF_TEXT, OwnTokenizer
from data.tokenizers import CHARACTERS, Tokenizer
from model.gpt import GPT
from model.options import GPTConfig, ModelError
from model.score import layer_scores
from recipe.files import plain
from recipe.infer.huggingface.families import FAMILIES, Family
from recipe.infer.huggingface.loading import WEIGHTS
from recipe.infer.huggingface.settings import WeightsError, essence, read_settings, write_settings
from recipe.wording import as_typed

REMEDY = "describe a changed model in recipe/infer/huggingface/families.py, or export one that is not."


class Described(NamedTuple):
    """A model in an architecture of transformers.

    config   the content of config.json
    tensors  the content of model.safetensors
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]


def describe(model: GPT, attention_dropout: float) -> Described:
    """The model in the architecture that matches it.

    attention_dropout  of its training, for further training

    Raises WeightsError, which names the options that no architecture has.
    """
    if model.config.mixers:
        raise WeightsError("No architecture of transformers has this model's model.layers.")
    differing = {kind: differences(model, family) for kind, family in FAMILIES.items()}
    family = next((FAMILIES[kind] for kind in FAMILIES if not differing[kind]), None)
    if family is None:
        nearest = min(FAMILIES, key=lambda kind: len(differing[kind]))
        named = " and ".join(f"{name}={as_typed(plain(value))}" for name, value in differing[nearest].items())
        raise WeightsError(
            f"No architecture of transformers has this model's {named}. The nearest, without them, is {nearest}; "
            "docs/models.md lists what each has."
        )
    content = write_settings(family, model)
    content |= dropouts(family, model.config, attention_dropout) | {"initializer_range": 0.02}
    return Described(content, renamed(model, family))


def differences(model: GPT, family: Family) -> dict[str, Any]:
    """The model's options that change when it is written to a family's config.json and read back."""
    ours = essence(model.config, model.scores, model.vocab_size)
    content = write_settings(family, model)
    try:
        settings = read_settings(content, "export")
    except ModelError:  # the family's config.json does not describe a valid model
        return ours
    their_scores = layer_scores(settings.score, model.config.n_layers)
    theirs = essence(settings.model, their_scores, content["vocab_size"])
    if family.zeros is not None and not model.config.bias:
        theirs["bias"] = False
    differing = {name: value for name, value in ours.items() if name not in theirs or theirs[name] != value}
    scores = differing.pop("score", None)
    if differing.pop("qk_eps", None) and "qk_norm" not in differing:
        differing["norm_eps"] = None  # its default differs between queries and keys, and the stream
    named = {f"model.{name}": shown(model.config, name, value) for name, value in differing.items()}
    return named | (of_scores(model, their_scores) if scores else {})


def shown(config: GPTConfig, name: str, value: Any) -> Any:
    """The value of an option, in the form in which the user gave it."""
    return config.rope_scaling.kind if name == "rope_scaling" else getattr(config, name, value)


def of_scores(model: GPT, theirs: tuple[Any, ...]) -> dict[str, Any]:
    """The options of score.* that a family does not have, by the names that the user writes."""
    if len(set(model.scores)) > 1:
        return {"score.layers": "layers that differ"}
    (ours,) = set(model.scores)
    asked = ours.features()
    if ours.formula is not None:  # also one that only scales, which every implementation has
        asked |= {"formula": Option("score.formula", ours.formula)}
    return {option.name: option.value for name, option in asked.items() if name not in theirs[0].features()}


def dropouts(family: Family, config: GPTConfig, attention_dropout: float) -> dict[str, float]:
    """The rates of dropout, for further training, as far as the architecture has keys for them."""
    if family.kind == "gpt2":
        return {"embd_pdrop": config.dropout, "resid_pdrop": config.dropout, "attn_pdrop": attention_dropout}
    both = {"embedding_dropout": config.dropout, "residual_dropout": config.dropout}
    return {"attention_dropout": attention_dropout} | (both if family.kind == "starcoder2" else {})


def renamed(model: GPT, family: Family) -> dict[str, Tensor]:
    """The weights under the family's names. Raises WeightsError for one that it has no name for."""
    tensors, config = dict[str, Tensor](), model.config
    for name, parameter in model.named_parameters():
        if name.startswith("further."):  # the second head, which only training uses
            continue
        try:
            names = family.stored(name)
        except KeyError as error:
            raise WeightsError(f"{family.architecture} has no weights such as this model's {name}; {REMEDY}") from error
        value = parameter[: model.vocab_size] if name in ("wte.weight", "lm_head.weight") else parameter
        if family.transposed and value.ndim == 2 and name.startswith("h."):
            value = value.T
        sizes = [n * config.head_size for n in (config.n_heads, config.kv_heads, config.kv_heads)]
        for stored_name, part in zip(names, value.split(sizes) if len(names) > 1 else [value], strict=True):
            # A copy on the CPU that shares no memory with another, which safetensors would refuse.
            tensors[stored_name] = part.detach().cpu().clone(memory_format=torch.contiguous_format)
            bias = stored_name.removesuffix("weight") + "bias"
            if family.zeros and not config.bias and family.zeros.search(bias) and not name.startswith("w"):
                tensors[bias] = torch.zeros(len(parameter))
    return tensors


TOKENS = 256  # of the text whose logits are compared, at least; longer than a window in any case
TOLERANCE = 1e-4  # of the largest logit: rounding in fp32 stays below a tenth of it
TEXT = "Déjà vu: 木 x_1 = 12345;\n\n  two  blanks\tand a tab"


def export(
    model: GPT, tokenizer: Tokenizer, folder: Path, attention_dropout: float, template: ChatTemplate | None = None
) -> None:
    """Write a folder that AutoModelForCausalLM, AutoTokenizer and pipeline("text-generation") read.

    folder             is made, or empty; nothing is overwritten
    attention_dropout  of its training, for further training
    template           of the conversations that the model was trained on

    The folder gets its name when transformers has read it back as the same model. Raises WeightsError where no
    architecture describes the model, or the folder cannot be written.
    """
    check_folder(folder)
    described = describe(model, attention_dropout)
    special = special_tokens(tokenizer, template)
    ids = {f"{name}_id": token_id(tokenizer, token) for name, token in special.items()}
    files = {
        "config.json": described.config | {name: ids[name] for name in ("bos_token_id", "eos_token_id")},
        # Without it, transformers' pipeline asks for 256 tokens, and learned positions may end before. With max_length
        # instead, every call that gives max_new_tokens would warn.
        "generation_config.json": {**ids, "max_new_tokens": max(1, min(256, model.seq_len // 2))},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **special,
            "padding_side": "left",  # prompts of different lengths are continued at their ends
            "model_max_length": model.seq_len,
            "clean_up_tokenization_spaces": False,
            **({} if template is None else {"chat_template": template.source}),
        },
    }
    folder = folder.absolute()
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of an export that was killed
    try:
        partial.mkdir(parents=True)
        save_file(described.tensors, partial / WEIGHTS, metadata={"format": "pt"})
        to_tokenizers(tokenizer).save(str(partial / "tokenizer.json"))
        for name, content in files.items():
            (partial / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        (partial / "README.md").write_text(model_card(folder.name, model.seq_len), encoding="utf-8")
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


def check_reloaded(folder: Path, model: GPT, tokenizer: Tokenizer) -> None:
    """Raise WeightsError unless transformers reads `folder` as this model and this tokenizer, in fp32 and without code
    from the folder."""
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        local = {"trust_remote_code": False, "local_files_only": True}
        weights = {"dtype": torch.float32, "use_safetensors": True, "output_loading_info": True}
        with silent():
            read = AutoTokenizer.from_pretrained(folder, **local)
            theirs, notes = AutoModelForCausalLM.from_pretrained(folder, **weights, **local)
    except ModuleNotFoundError as error:
        raise WeightsError(
            f"An export is read back and compared, for which {error.name} is missing; install it with: "
            "pip install transformers"
        ) from error
    except Exception as error:  # architectures raise exceptions of many types
        raise WeightsError(f"transformers does not read the exported folder ({brief(error)}); {REMEDY}") from error
    for kind, names in notes.items():  # of weights that are missing, unexpected or of another shape
        if names:
            raise WeightsError(
                f"transformers reads other weights than this model has ({kind}: {', '.join(map(str, names))[:200]}); "
                f"{REMEDY}"
            )
    gap, largest = difference(theirs.eval(), model)
    if not gap <= TOLERANCE * largest:
        raise WeightsError(
            f"With the exported weights {type(theirs).__name__} computes other logits than this model: they are "
            f"up to {gap:.3g} apart, where the largest is {largest:.3g}; {REMEDY}"
        )
    if read(TEXT, verbose=False)["input_ids"] != tokenizer.encode_ordinary(TEXT):
        raise WeightsError("transformers reads other tokens than this tokenizer; export a run with another tokenizer.")


def to_tokenizers(encoding: Tokenizer) -> tokenizers.Tokenizer:
    """The same text to the same ids and back, in the format of `tokenizers`, which transformers loads without code.

    A tokenizer that the user brought has this format already. All others are byte-level BPE: "bytes" has no merges.
    tiktoken keeps only the tokens in the order in which they were learned; the pair that each was merged from follows
    from it. Raises WeightsError for tokens that no merges of pairs give."""
    if isinstance(encoding, OwnTokenizer):
        tokenizer = tokenizers.Tokenizer.from_str(encoding.content)
        tokenizer.post_processor = None  # such as one that adds a token to begin a text: training had none
        return tokenizer
    tokens = [encoding.decode_single_token_bytes(token) for token in range(encoding.eot_token)]
    vocab = {as_characters(token): rank for rank, token in enumerate(tokens)}
    if len(vocab) != len(tokens) or sum(len(token) == 1 for token in tokens) != 256:
        raise WeightsError(f"The tokens of {encoding.name} are not byte-level BPE, the only kind that can be exported.")
    ranks = {token: rank for rank, token in enumerate(tokens)}
    merges = [merged_from(token, ranks) for token in tokens if len(token) > 1]
    # Like tiktoken, take a piece that is a token as it is.
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return tokenizer


def merged_from(token: bytes, ranks: dict[bytes, int]) -> tuple[str, str]:
    """The two tokens that were merged into this one: the result of applying all earlier merges to its bytes."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, ranks[token]) for a, b in pairwise(parts)]
        first = min(range(len(pairs)), key=pairs.__getitem__)
        if pairs[first] >= ranks[token]:
            raise WeightsError(
                f"The token {token!r} is not a merge of two others; only byte-level BPE can be exported."
            )
        parts[first : first + 2] = [parts[first] + parts[first + 1]]
    return as_characters(parts[0]), as_characters(parts[1])


def special_tokens(tokenizer: Tokenizer, template: ChatTemplate | None) -> dict[str, str]:
    """The names of the tokens that begin, end and pad a text: from the chat template, else end-of-text.

    The models have no token for padding, which attention masks hide.
    """
    end = tokenizer.end if isinstance(tokenizer, OwnTokenizer) else END_OF_TEXT
    given = {} if template is None else template.tokens
    return {name: given.get(name, end) for name in ("bos_token", "eos_token", "pad_token")}


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The number of a special token; end-of-text's where the tokenizer does not know it."""
    known = tokenizer.model.token_to_id(token) if isinstance(tokenizer, OwnTokenizer) else None
    return tokenizer.eot_token if known is None else known


def as_characters(token: bytes) -> str:
    """The token in the printable characters that stand for bytes in GPT-2's files."""
    return "".join(CHARACTERS[byte] for byte in token)


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
    longer = (score.window + 1 for score in model.scores if score.window is not None)
    T = min(model.seq_len, max([TOKENS, *longer]))
    tokens = torch.randint(model.vocab_size, (1, T), generator=torch.Generator().manual_seed(0))
    ours = model(tokens).float()
    return (theirs(tokens).logits - ours).abs().max().item(), ours.abs().max().item()


def model_card(name: str, seq_len: int) -> str:
    """Markdown with the front matter that Hugging Face's hub reads."""
    most = max(1, min(100, seq_len // 2))
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [gpt-attention]
---

# {name}

A language model trained with gpt-attention.

```python
from transformers import pipeline

print(pipeline("text-generation", model="{name}")("The", max_new_tokens={most})[0]["generated_text"])
```
"""
