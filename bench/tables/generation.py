"""Generating text: docs/decoding.md."""

from __future__ import annotations

from bench.markdown import table
from bench.tables.blocks import Rows, block


@block("generate", "generate", "cpu:generate", "h100:llama")
def generate(gpu: Rows, cpu: Rows, llama: Rows) -> str:
    """Tokens/s of this project and of transformers."""
    on_gpu = {(row["case"], row["by"]): f"{row['tokens_per_s']:,.0f}" for row in gpu}
    on_cpu = {row["by"]: f"{row['tokens_per_s']:.1f}" for row in cpu}
    one = "H200, one prompt, 512 tokens"
    lines = [
        [one, on_gpu["one", "this project"], ""],
        [f"{one}, sampled", on_gpu["one", "this project, sampled"], ""],
        [f"{one}, compiled", on_gpu["one", "this project, compiled"],
         f"{on_gpu['one', 'transformers, static cache, compiled']} (static cache)"],
        [f"{one}, compiled, sampled", on_gpu["one", "this project, compiled, sampled"], ""],
        ["H200, 256 prompts, 256 tokens each", on_gpu["many", "this project, 256 slots"],
         f"{on_gpu['many', 'transformers, padded batch']} (padded batch, 128 tokens each)"],
        *(
            [f"H100, llama-1b, one prompt, 512 tokens, compiled: {row['share_of_bound']:.0%} of the bandwidth's bound",
             f"{row['tokens_per_s']:,.0f}", ""]
            for row in llama
            if row["case"] == "decode"
        ),
        ["2 CPU cores, one prompt, 60 tokens, fp32", on_cpu["this project"], f"{on_cpu['transformers']} (cache)"],
    ]  # fmt: skip
    return table(["tokens/s", "this project", "transformers"], lines)
