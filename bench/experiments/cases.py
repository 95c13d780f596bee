"""The runs of train.py behind the documents' tables: for each result file, its runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple


class Run(NamedTuple):
    """One run of train.py.

    case       the settings in which it differs from the rest of its table
    overrides  of train.py, separated by spaces
    then       the overrides of a second part, which resumes the first; none for a single part
    windows    lengths of windows in which eval.py measures the whole validation split afterwards
    gpus       the number of GPUs
    losses     whether the training losses of all steps are recorded, as figures need them
    """

    case: dict[str, Any]
    overrides: str
    then: str = ""
    windows: tuple[int, ...] = ()
    gpus: int = 1
    losses: bool = False


SOURCES = "<sources>"  # stands for the folder that bench.experiments.sources makes
QUIET = "training.checkpoint_every=0 training.sample_tokens=0"
GPT2 = "model=gpt2 data.tokenizer=gpt2"
AT_1024 = f"{GPT2} seq_len=1024"
ON_A_CPU = "device=cpu"


def default() -> Iterator[Run]:
    """README's first commands, on a CPU."""
    yield Run({"command": "default"}, ON_A_CPU)
    yield Run(
        {"command": "shakespeare"}, f"{ON_A_CPU} data=shakespeare data.tokenizer=bytes seq_len=64 training.steps=2000"
    )


def optimizers_on_a_cpu() -> Iterator[Run]:
    """AdamW and Muon with the default model, and the moving average of their weights."""
    for name, overrides in {"adamw": "", "adamw 6e-3": "optimizer.lr=6e-3", "muon": "optimizer=muon"}.items():
        yield Run({"optimizer": name}, f"{ON_A_CPU} training.ema=0.99 {overrides}")


def first_ablation() -> Iterator[Run]:
    """The sweep of docs/first-ablation.md, on a CPU."""
    shape = f"{ON_A_CPU} training.steps=300 training.eval_every=100 {QUIET}"
    for window, seed in product(("null", 16), (1, 2, 3)):
        yield Run({"window": window, "seed": seed}, f"{shape} score.window={window} seed={seed}")


def parity() -> Iterator[Run]:
    """experiment=parity with GPT-2: three seeds of naive, one of each other implementation."""
    shape = f"{of('parity')} {AT_1024} {QUIET} data.val_fraction=0.2 training.steps=300 parity.every=100"
    for attention, seed in (*product(("naive",), (1, 2, 3)), ("flash", 1), ("sdpa", 1), ("tiled", 1)):
        tiles = "attention.block_q=256 attention.block_k=256" if attention == "tiled" else ""
        overrides = f"{shape} schedule.warmup_steps=30 attention={attention} seed={seed} {tiles}"
        yield Run({"attention": attention, "seed": seed}, overrides, losses=True)


def dropout_parity() -> Iterator[Run]:
    """experiment=dropout_parity with GPT-2."""
    shape = f"{of('dropout_parity')} {AT_1024} {QUIET} data.val_fraction=0.2 attention.dropout=0.1 model.dropout=0.1"
    for attention, seed in (("naive", 1), ("naive", 2), ("flash", 1)):
        steps = "training.steps=100 parity.every=50 schedule.warmup_steps=30"
        overrides = f"{shape} {steps} attention={attention} seed={seed}"
        yield Run({"attention": attention, "seed": seed}, overrides, losses=True)


def losses() -> Iterator[Run]:
    """README's first figure: flash and naive with dropout, compiled."""
    shape = f"{AT_1024} {QUIET} training.log_every=1 training.steps=300 training.batch_size=4 training.eval_every=0"
    shape += " attention.dropout=0.1 model.dropout=0.1 training.compile=true training.cuda_graph=false"
    for attention, seed in (("flash", 1), ("naive", 1), ("naive", 2)):
        yield Run({"attention": attention, "seed": seed}, f"{shape} attention={attention} seed={seed}", losses=True)


def same_training() -> Iterator[Run]:
    """The fast step compared with the plain one: naive, uncompiled, the loss in fp32."""
    shape = f"{AT_1024} {QUIET} training.steps=500 training.batch_size=16 optimizer.lr=2e-4 schedule.warmup_steps=100"
    shape += " training.log_every=1 training.eval_every=100 training.eval_batches=20"
    fast = "attention=flash training.compile=true"
    kinds = {
        "plain": "attention=naive training.loss=plain",
        "fast": fast,
        "fast-bf16-residual": f"{fast} training.residual_in_fp32=false",
    }
    for name, seed in (("plain", 1), ("plain", 2), ("fast", 1), ("fast-bf16-residual", 1)):
        yield Run({"run": name, "seed": seed}, f"{shape} {kinds[name]} seed={seed}", losses=True)


def variants() -> Iterator[Run]:
    """experiment=variants with GPT-2: every score, with naive and flash."""
    shape = f"{of('variants')} {AT_1024} {QUIET} training.compile=true parity.every=100 seed=1"
    scores = ("causal", "window", "alibi", "soft_cap", "sinks", "documents")
    for score, attention in product(scores, ("naive", "flash")):
        window = "score.window=256" if score == "window" else ""
        overrides = f"{shape} score={score} attention={attention} {window}"
        yield Run({"score": score, "attention": attention}, overrides)


def break_it() -> Iterator[Run]:
    """experiment=break_it with GPT-2."""
    shape = f"{of('break_it')} {AT_1024} attention=tiled attention.block_q=256 attention.block_k=256"
    for precision, ablate in product(("fp32", "bf16", "fp16"), ("none", "no_max_subtraction", "no_rescaling")):
        overrides = f"{shape} attention.ablate={ablate} training.precision={precision}"
        yield Run({"ablate": ablate, "precision": precision}, overrides)


