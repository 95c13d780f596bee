"""A run's tokenizer as the JSON of `tokenizers`, which transformers loads without custom code.

A tokenizer that the user brought is such JSON already. All others are byte-level BPE: "bytes" has no merges. tiktoken
keeps only the tokens in the order in which they were learned; the pair that each was merged from follows from it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import tiktoken
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from data.chat import ChatTemplate
from data.own_tokenizer import END_OF_TEXT, OwnTokenizer
from data.tokenizers import CHARACTERS
from recipe.infer.huggingface.settings import WeightsError


def to_tokenizers(encoding: tiktoken.Encoding | OwnTokenizer) -> Tokenizer:
    """The same text to the same ids and back. Raises WeightsError for tokens that no merges of pairs give."""
    if isinstance(encoding, OwnTokenizer):
        tokenizer = Tokenizer.from_str(encoding.content)
        tokenizer.post_processor = None  # such as one that adds a token to begin a text: training had none
        return tokenizer
    tokens = [encoding.decode_single_token_bytes(token) for token in range(encoding.eot_token)]
    vocab = {as_characters(token): rank for rank, token in enumerate(tokens)}
    if len(vocab) != len(tokens) or len([token for token in tokens if len(token) == 1]) != 256:
        raise WeightsError(f"The tokens of {encoding.name} are not byte-level BPE, the only kind that can be exported.")
    ranks = {token: rank for rank, token in enumerate(tokens)}
    merges = [merged_from(token, ranks) for token in tokens if len(token) > 1]
    # Like tiktoken, take a piece that is a token as it is.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
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


def special_tokens(tokenizer: tiktoken.Encoding | OwnTokenizer, template: ChatTemplate | None) -> dict[str, str]:
    """The names of the tokens that begin, end and pad a text: from the chat template, else end-of-text.

    The models have no token for padding, which attention masks hide.
    """
    end = tokenizer.end if isinstance(tokenizer, OwnTokenizer) else END_OF_TEXT
    given = {} if template is None else template.tokens
    return {name: given.get(name, end) for name in ("bos_token", "eos_token", "pad_token")}


def token_id(tokenizer: tiktoken.Encoding | OwnTokenizer, token: str) -> int:
    """The number of a special token; end-of-text's where the tokenizer does not know it."""
    known = tokenizer.model.token_to_id(token) if isinstance(tokenizer, OwnTokenizer) else None
    return tokenizer.eot_token if known is None else known


def tokenizer_config(seq_len: int, special: dict[str, str], chat_template: str | None) -> dict[str, Any]:
    """The content of tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "padding_side": "left",  # prompts of different lengths are continued at their ends
        "model_max_length": seq_len,
        "clean_up_tokenization_spaces": False,
        **({} if chat_template is None else {"chat_template": chat_template}),
    }


def as_characters(token: bytes) -> str:
    """The token in the printable characters that stand for bytes in GPT-2's files."""
    return "".join(CHARACTERS[byte] for byte in token)
