"""Text to tokens and back. A tokenizer is a `tiktoken.Encoding`, or one of the user's with the same methods.

bytes   the 256 bytes and an end-of-text token; nothing to fetch, nothing to train
gpt2    GPT-2's 50,257 tokens, fetched once by tiktoken
bpe     byte-pair encoding, learned from the training split (Sennrich et al. 2016, over bytes as in GPT-2). The
        `tokenizers` library learns it and tiktoken applies it, which gives the same tokens 8 to 12 times as fast

Any other name is the path of a file: see own_tokenizer.py.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import tiktoken

from data.atomic import write_atomically
from data.errors import DataError, brief
from data.own_tokenizer import END_OF_TEXT, OwnTokenizer
from data.untrusted import TOKENIZER, UntrustedError, read_json

if TYPE_CHECKING:
    import tokenizers

Tokenizer = tiktoken.Encoding | OwnTokenizer
# A row's tokens and, for a conversation, 1 for each token of an answer and 0 for others, both 1-D unsigned; and the
# number of characters that the tokens do not give back.
Tokenised = tuple[np.ndarray, np.ndarray | None, int]
NAMES = ("bytes", "gpt2", "bpe")
SIZES = {"bytes": 257, "gpt2": 50_257}  # end-of-text included, of those whose tokens are given
FILE = "tokenizer.json"

# How GPT-2 cuts text before it merges bytes (Radford et al. 2019), in tiktoken's form that never backtracks far.
BYTES_PATTERN = r"[\s\S]"
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""

# GPT-2 writes bytes as printable characters: printable ones as themselves, the others as characters from 256 on.
_PRINTABLE = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
_OTHERS = [b for b in range(256) if b not in _PRINTABLE]
CHARACTERS = {b: chr(b) for b in _PRINTABLE} | {b: chr(256 + i) for i, b in enumerate(_OTHERS)}
BYTES_OF = {character: b for b, character in CHARACTERS.items()}


def bytes_tokenizer() -> tiktoken.Encoding:
    """Token i is byte i; token 256 ends a text."""
    return _encoding("bytes", BYTES_PATTERN, [bytes([b]) for b in range(256)])


def gpt2_tokenizer() -> tiktoken.Encoding:
    """GPT-2's tokens. Raises DataError where they are neither cached nor can be fetched."""
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as error:  # tiktoken passes on errors of requests, the file system and its hash check
        raise DataError(
            f"could not fetch the tokens of data.tokenizer=gpt2 ({brief(error)}); set TIKTOKEN_CACHE_DIR to a folder "
            "that holds them, connect to the network once, or use data.tokenizer=bytes or data.tokenizer=bpe."
        ) from error


def bpe_tokenizer(texts: Iterable[str], vocab_size: int) -> tiktoken.Encoding:
    """Learns at most `vocab_size` tokens from the texts, end-of-text included; the same texts give the same tokens."""
    return as_encoding(train_bpe(texts, vocab_size - 1))


def train_bpe(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    """Byte-level BPE by the `tokenizers` library, without special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    model.train_from_iterator(texts, trainer)
    return model


def as_encoding(model: tokenizers.Tokenizer) -> tiktoken.Encoding:
    """The same tokens, ids and merges in tiktoken: a token's id is its merge rank in both."""
    vocab = sorted(model.get_vocab().items(), key=lambda item: item[1])
    return _encoding("bpe", GPT2_PATTERN, [bytes(BYTES_OF[c] for c in token) for token, _ in vocab])


def encoder(tokenizer: Tokenizer) -> Callable[[str], np.ndarray]:
    """text -> its tokens, 1-D unsigned, without special tokens; threads can call it in parallel."""
    if tokenizer.name == "bytes":
        return lambda text: np.frombuffer(text.encode("utf-8"), np.uint8)
    if isinstance(tokenizer, OwnTokenizer):
        return lambda text: np.array(tokenizer.encode_ordinary(text), np.uint32)

    def encode(text: str) -> np.ndarray:
        try:
            return tokenizer.encode_to_numpy(text, allowed_special=set(), disallowed_special=())
        except ValueError as error:
            raise DataError(
                f"data.tokenizer={tokenizer.name} cannot encode the text that begins with {text[:40]!r} "
                f"({brief(error)}); remove long runs of white space from it, or use data.tokenizer=bytes."
            ) from error

    return encode


def ends_of(tokenizer: Tokenizer) -> set[int]:
    """The tokens that end a generated text."""
    return tokenizer.ends if isinstance(tokenizer, OwnTokenizer) else {tokenizer.eot_token}


def save_tokenizer(tokenizer: Tokenizer, folder: Path | str) -> None:
    """Write the whole tokenizer to `folder`/tokenizer.json."""
    content: dict[str, object] = {"name": tokenizer.name}
    if isinstance(tokenizer, OwnTokenizer):
        content["own"] = tokenizer.content
    else:
        tokens = map(tokenizer.decode_single_token_bytes, range(tokenizer.eot_token))
        content["pattern"] = BYTES_PATTERN if tokenizer.name == "bytes" else GPT2_PATTERN
        content["tokens"] = [base64.b64encode(token).decode() for token in tokens]
    write_atomically(Path(folder) / FILE, json.dumps(content))


def load_tokenizer(folder: Path | str) -> Tokenizer:
    """The tokenizer that save_tokenizer wrote to a folder, without network. Raises DataError where there is none."""
    path = Path(folder) / FILE
    try:
        content = read_json(path, TOKENIZER)
        if "own" in content:
            return OwnTokenizer(str(content["name"]), str(content["own"]))
        tokens = [base64.b64decode(token) for token in content["tokens"]]
        # None but those that save_tokenizer writes: tiktoken ends the process or hangs at some.
        if content["pattern"] not in (BYTES_PATTERN, GPT2_PATTERN):
            raise ValueError("its pattern is unknown")
        if len(set(tokens)) < len(tokens) or not all(tokens) or sum(len(token) == 1 for token in tokens) < 256:
            raise ValueError("its tokens are not distinct, or lack a byte")
        return _encoding(str(content["name"]), content["pattern"], tokens)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"it {error}" if isinstance(error, UntrustedError) else brief(error)
        raise DataError(f"{path} holds no tokenizer ({reason}); name a folder that train.py wrote.") from error


def _encoding(name: str, pattern: str, tokens: list[bytes]) -> tiktoken.Encoding:
    ranks = {token: rank for rank, token in enumerate(tokens)}
    return tiktoken.Encoding(
        name,
        pat_str=pattern,
        mergeable_ranks=ranks,
        special_tokens={END_OF_TEXT: len(ranks)},
        explicit_n_vocab=len(ranks) + 1,
    )
