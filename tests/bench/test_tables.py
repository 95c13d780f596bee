"""The tables of speed and memory in README and docs/ hold the numbers of the files in bench/results/."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.attention_results import read
from bench.kernel_paths import identity

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"


def results(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def words(page: str) -> str:
    """The text of a page without its line breaks."""
    return re.sub(r"\s+", " ", (ROOT / page).read_text())


def table(page: str, header: str, after: str = "") -> Iterator[tuple[str, str, str]]:
    """Row, column and cell of the first table after the words `after` that starts with `header`, without bold and
    commits."""
    text = (ROOT / page).read_text()
    lines = text[text.index(header, text.index(after)) :].partition("\n\n")[0].splitlines()
    _, _, *columns = (column.strip() for column in lines[0].removesuffix("|").split("|"))
    for line in lines[2:]:
        _, row, *cells = (cell.strip() for cell in line.removesuffix("|").split("|"))
        for column, cell in zip(columns, cells, strict=True):
            yield row, column, re.sub(r"\*\*| \([0-9a-f]{7}\)", "", cell)


@pytest.mark.parametrize(
    ("page", "header", "after", "file"),
    [
        ("README.md", "| `python -m bench.attention` | 1k |", "", "attention-nvidia-h200-auto"),
        ("docs/speed.md", "| | 1k | 2k |", "", "attention-nvidia-h200"),
        ("docs/kernels.md", "| | 1k | 2k |", "", "attention-nvidia-h200"),
        ("docs/kernels.md", "| | 1k | 4k |", "", "attention-nvidia-h200-auto"),
        ("docs/kernels.md", "| | 1k | 4k |", "FlashAttention-4 in one run", "attention-nvidia-h200-peers"),
        ("docs/kernels.md", "| | 4k | 16k |", "", "attention-nvidia-h200-deterministic"),
    ],
)
def test_speeds_of_attention(page: str, header: str, after: str, file: str) -> None:
    found = {
        (row["name"], row["head_size"], row["variant"], row["dropout"], row["length"]): row
        for row in read(RESULTS / f"{file}.json")["rows"]
    }
    names = {None: "flash", "flash": "flash", "cuDNN": "sdpa-cudnn", "FlashAttention-4": "fa4"}
    names["FlashAttention-4, deterministic"] = "fa4-deterministic"
    for row, column, cell in table(page, header, after):
        what = r"head size (\d+)(, full mask)?(?:, no dropout|, dropout ([\d.]+))?"
        named = re.fullmatch(what + "(?:, (flash|cuDNN|FlashAttention-4(?:, deterministic)?))?", row)
        assert named, row
        variant = "full" if named[2] else "causal"
        length = 1024 * int(column.removesuffix("k"))
        measured = found[names[named[4]], int(named[1]), variant, float(named[3] or 0), length]
        ways = measured["forward"], measured["backward"]
        expected = "/".join(f"{way['tflops']:.0f}" for way in ways)
        if "(" in cell:
            expected += f" ({'/'.join(format(way['of_fastest_peer'], '.2f') for way in ways)})"
        assert cell == expected, (row, column)


def test_times_of_variants() -> None:
    rows = read(RESULTS / "attention-nvidia-h200-variants.json")["rows"]
    found, with_dropout = (
        {(row["name"], row["head_size"], row["variant"], row["length"]): row for row in rows if row["dropout"] == rate}
        for rate in (0.0, 0.1)
    )
    names = {"soft cap 50": "soft_cap", "window of 1,024": "window", "documents of 1,024": "documents"}
    for row, column, cell in table("docs/kernels.md", "| dropout 0.1 | D 64 |"):
        ours = with_dropout["flash", int(column.removeprefix("D ")), names.get(row, row.lower()), 16_384]
        assert cell == "/".join(f"{ours[way]['ms']:.2f}" for way in ("forward", "backward")), (row, column)
    of_both: dict[tuple[int, str], float] = {}
    head_size = 0
    for row, column, cell in table("docs/kernels.md", "| | D 64 | over flex |"):
        head_size = int(column.removeprefix("D ")) if column.startswith("D ") else head_size
        variant = names.get(row, row.lower())
        ours, flex = (found[name, head_size, variant, 16_384] for name in ("flash", "flex"))
        times = [(flex[way]["ms"], ours[way]["ms"]) for way in ("forward", "backward")]
        values = [own for _, own in times] if column.startswith("D ") else [other / own for other, own in times]
        assert cell == "/".join(f"{value:.2f}" for value in values), (row, column, head_size)
        of_both[head_size, variant] = sum(own for _, own in times)
    text = words("docs/kernels.md")
    for name, variant in {"ALiBi": "alibi", "sinks": "sinks", "soft cap": "soft_cap"}.items():
        said = re.search(rf"over causal attention: .*?{name} ([\d.]+\d)(?: at head size 64)? and ([\d.]+\d)", text)
        assert said
        assert said.groups() == tuple(f"{of_both[D, variant] / of_both[D, 'causal']:.2f}" for D in (64, 128)), name


def paths(row: str, column: str) -> tuple[dict[str, Any], str]:
    """The measurement of both kernel paths that a table's row and column name, and the path, if the row names one."""
    found = {identity(measured): measured for measured in results("kernel-paths-nvidia-h200")["rows"]}
    path = re.search(r", (hopper|plain)$", row)
    head_size, _, kind = re.sub(r"^head size |^D |, dropout 0.1|, hopper$|, plain$", "", row).partition(", ")
    names = {"": "causal", "full mask": "full", "window of 1,024": "window", "documents of 1,024": "documents"}
    names |= {"ALiBi": "alibi", "soft cap 50": "soft_cap", "sinks": "sinks"}
    length = 1024 * int(column.removesuffix("k")) if column.endswith("k") else int(column)
    rate = 0.1 if "dropout" in row else 0.0
    return found[int(head_size), names[kind], rate, length], path[1] if path else ""


