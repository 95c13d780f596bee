"""A model to evaluate: a run's, or that of a folder of transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from data.tokenizers import encoder, ends_of
from model.loss import IGNORE_INDEX
from recipe.infer.generation.engine import Engine, Request
from recipe.infer.generation.sampling import Sampling
from recipe.infer.trained import Trained

GREEDY = Sampling(temperature=0)
# Rows of logits in fp32 that exist at once: 0.8 GB with GPT-2's vocabulary.
ROWS = 4096

# Logarithms of the probabilities of some targets, (N,) fp32, and whether each is the likeliest token, (N,) bool.
Scores = tuple[Tensor, Tensor]


class LanguageModel:
    """Text and scores of a trained model.

    max_length   the longest input, in tokens
    end_of_text  the token that ends a text and begins the next
    ends         the tokens that end a generated text
    encode       a text to its tokens, 1-D integers, without special ones
    decode       tokens to their text
    """

    def __init__(self, trained: Trained, seq_len: int | None = None) -> None:
        """seq_len  the longest input, which the model has to allow; None: the run's"""
        self.trained, self.model = trained, trained.model
        self.max_length, self.end_of_text = seq_len or trained.config.seq_len, trained.tokenizer.eot_token
        self.ends = ends_of(trained.tokenizer)
        self.encode = encoder(trained.tokenizer)
        self.decode = trained.tokenizer.decode

    def size(self, tokens: Sequence[int]) -> int:
        """Bytes of the text of some tokens, without ends of text."""
        return len(self.trained.tokenizer.decode_bytes([t for t in tokens if t != self.end_of_text]))

    @torch.inference_mode()
    def scores(self, inputs: Tensor, targets: Tensor, document_starts: Tensor | None = None) -> Scores:
        """The scores of the targets that are not -100, in their order.

        inputs           (B, T)   int64, T <= max_length
        targets          (B, T)   int64: the token after each input
        document_starts  (B, T)   int32, as `GPT.hidden` has it
        """
        device = self.model.wte.weight.device
        inputs, targets = inputs.to(device), targets.to(device)
        starts = None if document_starts is None else document_starts.to(device)
        with self.trained.autocast():
            chosen = targets != IGNORE_INDEX
            hidden = self.model.hidden(inputs, document_starts=starts)[chosen]  # (N, C)
            pieces = [
                scores_of(self.model.logits(rows), following)
                for rows, following in zip(hidden.split(ROWS), targets[chosen].split(ROWS), strict=True)
            ]
        return torch.cat([logs for logs, _ in pieces]), torch.cat([likeliest for _, likeliest in pieces])

    def generate(self, requests: Sequence[Request], slots: int) -> Iterator[tuple[Request, int]]:
        """Yield each request with its likeliest next token, which is added to its `tokens`, until it is finished.

        slots  requests at a time
        """
        yield from Engine(self.model, requests, GREEDY, slots=slots, dtype=self.trained.dtype).run()


def scores_of(logits: Tensor, targets: Tensor) -> Scores:
    """The scores of targets (N,) by logits (N, vocab_size)."""
    logits = logits.float()
    chosen = logits.gather(1, targets[:, None])[:, 0]
    return chosen - logits.logsumexp(dim=1), logits.argmax(dim=1) == targets
