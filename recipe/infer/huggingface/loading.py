"""The weights of a folder of transformers, tensor by tensor into a model: memory holds the model and one tensor.

Only safetensors are read, in one file or several.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor

from attention.score import Score
from attention.scores import OPTIONS
from data.errors import DataError
from data.own_tokenizer import ENDS_OF_TEXT, OwnTokenizer
from data.own_tokenizer import read as read_tokenizer
from data.tokenizers import SIZES
from data.untrusted import SETTINGS, UntrustedError, read_json
from model.gpt import GPT
from model.options import GPTConfig, Positions
from model.score import layer_scores
from recipe.files import plain
from recipe.infer.huggingface.families import Family
from recipe.infer.huggingface.settings import (
    Settings,
    WeightsError,
    checkpoint_in,
    essence,
    nanogpt_settings,
    read_checkpoint,
    read_settings,
)
from recipe.wording import as_typed

WEIGHTS, INDEX, ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_config.json"
Tensors = dict[str, Callable[[], Tensor]]  # what reads each of a folder's tensors, by the names of its family
FILES = ["config.json", "*.safetensors", INDEX, "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
# The causal mask and the angles, which old files carry as buffers, and a head that is the embedding.
NOT_WEIGHTS = re.compile(r"(\.attn\.(masked_)?bias|\.rotary_emb\.inv_freq|^lm_head\.weight)$")


def find(source: str) -> Path:
    """The folder `source`, or the one to which the hub's client brought its files. Raises WeightsError."""
    path = Path(source).expanduser()
    if path.is_dir():
        return path if (path / "config.json").exists() else checkpoint_in(path) or path
    if path.suffix == ".pt":
        return path
    try:
        return Path(snapshot_download(source, allow_patterns=FILES))
    except (OSError, ValueError) as error:  # the hub's errors all derive from these
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise WeightsError(
            f"init_from={source} is not a folder here, and the Hugging Face hub did not provide a model of this name "
            f"({reason.rstrip('.')}); give a folder with config.json and {WEIGHTS}, or a name such as gpt2."
        ) from error


def settings_of(folder: Path, source: str) -> Settings:
    """The settings in the folder's config.json, or in nanoGPT's checkpoint. Raises WeightsError."""
    if folder.suffix == ".pt":
        return nanogpt_settings(folder, source)
    if (folder / ADAPTER).is_file():
        try:
            base = read_json(folder / ADAPTER, SETTINGS)["base_model_name_or_path"]
        except (OSError, ValueError, KeyError, TypeError):
            base = "another model"
        raise WeightsError(
            f"init_from={source} is an adapter of {base}; merge the two with peft's merge_and_unload, and name the "
            "folder that save_pretrained writes."
        )
    try:
        content = read_json(folder / "config.json", SETTINGS)
    except OSError as error:
        reason = str(error.strerror)
    except UntrustedError as error:
        reason = f"it {error}"
    else:
        if isinstance(content, dict):
            return read_settings(content, source)
        reason = "it is not a mapping"
    raise WeightsError(f"init_from={source} needs a readable config.json in {folder} ({reason}).")


@contextmanager
def opened(folder: Path, source: str, family: Family) -> Iterator[Tensors]:
    """The tensors of a folder. Raises WeightsError where there are none, or a file is damaged."""
    if folder.suffix == ".pt":
        weights = read_checkpoint(folder, source)["model"]
        yield {family.full_name(name): partial(weights.__getitem__, name) for name in weights}
        return
    files = [WEIGHTS] if (folder / WEIGHTS).is_file() else sorted(listed(folder, source))
    tensors: Tensors = {}
    with ExitStack() as stack:
        for path in (folder / name for name in files):
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
                tensors |= {family.full_name(name): partial(file.get_tensor, name) for name in sorted(file.keys())}
            except Exception as error:  # safetensors raises a type that it does not export
                raise WeightsError(
                    f"init_from={source}: {path} cannot be read ({error}); copy or fetch it again."
                ) from error
        yield tensors


def listed(folder: Path, source: str) -> set[str]:
    """The files of weights that the index names. Raises WeightsError."""
    try:
        files = set(read_json(folder / INDEX, SETTINGS)["weight_map"].values())
        if files and all(isinstance(file, str) and (folder / file).parent == folder for file in files):
            return files
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    weights = ", ".join(sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".safetensors", ".pt")))
    raise WeightsError(
        f"init_from={source} needs {WEIGHTS}, or {INDEX} and the files that it names, in {folder}, which has "
        f"{weights or 'no weights'}; pickled weights can be rewritten with transformers' save_pretrained."
    )


