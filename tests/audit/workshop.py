"""A folder with the files that the mistakes name: texts, runs, exports and tasks, right and wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

SENTENCE = "The sun rose over the hill, and the river below it turned from grey to silver.\n"
SMALL = [
    "data=text", "data.path=text.txt", "data.cache=cache", "seq_len=32", "device=cpu", "tracking=disabled",
    "model.n_layers=1", "model.n_embd=16", "model.n_heads=2", "training.batch_size=4", "training.eval_batches=1",
    "training.sample_tokens=0", "schedule=constant", "training.steps=2",
]  # fmt: skip
# What makes the runs and the exported model; each is a command line.
COMMANDS = (
    ["train.py", *SMALL, "hydra.run.dir=run"],
    ["train.py", *SMALL, "hydra.run.dir=rotary", "model.positions=rotary", "score=window", "score.window=8"],
    ["sample.py", "run=run", "export=exported"],
)
FILES: dict[str, str | bytes] = {
    "text.txt": SENTENCE * 400,
    "short.txt": "Too short.",
    "empty.txt": "",
    "latin.txt": b"caf\xe9 " * 2000,
    "utf16.txt": SENTENCE.encode("utf-16") * 20,
    "binary.txt": b"\x7fELF\0\0\0" * 2000,
    "notes/a.md": SENTENCE,
    "notes/b.rst": SENTENCE,
    "mark.jsonl": "\ufeff" + json.dumps([SENTENCE]),
    "list.jsonl": json.dumps({"text": SENTENCE}) + "\n[1, 2]\n",
    "number.jsonl": json.dumps({"text": 3}) + "\n",
    "field.jsonl": json.dumps({"body": SENTENCE, "title": "x"}) + "\n",
    "broken.jsonl": json.dumps({"text": SENTENCE}) + '\n{"text": \n',
    "deep.jsonl": "[" * 100_000 + "\n",
    "no.parquet": "no table at all",
    "prompts.txt": "The sun\nA river\n",
    "gap.txt": "The sun\n\nA river\n",
    "wrong.jsonl": '{"prompt": "The sun"}\n{"text": "A river"}\n',
    "questions.json": "[]",
    "questions.jsonl": json.dumps({"question": "The sun", "choices": ["rose", "fell"], "answer": 0}) + "\n",
    "answer.jsonl": json.dumps({"question": "The sun", "choices": ["rose", "fell"], "answer": 2}) + "\n",
    "choices.jsonl": json.dumps({"question": "The sun", "choices": "rose", "answer": 0}) + "\n",
    "mixed.jsonl": json.dumps({"question": "q", "choices": ["a"], "answer": 0}) + '\n{"text": "t"}\n',
    "nothing.jsonl": "\n",
    "tokenizer.json": '{"version": "1.0"}',
    "llama/config.json": json.dumps({"model_type": "llama", "num_hidden_layers": 2}),
    "llama/model.safetensors": "",
    "unlike/config.json": json.dumps({"model_type": "gpt2", "n_layer": 3, "n_head": 5, "n_embd": 20}),
    "unlike/model.safetensors": "",
    "pickled/config.json": json.dumps({"model_type": "gpt2"}),
    "pickled/pytorch_model.bin": "",
    "listed/config.json": "[]",
    "own.py": "def scale(query):\n    return query\n\n\nnumber = 3\n",
    "fails.py": "import no_such_package\n",
}


def furnish(folder: Path) -> None:
    """Write the files that need no run."""
    for name, content in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    (folder / "vacant").mkdir()
    pa.parquet.write_table(pa.table({"text": pa.array([], pa.string())}), folder / "rows.parquet")
    pa.parquet.write_table(pa.table({"when": pa.array([1, 2])}), folder / "when.parquet")


def spoil(folder: Path) -> None:
    """Copies of the run and of the exported model, each with something wrong."""

    def copy(source: str, name: str) -> Path:
        return Path(shutil.copytree(folder / source, folder / name, symlinks=True))

    for weights in copy("run", "damaged").glob("checkpoints/step-*/model/*.safetensors"):
        weights.write_bytes(weights.read_bytes()[:-1])
    shutil.rmtree(copy("run", "bare") / "checkpoints")
    (copy("run", "lost") / ".hydra" / "config.yaml").unlink()
    config = copy("run", "older") / ".hydra" / "config.yaml"
    config.write_text(config.read_text() + "horizon: 3\n")
    for name in (".hydra/overrides.yaml", "metrics.jsonl"):
        path = copy("run", f"torn-{Path(name).stem}") / name
        path.write_text("[" * 1000)
    (copy("run", "elsewhere") / "tokenizer.json").unlink()
    (copy("exported", "plain") / "tokenizer.json").unlink()
    settings = copy("exported", "coded") / "config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"auto_map": {"AutoModel": "x.Y"}}))
    (copy("exported", "cut") / "model.safetensors").write_bytes(b"\0" * 40)
