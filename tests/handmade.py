"""Run folders made by hand, without training."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from data.tokenizers import bytes_tokenizer, save_tokenizer
from model.gpt import GPT
from model.options import GPTConfig
from recipe.files import plain
from recipe.run.config import Config
from recipe.run.run_folder import write_recorded
from recipe.training.checkpoint import save_checkpoint
from tests.parts import built

TOKENIZER = bytes_tokenizer()


def fresh(model: GPTConfig, seq_len: int, seed: int = 5) -> GPT:
    """A model with weights of which none is small."""
    made = built(model, seq_len, TOKENIZER.n_vocab, seed=seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(4)
    return made.eval()


def make_run(folder: Path, config: Config, checkpoints: Mapping[int, dict[str, Any]]) -> Path:
    """A run folder with checkpoints at these steps, with these metadata. The step is the seed of the weights."""
    write_recorded(folder, plain(config), [])
    save_tokenizer(TOKENIZER, folder)
    for step, metadata in checkpoints.items():
        state = {"model": fresh(config.model, config.seq_len, step).state_dict(), "training": {}}
        save_checkpoint(folder / "checkpoints", state, step, keep_last=2, metadata=metadata)
    return folder
