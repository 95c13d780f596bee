"""The steps of docs/finetuning.md: conversations in, an export out, and the same losses as in transformers."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import sample
from data.batches import Batch, GlobalBatch
from data.feed import ChatBatches, PackedRows
from data.prepare import prepare
from recipe.run.metrics import read_metrics
from recipe.run.recorded import read_config
from tests.lines import write_lines
from tests.programs import train
from tests.toy_llama import conversations, tokenizer, write_folder

PAGE = (Path(__file__).parents[3] / "docs" / "finetuning.md").read_text()
# transformers' AdamW decays other tensors, so neither decays any.
SMALL = {
    "seq_len=1024": "seq_len=96",
    "training.steps=300": "training.steps=6 training.batch_size=2 training.batch_tokens=384 training.log_every=1",
    "optimizer.lr=1e-5": "optimizer.lr=3e-3 optimizer.weight_decay=0 optimizer.betas=[0.9,0.999] schedule=constant "
    "schedule.warmup_steps=0 attention=tiled device=cpu tracking=disabled",
}


def commands() -> list[list[str]]:
    """The arguments of the page's commands that train, at toy size."""
    found = re.findall(r"^    python train\.py (.*)$", PAGE, re.MULTILINE)
    for long, short in SMALL.items():
        found = [command.replace(long, short) for command in found]
    return [command.split() for command in found]


def micro_batches(run: Path, steps: int) -> list[list[Batch]]:
    """What each step of a run on conversations had, in its two micro-batches."""
    config = read_config(run)
    data = prepare(config.data)
    rows = PackedRows(data.train, 96, data.tokenizer.eot_token)
    batches = ChatBatches(rows, GlobalBatch(2, micro_steps=2), config.seed)
    return [[batches.stored(step, micro_step).widened() for micro_step in (0, 1)] for step in range(steps)]


def beside_transformers(
    model: torch.nn.Module, micro_batches: list[list[Batch]], lr: float
) -> list[tuple[float, float]]:
    """The loss and the gradient norm of each step of a model of transformers, as its Trainer takes it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=0.0)
    found = []
    for batches in micro_batches:
        learned = sum((batch.targets >= 0).sum() for batch in batches)
        total = torch.zeros(())
        for batch in batches:
            loss = model(**arguments(batch), num_items_in_batch=learned, use_cache=False).loss
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append((float(total), float(norm)))
    return found


def arguments(batch: Batch) -> dict[str, Tensor]:
    """A batch for transformers, whose labels are shifted by one; positions that restart separate documents."""
    assert batch.document_starts is not None
    nothing = torch.zeros_like(batch.inputs[:, :1])
    inputs = torch.cat([batch.inputs, nothing], dim=1)
    labels = torch.cat([nothing - 100, batch.targets], dim=1)
    positions = torch.arange(batch.inputs.shape[1]) - batch.document_starts
    return {"input_ids": inputs, "labels": labels, "position_ids": torch.cat([positions, nothing], dim=1)}


@pytest.mark.slow
def test_the_page_finetunes_a_llama_as_transformers_does_and_exports_it(here):
    write_folder(here / "llama")
    write_lines(here / "chats.jsonl", conversations(60))
    on_chats, on_notes = commands()
    assert train(*on_chats, "hydra.run.dir=run") == 0

    steps = micro_batches(here / "run", 6)
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(here / "llama", attn_implementation="eager")
    wanted = beside_transformers(theirs.train(), steps, 3e-3)
    logged = [line for line in read_metrics(here / "run" / "metrics.jsonl") if "train/loss" in line]
    for ours, reference in zip(logged, wanted, strict=True):
        assert (ours["train/loss"], ours["optim/grad_norm"]) == pytest.approx(reference, rel=1e-5)
    assert wanted[-1][0] < 0.8 * wanted[0][0]

    (here / "notes").mkdir()
    for name in ("a.txt", "b.txt", "c.txt"):
        (here / "notes" / name).write_text("It is what it is. " * 60)
    assert train(*on_notes, "training.steps=2", "hydra.run.dir=text") == 0

    (exporting,) = re.findall(r"^    python sample\.py (.*)$", PAGE, re.MULTILINE)
    sample.main(exporting.replace("<run folder>", "run").split())
    line = conversations(1)[0]["messages"]
    toy: Any = tokenizer()
    read_back: Any = transformers.AutoTokenizer.from_pretrained("my-llama")
    assert read_back.apply_chat_template(line)["input_ids"] == toy.apply_chat_template(line)["input_ids"]
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)  # the page's
    assert names["answer"]["role"] == "assistant"
    assert json.loads((here / "my-llama" / "generation_config.json").read_text())["eos_token_id"] == 1