def weights_of(tensors: Tensors) -> set[str]:
    """The names of the weights among a folder's tensors."""
    return {name for name in tensors if not NOT_WEIGHTS.search(name)}


def load(model: GPT, source: str) -> None:
    """Overwrite the model's parameters with the weights of a folder, or of a model on the Hugging Face hub.

    Learned positions beyond the model's seq_len are left out; a model without biases takes weights whose biases are
    all zero; a second head stays as it is. Raises WeightsError where the source cannot be read or is another model.
    """
    folder = find(source)
    settings = settings_of(folder, source)
    if flaws := list(unlike(settings, model.config, model.scores, model.seq_len, model.vocab_size, source)):
        raise WeightsError("\n".join(flaws))
    with opened(folder, source, settings.family) as tensors:
        if flaws := list(unfit(tensors, settings, model.config, source)):
            raise WeightsError("\n".join(flaws))
        names = weights_of(tensors) | ({"lm_head.weight"} if not model.config.tied else set())
        if not model.config.bias:
            names = {name for name in names if not zero_bias(settings.family, name)}
        wanted = {
            name: settings.family.stored(name)
            for name, _ in model.named_parameters()
            if not name.startswith("further.")
        }
        every = {stored for parts in wanted.values() for stored in parts}
        missing, unknown = sorted(every - tensors.keys()), sorted(names - every)
        if missing or unknown:
            raise WeightsError(f"init_from={source} lacks the weights {missing[:3]} or has unknown ones {unknown[:3]}.")
        for name, parts in wanted.items():
            fill(model, name, {part: tensors[part] for part in parts}, settings.family, source)


@torch.no_grad()
def fill(model: GPT, name: str, parts: Tensors, family: Family, source: str) -> None:
    """Copy the tensors that are a parameter into its rows, one after the other."""
    parameter, row = model.get_parameter(name), 0
    used = parameter[: model.vocab_size] if name in ("wte.weight", "lm_head.weight") else parameter
    parameter[len(used) :].zero_()
    for part, read in parts.items():
        tensor = read()
        if family.transposed and tensor.ndim == 2 and name.startswith("h."):
            tensor = tensor.T
        if name == "wpe.weight":
            tensor = tensor[: model.seq_len]
        rows = used[row : row + len(tensor)] if len(parts) > 1 else used
        if rows.shape != tensor.shape:
            raise WeightsError(
                f"{part} of init_from={source} has the shape {tuple(tensor.shape)} where its config.json promises "
                f"{tuple(rows.shape)}."
            )
        rows.copy_(tensor)
        row += len(tensor)
    if row != len(used):
        raise WeightsError(
            f"{' and '.join(parts)} of init_from={source} have {row} rows where its config.json promises {len(used)}."
        )


def zero_bias(family: Family, name: str) -> bool:
    """Whether a tensor is a bias that a model without biases takes if it is zero."""
    return family.zeros is not None and name.endswith(".bias") and bool(family.zeros.search(name))


def unfit(tensors: Tensors, settings: Settings, model: GPTConfig, source: str) -> Iterator[str]:
    """A sentence for each reason why a folder's tensors are not those of a model, although its settings are."""
    biases = (name for name in weights_of(tensors) if zero_bias(settings.family, name))
    if not model.bias and any(bool(tensors[name]().any()) for name in biases):
        yield f"init_from={source} has biases and the model has none; set model.bias=true."
    (embedding,), head = settings.family.stored("wte.weight"), "lm_head.weight"
    tied = f"init_from={source} has tie_word_embeddings={str(settings.model.tied).lower()} in config.json and"
    if not settings.model.tied and head not in tensors:
        yield f"{tied} no {head}; set it to true if the embedding is the head, or fetch the file that holds the head."
    both = settings.model.tied and {head, embedding} <= tensors.keys()
    if both and not torch.equal(tensors[head](), tensors[embedding]()):
        yield f"{tied} a {head} that is not the embedding; set it to false there, or remove the head."