def test_speeds_of_each_kernel_path() -> None:
    told = set()
    for row, column, cell in table("docs/kernels.md", "| | 128 | 256 |"):
        measured, path = paths(row, column)
        told.add(identity(measured))
        speeds = [measured[path][way]["tflops"] for way in ("forward", "backward")]
        assert cell == "/".join(f"{speed:.0f}" for speed in speeds), (row, column)
    ratios_from_512 = table("docs/kernels.md", "| | 512 | 1k | 2k | 16k |")
    for row, column, cell in (*ratios_from_512, *table("docs/kernels.md", "| tokens | 128 | 256 |")):
        measured, _ = paths(row, column)
        told.add(identity(measured))
        plain, hopper = measured["plain"], measured["hopper"]
        ratios = [plain[way]["ms"] / hopper[way]["ms"] for way in ("forward", "backward")]
        assert cell == "/".join(f"{ratio:.2f}" for ratio in ratios), (row, column)
    assert told == {identity(row) for row in results("kernel-paths-nvidia-h200")["rows"]}


def test_speeds_and_errors_of_products_in_8_bits() -> None:
    file = results("fp8-nvidia-h200")
    times = {(row["head_size"], row["length"]): row for row in file["times"]}
    errors = {row["head_size"]: row["error"] for row in file["errors"] if row["inputs"] == "outliers"}
    for row, column, cell in table("docs/kernels.md", "| | 1k | 4k | 8k | 16k | error |"):
        of_heads, _, precision = row.partition(", ")
        head_size = int(of_heads.removeprefix("head size "))
        by = {"fp8": "fp8", "fp8, the kernel alone": "kernel", "bf16": "inputs"}[precision]
        if column.endswith("k"):
            expected = f"{times[head_size, 1024 * int(column.removesuffix('k'))][by]['tflops']:,.0f}"
        else:
            kind = {"error": by, "with one scale a tensor": "one_scale" if by == "fp8" else ""}[column]
            expected = f"{errors[head_size][kind]:.3f}" if kind in errors[head_size] else ""
        assert cell == expected, (row, column)


def test_bandwidths_of_decoding() -> None:
    found = {(row["name"], row["sequences"], row["keys"]): row for row in results("decode-nvidia-h200")["rows"]}
    names = {
        "SDPA's FlashAttention-2": "sdpa flash",
        "SDPA's cuDNN": "sdpa cudnn",
        "FlexAttention's decoding": "flex decoding",
    }
    for row, column, cell in table("docs/decoding.md", "| | 16 x 32,768 keys |"):
        sequences, keys = map(int, column.removesuffix(" keys").replace(",", "").split(" x "))
        pages = re.findall(r"\d+", row.partition("pages of")[2])
        kinds = [f"flash, pages of {page}" for page in pages] or [names.get(row, row)]
        assert cell == ", ".join(f"{found[kind, sequences, keys]['of_copy']:.0%}" for kind in kinds), (row, column)


