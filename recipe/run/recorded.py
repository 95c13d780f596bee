"""The configuration that a run recorded, for every program that takes a run folder.

The folder may come from a stranger. Only options of this recipe are read from it, and references may only name such
options.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from data.untrusted import UntrustedError, children
from model.mistakes import model_mistakes
from model.score import score_mistakes
from recipe.errors import sentence_of
from recipe.run.config import Config, ConfigError, keys, register
from recipe.run.removed import config_as_today, removed_options
from recipe.run.run_folder import CONFIG, read_config_values

MOST_REFERENCES = 24  # in a configuration: a chain of them takes time exponential in its length
REFERENCE = re.compile(r"\$\{\s*([\w.]+)\s*\}")
RESOLVER = re.compile(r"\$\{\s*(?:divide|min)\s*:\s*\d+\s*,\s*\d+\s*\}")


def read_config(run: Path) -> Config:
    """The configuration of the run. Raises ConfigError."""
    register()  # older runs recorded references to the resolvers of experiments
    path = run / CONFIG
    try:
        values = config_as_today(read_config_values(run))
        for sentence in removed_options(values):
            raise ConfigError(f"{path}: {sentence} Or use the version that trained the run.")
        if (reference := foreign_reference(values)) is not None:
            raise ConfigError(f"{path} holds {reference}, and only options of the run may be referred to; remove it.")
        config: Config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), values))  # type: ignore
    except OSError as error:
        raise ConfigError(
            f"run={run} is not a run folder, as {path} cannot be read ({error.strerror}); name the folder that "
            "train.py printed."
        ) from error
    except UntrustedError as error:
        raise ConfigError(f"{path} {error}, so it is not a configuration of train.py; restore it.") from error
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{path} is not a configuration of this version ({reason}); use the version that trained the run."
        ) from error
    flaws = [f"seq_len={config.seq_len} must be at least 1."] if config.seq_len < 1 else []
    of_score = map(sentence_of, score_mistakes(config.score, config.model.n_layers))
    flaws += list(model_mistakes(config.model)) or list(of_score)
    for flaw in flaws:
        raise ConfigError(f"{path} describes no model: {flaw}")
    return config


def foreign_reference(value: Any) -> str | None:
    """The first text in nested values that refers to anything but options of the recipe, or a sentence on too many.

    ${seq_len} is allowed, and so are the resolvers of recipe.run.config with such references as arguments, each as a
    whole value.
    """
    known, texts = set(keys()), list[str]()
    layer = [value]
    while layer:
        texts += [item for item in layer if isinstance(item, str) and "${" in item]
        layer = [child for item in layer for child in children(item)]
    if sum(text.count("${") for text in texts) > MOST_REFERENCES:
        return f"more than {MOST_REFERENCES} references"
    for text in texts:
        without_names = REFERENCE.sub(lambda match: "1" if match[1] in known else match[0], text)
        if RESOLVER.sub("1", without_names) != "1":
            return text
    return None
