"""The benchmark of several GPUs, as far as it can be tested without a GPU."""

import json

from bench import several_gpus
from bench.several_gpus import KINDS, OF_BITS, cases, measure, table
from recipe.run import compose


def test_every_case_is_a_command_and_those_of_bits_have_the_same_step_on_any_number_of_gpus():
    assert {case["kind"] for case in cases(4)} == set(KINDS)
    for case in cases(4):
        config = compose.to_config(compose.composed(case["overrides"]))
        training, step = config.training, config.training.batch_tokens
        if case["kind"] in OF_BITS:
            assert step is not None
            assert step % (training.batch_size * config.seq_len * 4) == 0
            assert (training.log_every, training.compile) == (1, case["kind"] == "bits")
        if case["kind"] in ("quarter", "half", "million"):
            assert config.parallel.context == 4


def test_bits_are_those_of_every_steps_loss_and_gradient(monkeypatch):
    def train(overrides, folder, ranks):
        assert ranks[-1] == "--nproc-per-node=2"
        lines = ({"step": n, "train/loss": loss, "optim/grad_norm": 1.0} for n, loss in enumerate((3.0, last)))
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return {"status": "completed"}

    monkeypatch.setattr(several_gpus, "train", train)
    cell, digests = {"kind": "bits", "name": "shard", "gpus": 2, "overrides": []}, []
    for last in (2.0, 2.0 + 2**-30, 2.0):  # noqa: B007  # `train` reads it
        digests.append(measure(cell)["digest"])
    assert digests[0] == digests[2] != digests[1]


def test_the_table_has_multiples_of_one_gpu_and_says_where_bits_differ():
    fields = {"kind": "bits", "name": "shard", "status": "completed", "peak_allocated_gib": 12.0}
    rows = [
        fields | {"gpus": 1, "tokens_per_s": 5e5, "digest": "a"},
        fields | {"gpus": 2, "tokens_per_s": 9e5, "digest": "a"},
        fields | {"gpus": 4, "tokens_per_s": 1.9e6, "digest": "b"},
        fields | {"gpus": 4, "name": "replicate", "status": "out_of_memory"},
    ]
    assert table(rows).splitlines()[2:] == [
        "| bits, shard | 500 (12.0) | 900 (12.0), 1.80 times one, the same bits "
        "| 1,900 (12.0), 3.80 times one, other bits |",
        "| bits, replicate | | | out of memory |",
    ]