def test_shares_of_the_peak() -> None:
    found = {
        (row["head_size"], row["length"]): row
        for row in read(RESULTS / "attention-nvidia-h200-share-of-peak.json")["rows"]
    }
    for row, column, cell in table("docs/results.md", "| causal, bf16, commit e65f581"):
        measured = found[int(row.removeprefix("head size ")), 1024 * int(column.removesuffix("k"))]
        shares = [f"{measured[way]['tflops'] / 989:.0%}" for way in ("forward", "backward")]
        assert f"{cell}%".replace("/", "%/") == "/".join(shares), (row, column)


def test_bytes_moved() -> None:
    rows = results("bytes-nvidia-h200")["rows"]
    names = {"naive, H200": "naive", "flash (plain Triton)": "flash", "torch's FlashAttention-2": "sdpa-flash"}
    for row, column, cell in table("docs/results.md", "| forward + backward |"):
        if not row.startswith("paper"):
            passes = [r for r in rows if r["name"] == names[row.removeprefix("ours, ")] and not r["block_q"]]
            of = {"GFLOP": ["gflop"], "GB moved": ["gb_read", "gb_written"], "ms": ["ms"]}[column]
            total = sum(r[number] for r in passes for number in of)
            assert cell == (f"{total:,.0f}" if column == "GFLOP" else f"{total:.3g}"), (row, column)
    tiles = {f"{r['block_q']} x {r['block_k']}": r for r in rows if r["block_q"]}
    for row, column, cell in table("docs/results.md", "| queries x keys of a tile |"):
        tile = tiles[column]
        number = tile["ms"] if row.startswith("ms") else tile["gb_read"] + tile["gb_written"]
        assert cell == f"{number:.2f}", (row, column)


def test_times_of_softmax() -> None:
    ms = {
        (row["name"], row["length"]): row["ms"] for row in results("softmax-nvidia-h200")["rows"] if row["rows"] == 4000
    }
    for row, column, cell in table("docs/results.md", "| 4,000 rows of |"):
        length = int(column.replace(",", ""))
        if row == "safe / online":
            assert cell == f"{ms['safe', length] / ms['online', length]:.2f}", column
        else:
            time = ms[row.removesuffix(", ms"), length]
            assert cell == f"{time:.{3 if time < 1 else 2}f}", (row, column)


@pytest.mark.parametrize(
    ("page", "header", "after", "dropout"),
    [
        ("README.md", "| `python -m bench.train_step` |", "", 0.1),
        ("docs/speed.md", "| batch x seq_len |", "", 0.0),
        ("docs/speed.md", "| batch x seq_len |", "With dropout 0.1", 0.1),
    ],
)
def test_speed_and_memory_of_the_training_step(page: str, header: str, after: str, dropout: float) -> None:
    ours = [row | {"by": row["attention"]} for row in results("train_step-nvidia-h200") if row["recompute"] == "none"]
    theirs = [row | {"by": "nanoGPT", "extra": []} for row in results("nanogpt-nvidia-h200")["rows"]]
    found = {(row["by"], *row["extra"], row["shape"], row["dropout"]): row for row in (*ours, *theirs)}
    overrides = {
        "no dropout": [],
        "residual in bf16": ["training.residual_in_fp32=false"],
        "window of 1,024 in every other layer": [
            *("score=window", "score.window=1024", "score.layers=[{},{window:null}]")
        ],
        "documents kept apart": ["data.documents=mask"],
    }
    for row, column, cell in table(page, header, after):
        (shape, *of_row), (by, *of_column) = row.split(", "), column.split(", ")
        used = 0.0 if "no dropout" in of_row else dropout
        extra = [given for said in (*of_row, *of_column) for given in overrides[said]]
        measured = found.get((by, *extra, shape.replace(" x ", "x").replace(",", ""), used))
        if measured is None:
            assert cell == "", (row, column)
            continue
        if measured["status"] == "completed":
            expected = f"{measured['tokens_per_s'] / 1000:.0f} ({measured['peak_allocated_gib']:.1f})"
        else:
            expected = "out of memory"
        assert cell == expected, (row, column)


