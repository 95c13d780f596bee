"""A tokenizer that the user brings: the JSON of Hugging Face's `tokenizers`, of any kind.

It has the methods of tiktoken.Encoding that the recipe uses.
"""

import json
import unicodedata
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from data.errors import DataError, brief
from data.untrusted import TOKENIZER, read_json

END_OF_TEXT = "<|endoftext|>"
# Its names in the tokenizers of well-known models. A tokenizer that has none of them gets the first.
ENDS_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "[SEP]")


class OwnTokenizer:
    """Text to tokens and back, as the JSON defines. Names of special tokens in a text are ordinary text.

    name       for messages
    n_vocab    one more than the highest token
    eot_token  the token between two texts
    end        its name
    adds_end   whether it is added, as the JSON has none
    ends       tokens that end a generated text: this one, and those that others add
    begin      the token before a text that is scored: this one, unless others set it
    """

    def __init__(self, name: str, content: str) -> None:
        """Raises DataError where `content` is no tokenizer."""
        try:
            self.model = tokenizers.Tokenizer.from_str(content)
        except Exception as error:  # the library raises bare Exception
            raise DataError(
                f"data.tokenizer={name} is not a tokenizer in the format of Hugging Face's tokenizers "
                f"({brief(error)}); name a tokenizer.json."
            ) from error
        self.name = name
        self.model.no_truncation()
        self.model.no_padding()
        self.end = next((end for end in ENDS_OF_TEXT if self.model.token_to_id(end) is not None), END_OF_TEXT)
        self.adds_end = self.model.token_to_id(self.end) is None
        if self.adds_end:
            self.model.add_special_tokens([self.end])
        self.model.encode_special_tokens = True
        vocabulary = self.model.get_vocab(with_added_tokens=True)
        self.eot_token, self.n_vocab = vocabulary[self.end], max(vocabulary.values()) + 1
        self.ends, self.begin = {self.eot_token}, self.eot_token
        settings = json.loads(content)["model"]
        self.unknown = settings.get("unk_id", vocabulary.get(settings.get("unk_token")))

    def lost(self, tokens: Sequence[int], text: str) -> int:
        """The characters of a text, but for white space, that its tokens do not give back."""
        decoded = self.decode([token for token in tokens if token != self.unknown])
        if decoded == text:
            return 0
        before, after = (Counter("".join(unicodedata.normalize("NFC", part).split())) for part in (text, decoded))
        return (before - after).total()

    @property
    def content(self) -> str:
        """The JSON from which an equal tokenizer can be built."""
        return self.model.to_str()

    def encode_ordinary(self, text: str) -> list[int]:
        """The tokens of a text."""
        return self.model.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int]) -> str:
        return self.model.decode(list(tokens), skip_special_tokens=False)

    def decode_bytes(self, tokens: Sequence[int]) -> bytes:
        return self.decode(tokens).encode()


def read(path: Path) -> OwnTokenizer:
    """The tokenizer in a file. Raises DataError."""
    try:
        return OwnTokenizer(str(path), json.dumps(read_json(path.expanduser(), TOKENIZER)))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it {error}"
        raise DataError(f"data.tokenizer={path} cannot be read ({reason}); name a tokenizer.json.") from error