def crossover() -> Iterator[Run]:
    """experiment=crossover with GPT-2, without the length for which naive runs out of memory."""
    shape = f"{of('crossover')} {GPT2} training.batch_tokens=32768 training.steps=12"
    for attention, seq_len in product(("naive", "sdpa", "flash"), (256, 512, 1024, 2048, 4096, 8192)):
        if (attention, seq_len) != ("naive", 8192):
            case = {"attention": attention, "seq_len": seq_len}
            yield Run(case, f"{shape} attention={attention} seq_len={seq_len}")


def block_size() -> Iterator[Run]:
    """experiment=block_size with GPT-2."""
    for tile in (128, 256, 512):
        overrides = f"{of('block_size')} {AT_1024} attention=tiled training.steps=11 attention.block_q={tile}"
        yield Run({"tile": tile}, overrides)


def context_length() -> Iterator[Run]:
    """experiment=context_length with GPT-2: a longer context at equal tokens."""
    shape = f"{of('context_length')} {GPT2} {QUIET} training.compile=true"
    learned = f"{shape} training.batch_tokens=32768 training.eval_every=100"
    sources = f"{shape} data=text data.path={SOURCES}"
    alibi = f"{sources} score=alibi training.batch_tokens=32768 training.eval_every=150 training.eval_batches=16"
    muon = f"{sources} model.positions=rotary optimizer=muon optimizer.lr=1.5e-3 training.batch_tokens=65536"
    muon += " schedule.warmup_steps=auto schedule.min_lr_ratio=0 training.eval_every=40 training.eval_batches=8"
    for model, overrides, runs in (
        ("learned positions", learned, (("flash", 4096, 600), ("naive", 1024, 600))),
        ("ALiBi", alibi, (("flash", 4096, 600), ("naive", 1024, 600))),
        ("rotary positions, Muon", muon, (("flash", 4096, 260), ("flash", 1024, 228))),
    ):
        for attention, seq_len, steps in runs:
            chosen = f"attention={attention} seq_len={seq_len} training.steps={steps}"
            yield Run({"model": model, "attention": attention, "seq_len": seq_len}, f"{overrides} {chosen}")


def equal_time() -> Iterator[Run]:
    """Windows of 1,024, then of 4,096 tokens with flash, beside windows of 1,024 with naive for the same time."""
    shape = f"{of('context_length')} {GPT2} data=text data.path={SOURCES} data.val_fraction=0.05 seq_len=1024"
    shape += " model.positions=rotary optimizer=muon optimizer.lr=1.5e-3 schedule.warmup_steps=40"
    shape += " training.compile=true training.batch_tokens=65536 training.eval_every=100 training.eval_batches=8"
    shape += " training.checkpoint_every=100000 training.sample_tokens=0"
    decay = "schedule=wsd schedule.decay_fraction=0.3"
    yield Run(
        {"run": "flash, 1,024, then 4,096 tokens"},
        f"{shape} attention=flash schedule=constant training.steps=400",
        then=f"seq_len=4096 {decay} training.steps=620",
        windows=(4096, 1024, 256),
    )
    overrides = f"{shape} attention=naive {decay} training.steps=500"
    yield Run({"run": "naive, 1,024 tokens"}, overrides, windows=(1024, 256))


def optimizers() -> Iterator[Run]:
    """AdamW and Muon with GPT-2."""
    shape = f"{AT_1024} {QUIET} attention=flash optimizer.lr=6e-4 training.batch_size=32 training.steps=150"
    for name in ("adamw", "muon"):
        yield Run({"optimizer": name}, f"{shape} training.eval_every=50 optimizer={name}")


def shakespeare() -> Iterator[Run]:
    """experiment=shakespeare."""
    yield Run({"attention": "flash"}, "experiment=shakespeare attention=flash training.compile=true")


def long_context() -> Iterator[Run]:
    """experiment=long_context on one GPU: two steps, of which the first compiles."""
    yield Run({"gpus": 1}, "experiment=long_context attention=flash training.steps=2")


def long_context_on_two() -> Iterator[Run]:
    """experiment=long_context on two GPUs, which share the sequence."""
    overrides = "experiment=long_context attention=flash parallel.context=2 training.steps=2"
    yield Run({"gpus": 2}, overrides, gpus=2)


def memory_wall() -> Iterator[Run]:
    """experiment=memory_wall with GPT-2: each implementation up to the first length that does not fit."""
    longest = {"naive": 16_384, "sdpa": 524_288, "flash": 524_288}
    for attention, last in longest.items():
        for seq_len in (2**n for n in range(10, last.bit_length())):
            text = "data.val_fraction=0.2" if seq_len > 262_144 else ""  # one validation window needs as much
            overrides = f"{of('memory_wall')} {GPT2} training.steps=3 attention={attention} seq_len={seq_len} {text}"
            yield Run({"attention": attention, "seq_len": seq_len}, overrides)


def of(experiment: str) -> str:
    """The overrides for one run of a sweep's experiment."""
    return f"experiment={experiment} hydra.mode=RUN"


# the name on the command line -> its runs; the result file has the part of the name before the colon
EXPERIMENTS: dict[str, Callable[[], Iterator[Run]]] = {
    "default": default,
    "optimizers:cpu": optimizers_on_a_cpu,
    "first-ablation": first_ablation,
    "parity": parity,
    "dropout-parity": dropout_parity,
    "losses": losses,
    "same-training": same_training,
    "variants": variants,
    "break-it": break_it,
    "crossover": crossover,
    "block-size": block_size,
    "context-length": context_length,
    "equal-time": equal_time,
    "optimizers": optimizers,
    "shakespeare": shakespeare,
    "long-context": long_context,
    "long-context:two-gpus": long_context_on_two,
    "memory-wall": memory_wall,
}