def unlike(
    settings: Settings,
    model: GPTConfig,
    scores: Sequence[Score],
    seq_len: int,
    vocab_size: int | None,
    source: str,
) -> Iterator[str]:
    """A sentence for each option in which a model differs from the folder's.

    A score may be another one, without new weights, and so may the scaling of rotary positions.

    vocab_size  None: not known yet
    """
    theirs = essence(settings.model, layer_scores(settings.score, settings.model.n_layers), 0)
    ours = essence(model, scores, 0)
    differing = [
        name for name in theirs if name not in ("score", "rope_scaling", "qk_eps") and ours.get(name) != theirs[name]
    ]
    if settings.family.parts.get("bias") and not model.bias:
        differing.remove("bias")  # they may all be zero
    if {"n_embd", "n_heads"} & set(differing):  # the following options depend on these where they are not given
        follow = {"head_dim", "scale_dim", "mlp_width", "rope_fraction", *([] if model.n_kv_heads else ["n_kv_heads"])}
        differing = [name for name in differing if name not in follow]
    if "positions" in differing:
        differing = [name for name in differing if not name.startswith("rope_")]
    for name in differing:
        need = f"model.{name}={as_typed(plain(theirs[name]))}"
        yield f"init_from={source} has {need}, and the model {as_typed(plain(ours.get(name)))}; set {need}."
    for option in OPTIONS:
        name, learned = f"score.{option.name}", option.tensor is not None and option.tensor.learned
        if learned and any(getattr(score, option.name) for score in scores):
            yield f"init_from={source} has {name}=false, and the model true; set {name}=false."
    size = settings.model.vocab_size or 0
    if vocab_size not in (None, size):
        remedy = f"set model.vocab_size={size}"
        if (vocab_size or 0) > size:
            remedy = "name the model's own tokenizer.json with data.tokenizer="
        if settings.family.kind == "gpt2":
            remedy = "GPT-2's own is data.tokenizer=gpt2"
        yield (
            f"init_from={source} has a vocabulary of {size} tokens, and the data's tokenizer {vocab_size}; {remedy}."
        )
    if model.positions is Positions.learned and seq_len > settings.longest:
        yield f"init_from={source} has {settings.longest} positions, fewer than seq_len={seq_len}; lower it."


def beyond(tokenizer: OwnTokenizer, rows: int, source: str) -> Iterator[str]:
    """A sentence where a tokenizer has a token for which a model has no row."""
    names = {number: name for name, number in tokenizer.model.get_vocab(with_added_tokens=True).items()}
    resize = f"add rows with transformers' resize_token_embeddings({tokenizer.n_vocab})"
    for number in sorted(number for number in names if number >= rows)[:1]:
        ends = f"init_from={source} has rows for the tokens up to {rows - 1}"
        if tokenizer.adds_end:
            yield (
                f"{ends}, and data.tokenizer={tokenizer.name} has no token that ends a text, so {tokenizer.end} "
                f"becomes number {number}; call one of its tokens {' or '.join(ENDS_OF_TEXT)}, or {resize}."
            )
        else:
            yield (
                f"{ends}, and data.tokenizer={tokenizer.name} has the token {names[number]!r} with number {number}; "
                f"take it out of the file, or {resize}."
            )


def folder_mistakes(
    source: str, model: GPTConfig, scores: Sequence[Score], seq_len: int, tokenizer: str
) -> Iterator[str]:
    """A sentence for each reason why a model cannot start from the weights in a folder, before any are loaded.

    tokenizer  as data.tokenizer names it
    """
    folder = Path(source).expanduser()
    if not folder.is_dir() and not (folder.is_file() and folder.suffix == ".pt"):
        if folder.is_file():
            yield f"init_from={source} is a file; name the folder that holds it and config.json."
        elif folder.is_absolute() or source.startswith("."):
            yield f"init_from={source} is no folder; name one with config.json and {WEIGHTS}, or a model such as gpt2."
        return
    if (folder / ".hydra").is_dir():
        yield (
            f"init_from={source} is a run folder; continue it with resume={source}, or export its model with: "
            f"python sample.py run={source} export=<folder>"
        )
        return
    try:
        folder = find(source)
        settings = settings_of(folder, source)
        yield from unlike(settings, model, scores, seq_len, model.vocab_size or SIZES.get(tokenizer), source)
        if Path(tokenizer).suffix:
            with suppress(DataError):  # it is reported with the other options of data
                yield from beyond(read_tokenizer(Path(tokenizer)), settings.model.vocab_size or 0, source)
        with opened(folder, source, settings.family) as tensors:
            yield from unfit(tensors, settings, model, source)
    except WeightsError as error:
        yield str(error)