def test_losses_of_the_experiments() -> None:
    page, found = "docs/experiments.md", {run["name"]: run for run in results("experiments-nvidia-h200")["runs"]}
    for row, column, cell in table(page, "| `score=` |"):
        machine, _, attention = column.partition(", ")
        if machine == "H200":
            run = found[f"variants {row.strip('`')} {attention}"]
            assert cell == f"{run['val_loss']:.4f}", (row, column)
    for row, column, cell in table(page, "| `attention.ablate=` |"):
        machine, _, precision = column.partition(", ")
        left_out, _, shown = row.replace("`", "").partition(": ")
        if machine == "H200" and "times" not in shown:
            run = found[f"break_it {left_out} {precision}"]
            step = run.get("non_finite_step")
            assert cell == (str(step) if step else f"{run['val_loss']:.3f}"), (row, column)
    for attention, column, cell in table(page, "| thousand tokens/s | 256 |"):
        run = found.get(f"crossover {attention} {column.replace(',', '')}")
        if run is None or run["status"] != "completed":
            assert cell == (run["status"].replace("_", " ") if run else "not run"), (attention, column)
        else:
            assert cell == f"{run['median']['throughput/tokens_per_s'] / 1000:.0f}", (attention, column)
    lengths = [(kind, *cells) for kind in ("", "ALiBi ") for cells in table(page, f"| {kind}| tokens/s |")]
    for kind, row, column, cell in lengths:
        attention, length = row.removesuffix(" tokens").split(", ")
        run = found[f"context {kind}{attention} {length.replace(',', '')}"]
        if column == "tokens/s":
            expected = f"{run['median']['throughput/tokens_per_s'] / 1000:.0f},000"
        elif column == "GiB":
            expected = f"{run['peak']['memory/peak_allocated_gib']:.1f}"
        else:
            tokens = float(re.findall(r"[\d.]+", column)[0]) * 1e6
            losses = {step * 32_768: loss for step, loss, _ in run["val/loss"]}
            expected = f"{losses[min(losses, key=lambda seen: abs(seen - tokens))]:.3f}"
        assert cell == expected, (row, column)
    for row, column, cell in table(page, "| | s of training |"):
        run = found[f"equal time {row}"]
        in_windows = {f"{at['seq_len']:,}": f"{at['loss']:.3f}" for at in run["whole_validation"]}
        texts = {
            "s of training": f"{run['training_s']:.0f}",
            "million tokens": f"{run['tokens'] / 1e6:.1f}",
            "GiB": f"{run['peak']['memory/peak_allocated_gib']:.1f}",
        }
        length = column.removeprefix("validation loss in windows of ")
        assert cell == (texts[column] if column in texts else in_windows.get(length, "")), (row, column)


def test_the_comparison_of_optimizers() -> None:
    found = {run["name"]: run for run in results("experiments-nvidia-h200")["runs"]}
    losses = []
    for row, column, cell in table("docs/training-options.md", "| | validation loss |"):
        run = found[f"optimizer {row.strip('`').removeprefix('optimizer=')}"]
        texts = {
            "validation loss": f"{run['val_loss']:.3f}",
            "ms per step": f"{run['median']['throughput/step_ms']:.0f}",
            "GiB": f"{run['peak']['memory/peak_allocated_gib']:.1f}",
        }
        assert cell == texts[column], (row, column)
        if column == "validation loss":
            losses.append(f"{run['val_loss']:.2f}")
    assert f"validation loss {losses[1]}, AdamW's {losses[0]}" in (ROOT / "README.md").read_text()


