"""The work of test_families.py in a separate process: the most memory that loading a folder's model takes.

python -m tests.recipe.infer.loading_memory <folder>
"""

import ctypes
import gc
import json
import sys
from pathlib import Path

import torch
from torch import Tensor

from attention import AttentionConfig, build_attention
from model.gpt import GPT
from recipe.infer.huggingface.loading import load
from recipe.infer.huggingface.starting import start_from


def anonymous() -> int:
    """Bytes that this process has had for itself alone, without files that are mapped."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def main(folder: Path) -> None:
    taken = 0
    start = start_from(str(folder))
    with torch.device("meta"):
        attend = build_attention(AttentionConfig())
        model = GPT(start.settings.model, start.settings.model.vocab_size or 0, 16, attend)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else weights may fill memory that the imports have freed
    before = anonymous()  # what is imported by now does not count
    model.materialise("cpu")
    fill = Tensor.copy_

    def measured(target, source):
        nonlocal taken
        result = fill(target, source)
        taken = max(taken, anonymous() - before)  # while the file's tensor is still there
        return result

    Tensor.copy_ = measured  # type: ignore[assignment, method-assign]
    load(model, str(folder))
    weights = sum(p.numel() * p.itemsize for p in model.parameters())
    print(json.dumps({"weights": weights, "taken": taken, "largest": max(p.nbytes for p in model.parameters())}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
