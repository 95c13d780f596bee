"""The configuration that a run recorded, for every program that takes a run folder.

The folder may come from a stranger. Only plain values of this recipe's options are read from it.
"""

from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from data.untrusted import UntrustedError
from model.mistakes import model_mistakes
from model.score import score_mistakes
from recipe.errors import sentence_of
from recipe.files import to_json
from recipe.run.config import Config, ConfigError
from recipe.run.removed import config_as_today, removed_options
from recipe.run.run_folder import CONFIG, read_config_values


def read_config(run: Path) -> Config:
    """The configuration of the run. Raises ConfigError."""
    path = run / CONFIG
    try:
        values = config_as_today(read_config_values(run))
        for sentence in removed_options(values):
            raise ConfigError(f"{path}: {sentence} Or use the version that trained the run.")
        if "${" in to_json(values):
            raise ConfigError(f"{path} holds references (${{...}}), and train.py records values; write those instead.")
        config: Config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), values))  # type: ignore
    except OSError as error:
        raise ConfigError(
            f"run={run} is not a run folder, as {path} cannot be read ({error.strerror}); name the folder that "
            "train.py printed."
        ) from error
    except UntrustedError as error:
        raise ConfigError(f"{path} {error}, so it is not a configuration of train.py; restore it.") from error
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"{path} is not a configuration of this version ({str(error).splitlines()[0]}); use the version that "
            "trained the run."
        ) from error
    flaws = [f"seq_len={config.seq_len} must be at least 1."] if config.seq_len < 1 else []
    of_score = map(sentence_of, score_mistakes(config.score, config.model.n_layers))
    flaws += list(model_mistakes(config.model)) or of_score
    for flaw in flaws:
        raise ConfigError(f"{path} describes no model: {flaw}")
    return config