def test_the_speed_of_long_context() -> None:
    runs = {run["name"]: run for run in results("experiments-nvidia-h200")["runs"]}

    def measured(name: str) -> tuple[float, str, str]:
        """The seconds of a run's second step, its speed and its memory, as the pages write them."""
        (_, first), (_, second) = runs[name]["elapsed_s"]
        memory = runs[name]["peak"]["memory/peak_allocated_gib"]
        return second - first, f"{round(524_288 / (second - first), -2):,.0f} tokens/s", f"{memory:.1f} GiB"

    seconds, rate, memory = measured("long_context flash")
    assert f"| {seconds:.0f} s per step of 524,288 tokens | {rate}, {memory} |" in words("README.md")
    assert f"{rate}, {seconds:.0f} s per step of 524,288 tokens, {memory} at the peak" in words("docs/experiments.md")
    on_two, rate, memory = measured("long_context flash on 2 GPUs")
    assert f"{rate}, {on_two:.0f} s per step, {memory} on each" in words("docs/experiments.md")
    assert f"takes {seconds:.1f} s, and {on_two:.1f} s on two" in words("docs/several-gpus.md")
    assert f"{rate} and {memory}" in words("docs/several-gpus.md")


def test_speeds_on_several_gpus() -> None:
    cases = {
        "GPT-2 124M, 32 x 1,024 tokens per GPU, dropout 0.1": ("speed", "exact"),
        "the same with `parallel.exact=false`": ("speed", "any order"),
        "GPT-2 124M, one sequence of 262,144 tokens": ("quarter", "heads"),
        "GPT-2 124M, one sequence of 524,288 tokens": ("half", "heads"),
        "GPT-2 124M, one sequence of 1,048,576 tokens": ("million", "heads"),
        "GPT-2 XL, 16 x 1,024 tokens per GPU, `parallel.data=shard`": ("xl", "exact"),
        "GPT-2 XL with `parallel.exact=false`": ("xl", "any order"),
        "GPT-2 XL with `parallel.reshard_after_forward=false`": ("xl", "exact, kept gathered"),
    }
    measured = {
        (row["kind"], row["name"], row["gpus"]): row
        for row in results("several-gpus-nvidia-h200")["rows"]
        if not row.get("compiles")  # such a time includes compiling
    }
    rate = {case: row["tokens_per_s"] for case, row in measured.items()}
    shown = set()
    for row, column, cell in table("docs/several-gpus.md", "| tokens/s | two H200s |"):
        (kind, name), gpus = cases[row], 4 if "four" in column else 2
        together, one = rate.get((kind, name, gpus)), rate.get((kind, "alone", gpus)) or rate.get((kind, name, 1))
        expected = ""
        if together and column.endswith("H200s"):
            expected = f"{float(f'{together:.{4 if together > 1e6 else 3}g}'):,.0f}"
        elif together and one:
            expected = f"{together / (gpus * one):.1%}".replace("%", " %")
        assert cell == expected, (row, column)
        shown.add(row)
    assert shown == {row for row, case in cases.items() if {(*case, 2), (*case, 4)} & set(measured)}
    rows = {(row["model"], row["kind"]): row for row in results("several-gpus-nvidia-h200")["rows"] if row["gpus"] == 2}
    for row, column, cell in table("docs/several-gpus.md", "| | tokens on two H200s |"):
        longest = rows["gpt2-xl", "xl-long"] if "XL" in row else rows["gpt2", "four"]
        cells = {
            "tokens on two H200s": f"{longest['seq_len']:,}",
            "a step": f"{longest['step_ms'] / 1e3:.0f} s: {longest['tokens_per_s']:,.0f} tokens/s",
            "per GPU": f"{longest['peak_allocated_gib']:.1f} GiB",
            "four would have": f"{2 * longest['seq_len']:,}",
        }
        assert longest["compiles"]
        assert cell == cells[column], (row, column)
    steps = {1: ("alone", 2), 2: ("exact", 2), 4: ("exact", 4)}
    ms = {gpus: f"{measured['speed', *case]['step_ms']:.0f}" for gpus, case in steps.items()}
    for page in ("README.md", "docs/several-gpus.md"):
        said = words(page)
        assert f"a step of 65,536 tokens takes {ms[2]} ms, and one GPU's 32,768 tokens take {ms[1]}" in said, page
        assert f"a step of 131,072 tokens took {ms[4]}" in said, page
    recipe = {row.get("gpus", 1): row["tokens_per_s"] for row in results("train_step-nvidia-h200-two-gpus")}
    two, one = (f"{round(recipe[gpus], -3):,.0f}" for gpus in (2, 1))
    assert f"gives {two} tokens/s, where one GPU gives {one}" in words("docs/several-gpus.md")
