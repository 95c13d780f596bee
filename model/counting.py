"""The size of a model, and the operations of training it."""

from collections.abc import Sequence

from torch import nn

from attention.score import Score, visible_pairs
from model.attention import MixerLayer
from model.gpt import GPT


def num_parameters(model: GPT) -> int:
    """Number of trained values; a tied embedding counts once, and the padding of the vocabulary not at all."""
    padded = {model.wte.weight, model.head, *model.value_tables}  # a set: a tied head is the embedding again
    return sum(p.numel() for p in model.parameters()) - sum((len(t) - model.vocab_size) * t.shape[1] for t in padded)


def flops_per_token(model: GPT, seq_len: int, causal: bool, pieces: Sequence[int] | None = None) -> float:
    """Floating-point operations of training on one token, forward and backward.

        6 N + 12 L C T         causal: 6 N + 6 L C T         with a window w: 6 N + 12 L C (w - w^2 / 2 T)

    N is the number of parameters that enter matrix products: linear layers and the vocabulary's head, not the lookup of
    tokens and positions, biases or norms. Each is one multiplication and one addition in the forward and twice that in
    the backward pass. C are the channels of all query heads. Attention's two products take 4 C T per layer and token in
    the forward (scores over T keys, and their sum of values), and twice that backward: 12 L C T. A causal query sees
    half of the keys on average. (PaLM, Chowdhery et al. 2022, appendix B.) A second head counts with its block.
    A mixer's token adds k v^T to the state and reads q^T S, 4 H K V in the forward, and with the delta rule k^T S too.
    Recomputation is not counted.

    causal  count the keys that each layer's score leaves visible; else all of them
    pieces  lengths of the documents that rows of seq_len tokens are cut into; None: one document a row
    """
    config, heads = model.config, 1 if model.further is None else 2
    linear = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not model.lm_head]
    N = sum(m.weight.numel() for m in linear) + heads * model.vocab_size * config.n_embd
    scores = model.scores if model.further is None else (*model.scores, model.scores[-1])
    scores = scores if causal else (Score(causal=False),) * len(scores)
    pieces = pieces if causal and pieces else [seq_len]
    keys_per_query = sum(visible_pairs(score, n) for score in scores for n in pieces) / max(sum(pieces), 1)
    of_states = sum(m.mixer.flops_per_token for m in model.modules() if isinstance(m, MixerLayer))
    return 6 * N + 3 * of_states + 12 * config.n_heads * config.head_size * keys_per_query
