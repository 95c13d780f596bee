"""Sampling without a cache: the whole text through the model, and torch's random draws."""

from collections.abc import Sequence

import torch
from torch import Tensor

from model.gpt import GPT


@torch.no_grad()
def logits_of(model: GPT, tokens: Sequence[int], first: int) -> Tensor:
    """(n, V): logits after the first `first` tokens, after one more, and so on; each sees at most seq_len tokens."""
    model.eval()
    seen = min(len(tokens), model.seq_len)
    within = model(torch.tensor([tokens[:seen]]))[0, first - 1 :]
    beyond = [model(torch.tensor([tokens[end - seen : end]]))[0, -1:] for end in range(seen + 1, len(tokens) + 1)]
    return torch.cat([within, *beyond]).float()


def expected(
    model: GPT,
    prompt: Sequence[int],
    generated: Sequence[int],
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
) -> list[int]:
    """The tokens that follow the prompt, the prompt and generated[0], and so on: equal to `generated` if right."""
    generator = torch.Generator().manual_seed(seed)
    tokens = []
    for logits in logits_of(model, [*prompt, *generated[:-1]], len(prompt)):
        if top_k is not None and top_k < len(logits):
            logits[logits < logits.topk(top_k).values[-1]] = -torch.inf
        if temperature == 0:
            tokens.append(int(logits.argmax()))
        else:
            p = (logits / temperature).softmax(-1)
            tokens.append(int(torch.multinomial(p, 1, generator=generator)))
    return tokens
