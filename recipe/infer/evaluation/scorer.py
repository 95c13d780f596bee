"""A model's log-likelihoods and continuations of texts, as lm-eval defines them, in batches of similar length."""

from collections.abc import Sequence

import torch
from torch import Tensor

from data.own_tokenizer import OwnTokenizer
from data.progress import progress
from data.tokenizers import encoder
from model.loss import IGNORE_INDEX
from recipe.infer.generation.engine import Engine, Request
from recipe.infer.generation.sampling import Sampling
from recipe.infer.generation.text import Text, texts
from recipe.infer.trained import Trained
from recipe.run.config import ConfigError

# Rows of logits in fp32 that exist at once: 0.8 GB with GPT-2's vocabulary.
ROWS = 4096


class LanguageModel:
    """Text and scores of a trained model.

    max_length   the longest input, in tokens
    end_of_text  the token that ends a text and begins the next
    begin        the token before a text that is scored alone: the tokenizer's begin token where it has one, else the
                 end of text, as in lm-eval
    encode       a text to its tokens, 1-D integers, without special ones
    """

    def __init__(self, trained: Trained, seq_len: int | None = None) -> None:
        """seq_len  the longest input, which the model has to allow; None: the run's"""
        self.trained, self.model = trained, trained.model
        tokenizer = trained.tokenizer
        self.max_length, self.end_of_text = seq_len or trained.config.seq_len, tokenizer.eot_token
        self.begin = tokenizer.begin if isinstance(tokenizer, OwnTokenizer) else self.end_of_text
        self.encode = encoder(tokenizer)

    def size(self, tokens: Sequence[int]) -> int:
        """Bytes of the text of some tokens, without ends of text."""
        return len(self.trained.tokenizer.decode_bytes([t for t in tokens if t != self.end_of_text]))

    @torch.no_grad()
    def scores(self, inputs: Tensor, targets: Tensor, document_starts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The logarithms of the probabilities of the targets that are not -100, in their order, (N,) fp32, and whether
        each is the likeliest token, (N,) bool.

        inputs           (B, T)   int64, T <= max_length
        targets          (B, T)   int64: the token after each input
        document_starts  (B, T)   int32, as `GPT.hidden` has it
        """
        device = self.model.wte.weight.device
        inputs, targets = inputs.to(device), targets.to(device)
        starts = None if document_starts is None else document_starts.to(device)
        logs, likeliest = list[Tensor](), list[Tensor]()
        with self.trained.autocast():
            chosen = targets != IGNORE_INDEX
            hidden = self.model.hidden(inputs, document_starts=starts)[chosen]  # (N, C)
            for rows, following in zip(hidden.split(ROWS), targets[chosen].split(ROWS), strict=True):
                logits = self.model.logits(rows).float()  # (ROWS, V)
                logs.append(logits.gather(1, following[:, None])[:, 0] - logits.logsumexp(dim=1))
                likeliest.append(logits.argmax(dim=1) == following)
        return torch.cat(logs), torch.cat(likeliest)


class Scorer:
    """Scores and continues texts with a model.

    batch  inputs that one forward pass takes
    cut    number of texts that lost their beginning, because they were longer than the model's longest input
    """

    def __init__(self, model: LanguageModel, batch: int) -> None:
        self.model, self.batch, self.cut = model, batch, 0

    def loglikelihood(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Log-likelihoods of continuations, and whether greedy decoding would give them, for pairs of context and
        continuation. An empty context is `begin`.

        Raises ConfigError for a continuation longer than the model's longest input.
        """
        return self._score([self._encode_pair(*pair) for pair in pairs], "scoring continuations")

    def loglikelihood_rolling(self, texts: Sequence[str]) -> list[float]:
        """The log-likelihood of each text after `begin`. A longer one than the model's longest input is taken in
        windows that predict each token once; the last one reaches back as far as it can."""
        windows = [rolling_windows(self._encode(text), self.model.begin, self.model.max_length) for text in texts]
        scores = iter(self._score([window for of_text in windows for window in of_text], "scoring texts"))
        return [sum(next(scores)[0] for _ in of_text) for of_text in windows]

    def generate_until(self, requests: Sequence[tuple[str, Sequence[str], int]]) -> list[str]:
        """The greedy continuation of each context, up to the first of its stop texts or so many tokens.

        Raises ConfigError where that many tokens leave no room for a context.
        """
        model, asked = self.model, list[Request]()
        for context, _, tokens in requests:
            if (room := model.max_length - tokens) < 1:
                raise ConfigError(
                    f"The task generates {tokens} tokens, and the model's {model.max_length} leave no room for a "
                    "prompt; choose a model trained with a longer seq_len."
                )
            prompt = self._encode(context) or [model.begin]
            self.cut += len(prompt) > room
            asked.append(Request(prompt[-room:], tokens))
        every = {r: Text(model.trained.tokenizer, stops) for r, (_, stops, _) in zip(asked, requests, strict=True)}
        added = dict.fromkeys(asked, "")
        engine = Engine(model.model, asked, Sampling(temperature=0), slots=self.batch, dtype=model.trained.dtype)
        with progress("generating", len(asked)) as advance:
            for request, piece in texts(engine, every):
                added[request] += piece
                advance(int(request.finished))
        return list(added.values())

    def _encode(self, text: str) -> list[int]:
        return self.model.encode(text).tolist()

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Encode both as one text, and split it at the number of tokens of the context alone. Spaces at the end of the
        context belong to the continuation."""
        whole, first = self._encode(context + continuation), self._encode(context.rstrip())
        if not first:
            first, whole = [self.model.begin], [self.model.begin, *whole]
        if not (wanted := whole[len(first) :]) or len(wanted) > self.model.max_length:
            raise ConfigError(
                f"The continuation {continuation[:40]!r} has {len(wanted)} tokens, and the model takes 1 to "
                f"{self.model.max_length}; choose a model trained with a longer seq_len, or other texts."
            )
        return first, wanted

    def _score(self, requests: Sequence[tuple[list[int], list[int]]], label: str) -> list[tuple[float, bool]]:
        """The score of each (context, continuation) in tokens."""
        longest = self.model.max_length
        results = [(0.0, True)] * len(requests)
        # The longest first, so that a batch too large for the memory fails at once.
        order = sorted(range(len(requests)), key=lambda i: -sum(map(len, requests[i])))
        with progress(label, len(order)) as advance:
            for start in range(0, len(order), self.batch):
                chosen = order[start : start + self.batch]
                rows = []
                for i in chosen:
                    context, wanted = requests[i]
                    self.cut += len(context) + len(wanted) > longest + 1
                    rows.append(((context + wanted)[-longest - 1 :], len(wanted)))
                logs, likeliest = (part.cpu() for part in self.model.scores(*padded(rows)))
                counts = [count for _, count in rows]
                for i, log, hit in zip(chosen, logs.split(counts), likeliest.split(counts), strict=True):
                    results[i] = float(log.sum()), bool(hit.all())
                advance(len(chosen))
        return results


def padded(rows: Sequence[tuple[Sequence[int], int]]) -> tuple[Tensor, Tensor]:
    """Inputs and targets (B, T) of rows of tokens, of which the last `count` are scored: -100 elsewhere."""
    T = max(len(tokens) for tokens, _ in rows) - 1
    inputs = torch.zeros(len(rows), T, dtype=torch.int64)
    targets = torch.full((len(rows), T), IGNORE_INDEX)
    for b, (tokens, count) in enumerate(rows):
        inputs[b, : len(tokens) - 1] = torch.tensor(tokens[:-1])
        targets[b, len(tokens) - 1 - count : len(tokens) - 1] = torch.tensor(tokens[-count:])
    return inputs, targets


def rolling_windows(tokens: list[int], prefix: int, longest: int) -> list[tuple[list[int], list[int]]]:
    """Pairs (context, continuation) of at most `longest` + 1 tokens that predict each token once, after `prefix`."""
    windows, whole = [], [prefix, *tokens]
    for start in range(0, len(tokens), longest):
        stop = min(start + longest, len(tokens))
        windows.append((whole[max(stop - longest, 0) : start + 1], whole[start + 1 : stop + 1]))
    return windows
