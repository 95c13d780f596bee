"""The mistakes in a whole configuration, reported before anything is built or read."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from attention import Layout, build_attention
from attention.formula.call import reach_of
from attention.formula.rules import check_tensors
from data.corpora import CORPORA, Corpus, FileCorpus, JoinedHubCorpus
from data.files import TABLES, kind
from data.mistakes import data_mistakes
from data.options import Documents
from data.tasks import TASKS, check_length
from model.mistakes import check_mixers, model_mistakes
from model.score import attention_scores, score_mistakes
from model.score_tensors import ScoreTensors
from recipe.distributed.options import check_context, check_parallel
from recipe.distributed.world import World
from recipe.errors import refusals, sentence_of
from recipe.run.build import attention_shape, one_document
from recipe.run.config import Config
from recipe.run.starting import Weights
from recipe.training.device import Precision, resolve_device, resolve_precision
from recipe.training.optimizer import optimizer_mistakes
from recipe.training.options import training_mistakes
from recipe.training.parity_probe import check_parity
from recipe.training.recall import unknown_recalls


def mistakes(config: Config, ranks: int | None = None, weights: Weights | None = None) -> Iterator[str]:
    """A sentence for each value that could not train, with the override that repairs it.

    ranks    that will train; None: as many as torchrun or Slurm started
    weights  of `init_from`, which are judged if they are there
    """
    if not 0 <= config.seed < 2**32:
        yield f"seed={config.seed} must lie between 0 and 2**32 - 1."
    if config.init_seed is not None and not 0 <= config.init_seed < 2**32:
        yield f"init_seed={config.init_seed} must lie between 0 and 2**32 - 1, or be null."
    if config.init_seed is not None and config.init_from is not None:
        yield f"init_seed={config.init_seed} has no effect with init_from={config.init_from}; leave one of them out."
    if config.seq_len < 1:
        yield f"seq_len={config.seq_len} must be at least 1."
    ranks = ranks or World.from_environment().size
    yield from (of_ranks := list(refusal(check_parallel, config.parallel, ranks)))
    world = World(size=ranks, context=1 if of_ranks else config.parallel.context)
    if config.model.mixers and (config.parallel.shards or config.parallel.context > 1):
        yield "Mixers in model.layers need parallel.data=replicate and parallel.context=1; set them, or leave it out."
    yield from training_mistakes(config.training, max(config.seq_len, 1), world)
    yield from optimizer_mistakes(config.optimizer, config.schedule, config.training.steps)
    yield from unknown_recalls(config.probes)
    if config.probes and not config.training.eval_every:
        yield "probes are measured with every evaluation, and training.eval_every=0 has none; set it, or drop them."
    yield from (of_data := list(data_mistakes(config.data)))
    if not of_data:
        yield from refusal(check_corpus, config)
    of_score = list(map(sentence_of, score_mistakes(config.score, config.model.n_layers)))
    of_model = list(model_mistakes(config.model)) or of_score
    # Differences from the folder come first: its sizes and an override may not fit together although each is valid.
    of_folder = list[str]()
    if weights is not None and config.init_from is not None and not of_score:
        scores = attention_scores(config.score, config.model)
        of_folder += weights.mistakes(config.init_from, config.model, scores, config.seq_len, config.data.tokenizer)
    yield from of_folder or of_model
    if not of_model:
        yield from refusal(check_score_tensors, config)
    if not of_ranks and not of_model:
        yield from refusal(check_context, config.parallel, config.seq_len, config.model.n_heads, config.model.kv_heads)
    yield from (of_device := list(refusal(resolve_device, config.device)))
    if not of_model and not of_device:
        yield from device_mistakes(config)


def check_score_tensors(config: Config) -> None:
    """Raise ScoreError for a formula's tensor that is not defined, has an impossible shape, or does not fit the formula
    on `seq_len` tokens."""
    options, model, T = config.score, config.model, max(config.seq_len, 1)
    for score in set(attention_scores(options, model)):
        if score.formula is not None and score.expression is not None:
            tensors = ScoreTensors(score, options.learned, options.tensors, model.n_embd, model.n_heads)
            given = tensors.given() | dict.fromkeys(tensors.made, torch.empty(1, model.n_heads, T, device="meta"))
            given |= {x.name: x.initial(model.n_heads, torch.device("cpu")) for x in score.head_tensors}
            check_tensors(score.expression, given, 1, reach_of(score, Layout(), T, T, model.n_heads))


def check_corpus(config: Config) -> None:
    """Raise UserError where there is no text, or a single document where documents are to be separated."""
    if task := TASKS.get(config.data.name):
        check_length(task, config.seq_len)
        return
    for text in config.data.texts():
        corpus = CORPORA[text.name](text)  # locates the files without reading them
        if text.documents is not Documents.ignore and has_one_document(corpus):
            raise one_document(config)


def has_one_document(corpus: Corpus) -> bool:
    """Whether the training text is a single document, as far as that shows without reading it."""
    if not isinstance(corpus, FileCorpus):
        return isinstance(corpus, JoinedHubCorpus)
    training = [file for file in corpus.files if len(corpus.files) == 1 or corpus.splits[file] == "train"]
    return len(training) == 1 and kind(training[0]) not in TABLES


def device_mistakes(config: Config) -> Iterator[str]:
    """A sentence for each value that the device, or its precision, does not support."""
    device = resolve_device(config.device)
    precision = resolve_precision(config.training.precision, device)
    if precision is Precision.fp32 and not config.training.residual_in_fp32:
        yield (
            "training.residual_in_fp32=false has no effect in fp32 (training.precision="
            f"{config.training.precision.value} on {device}); leave it out, or set training.precision=bf16."
        )
    shape = attention_shape(config, device, precision.dtype)
    yield from refusal(check_mixers, config.model, device)
    yield from refusal(lambda: build_attention(config.attention).check(shape))
    yield from refusal(check_parity, config.parity, config.attention, shape)


def refusal(check: Callable[..., Any], *arguments: Any) -> Iterator[str]:
    """The sentence of the error that `check` raises for the arguments, if any."""
    try:
        check(*arguments)
    except refusals() as error:
        yield sentence_of(error)
