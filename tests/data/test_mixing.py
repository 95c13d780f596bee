"""Several corpora in one run: which sequences a step has, and the loss of each corpus."""

import shutil
from pathlib import Path

import numpy as np
import pytest

import compare
from data.batches import Batches, GlobalBatch, MixedBatches
from data.mistakes import data_mistakes
from data.options import DataConfig
from recipe.run.metrics import read_metrics
from tests.programs import train

TEXTS = [np.arange(0, 400, dtype=np.uint16), np.arange(1000, 1300, dtype=np.uint16)]
T = 7


def test_each_corpus_is_read_in_its_order_in_the_pattern_of_the_weights():
    alone = [Batches(text, T, GlobalBatch(1), seed=5) for text in TEXTS]
    expected, counts = [], [0, 0]
    for corpus in [0, 0, 1, 0] * 60:  # more than an epoch of both
        expected.append(alone[corpus].stored(counts[corpus]).inputs[0])
        counts[corpus] += 1
    mixed = MixedBatches([Batches(text, T, GlobalBatch(6), seed=5) for text in TEXTS], [3, 1])
    assert np.array_equal(np.concatenate([mixed.stored(step).inputs for step in range(40)]), expected)


def test_a_run_logs_the_loss_of_each_corpus_and_goes_on_where_it_stopped(here):
    Path("a.txt").write_text("to be or not to be, that is the question\n" * 100)
    Path("b.txt").write_text("".join(chr(97 + n % 26) for n in range(4000)))
    small = [
        *("data=text", "data.path=[a.txt,b.txt]", "data.weights=[3,1]", "data.cache=cache", "seq_len=24", "device=cpu"),
        *("model.n_layers=1", "model.n_embd=16", "model.n_heads=2", "training.batch_size=6", "training.log_every=1"),
        *("training.eval_batches=2", "training.sample_tokens=0", "tracking=disabled", "schedule=constant"),
    ]
    assert train(*small, "training.steps=4", "training.checkpoint_every=2", "hydra.run.dir=runs/1") == 0
    shutil.copytree("runs/1", "runs/2", symlinks=True)
    shutil.rmtree("runs/2/checkpoints/step-00000004")  # as if it had stopped before
    assert train("resume=runs/2") == 0
    lines, again = (read_metrics(Path(run, "metrics.jsonl")) for run in ("runs/1", "runs/2"))
    assert [line["train/loss"] for line in again[1:]] == [line["train/loss"] for line in lines[1:]]
    a, b = (lines[-1][f"val/loss/{name}.txt"] for name in "ab")
    assert a != b
    assert lines[-1]["val/loss"] == pytest.approx((3 * a + b) / 4)
    compare.main(["runs", "wandb=disabled", "out=page"])
    page = Path("page/index.html").read_text()
    assert "val loss of a.txt" in page
    assert f"{a:.4f}" in page
    assert "the training text of one corpus and the validation text of another are not counted" in page


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"path": ["a"]}, "must be two or more different texts"),
        ({"path": ["a", "a"]}, "must be two or more different texts"),
        ({"path": ["a", "b"], "weights": [1]}, "must have a whole number above 0 for each"),
        ({"path": ["a", "b"], "weights": [1, 0]}, "must have a whole number above 0 for each"),
        ({"path": "a", "weights": [1]}, "has no effect on one text"),
        ({"path": ["a", "b"], "tokenizer": "bpe"}, "learns its tokens from one text"),
    ],
)
def test_a_mixture_that_cannot_be_is_one_sentence(options, sentence):
    (said,) = data_mistakes(DataConfig(name="text", **options))
    assert sentence in said
