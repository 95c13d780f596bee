"""Corpora of the Hugging Face hub."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data.corpus import Corpus, Stream, train_part
from data.errors import DataError, brief
from data.files import Row, text_of
from data.options import DataConfig


class HubCorpus(Corpus):
    """A data set of the Hugging Face hub, or a folder that one was downloaded to, streamed."""

    def __init__(self, config: DataConfig):
        if config.hub is None:
            raise DataError(f"data={config.name} needs the name of a data set; set data.hub=<owner>/<name>.")
        self.config = config

    def source(self) -> dict[str, Any]:
        c = self.config
        names = {"hub": c.hub, "revision": c.hub_revision, "subset": c.hub_subset, "split": c.hub_split}
        return {"corpus": c.name, **names}

    def streams(self) -> list[Stream]:
        return [Stream(self._spread(), 1.0)]

    def whole(self) -> Iterator[Row]:
        return ({"split": "whole", "text": text, "opens": True} for text in self.texts())

    def texts(self) -> Iterator[str]:
        """The text of every row that is not empty."""
        c = self.config
        try:
            for row in _hub_rows(str(c.hub), c.hub_subset, c.hub_split, c.hub_revision):
                if text := text_of(row, c.text_field, str(c.hub)):
                    yield text
        except DataError:
            raise
        except Exception as error:  # any kind: the hub's libraries raise dozens of different ones
            raise DataError(
                f"could not stream {c.hub} from the Hugging Face hub ({brief(error)}); check the network and the names "
                "under data.hub, or train on local text with data=stdlib or data=text data.path=<file or folder>."
            ) from error

    def _spread(self) -> Iterator[Row]:
        fraction = self.config.val_fraction
        for i, text in enumerate(self.texts()):
            is_val = math.ceil((i + 1) * fraction) > math.ceil(i * fraction)  # the first, and evenly from there
            yield {"split": "val" if is_val else "train", "text": text, "opens": True}


class JoinedHubCorpus(HubCorpus):
    """A small data set of the hub whose rows are parts of one text. Validation takes the last part."""

    def streams(self) -> list[Stream]:
        text, fraction = "".join(self.texts()), self.config.val_fraction
        cut = train_part(len(text), fraction)
        return [
            Stream([{"split": "train", "text": text[:cut], "opens": True}], 1 - fraction),
            Stream([{"split": "val", "text": text[cut:], "opens": True}], fraction),
        ]

    def whole(self) -> Iterator[Row]:
        yield {"split": "whole", "text": "".join(self.texts()), "opens": True}

    def one_document(self) -> bool:
        return True


def _hub_rows(hub: str, subset: str | None, splits: str, revision: str | None) -> Iterator[Row]:
    import datasets
    from huggingface_hub import HfApi

    def load(revision: str | None) -> list[datasets.IterableDataset]:
        names = splits.split("+")
        return [datasets.load_dataset(hub, subset, split=s, revision=revision, streaming=True) for s in names]

    if not Path(hub).is_dir():  # without network, load_dataset retries for half a minute
        HfApi().dataset_info(hub, revision=revision, timeout=20)
    try:
        parts = load(revision)
    except RuntimeError as error:
        if "scripts are no longer supported" not in str(error):
            raise
        parts = load("refs/convert/parquet")  # the hub converts data sets that consist of a loading script
    for part in parts:
        yield from part
