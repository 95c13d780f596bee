"""Random formulas against fp64 autograd: python -m tests.attention.random_formulas --cases 300 --implementation flash

Each case draws a formula, its learned tensors, a layout (grouped heads, T != S, documents, windows), dropout, sinks and
a precision. Out and all gradients must be within the errors that `assert_right` allows. Without a GPU the kernels run
in Triton's interpreter. Case 17 of a seed is the same in every run: `--seed 0 --first 17 --cases 1`.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import sys
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from attention import AttentionConfig, build_attention
from attention.check.run import interpreting
from tests.attention.formulas import KINDS, Problem, assert_right, draw

CONFIGS = {
    "naive": AttentionConfig("naive"),
    "tiled": AttentionConfig("tiled", block_q=32, block_k=32),
    "flash": AttentionConfig("flash"),
    "flex": AttentionConfig("flex"),  # has no dropout, and on a CPU no backward
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

# Functions of s: {s} is the score or another of them, {a} an entry of a tensor.
OF_SCORE = [
    "{s}",
    "{s}",
    "0.7 * {s}",
    "{s} * log(n + 1)",
    "(1 + 0.3 * {a}) * {s}",
    "2 * tanh({s} / 2)",
    "({s} + sin({s}))",
    "({s} + {a} * tanh({s}))",
    "{s} * sigmoid({s})",
    "{s} / (1 + {s} ** 2 / 9)",
    "where(i - j < 9, {s}, {a} * {s})",
    "{s} * (1 + 0.5 * sin(0.3 * (i - j)))",
]
# Terms added to it.
TERMS = [
    "{a}",
    "{a} * {a}",
    "tanh({a})",
    "log(sigmoid({a}))",
    "0.05 * {a} * (i - j)",
    "0.3 * {a} * log(abs(i - j) + 1)",
    "where((i - j) % 3 == 0, {a}, 0.5)",
    "max({a}, 0.1 * {a})",
    "exp(-abs(i - j) / 9) * {a}",
    "{a} / sqrt(n)",
]
CAUSAL_TERMS = ["{a} / (i - j + 1)", "0.3 * {a} * sqrt(i - j)"]
# The indices of an entry, with the size of each axis in letters: sequences, heads, positions, or a number.
ENTRIES = {
    "": "",
    "[h]": "H",
    "[h, i]": "HL",
    "[h, j]": "HL",
    "[j, h]": "LH",
    "[i]": "L",
    "[h, i, j]": "HLL",
    "[j, i]": "LL",
    "[b, h, j]": "BHL",
    "[h, min(abs(i - j), 15)]": "HK",
    "[min(abs(i - j) // 4, 15), h]": "KH",
    "[h, min(floor(3 * log(abs(i - j) + 1)), 15)]": "HK",
    "[b, min(abs(i // 3 - j // 3), 15)]": "BK",
}
MOST_TENSORS = 6


class Case(NamedTuple):
    """A problem, with values from `seed`.

    parts    summands of the formula, of which the first contains s
    entries  the indices of each tensor, by its name
    """

    parts: tuple[str, ...]
    entries: dict[str, str]
    kind: str
    dtype: torch.dtype
    longest: int
    seed: int

    @property
    def text(self) -> str:
        """The formula."""
        return " + ".join(self.parts)

    def tensors(self, B: int, H: int, L: int) -> dict[str, Tensor]:
        """Random values for the formula's tensors."""
        sizes = {"B": B, "H": H, "L": L, "K": 16}
        used = {name: axes for name, axes in self.entries.items() if name in self.text}
        return {name: 0.5 * torch.randn([sizes[letter] for letter in ENTRIES[axes]]) for name, axes in used.items()}

    def problem(self, implementation: str) -> Problem:
        """What an implementation computes; flex has no dropout, and takes no sinks beside a formula."""
        problem = draw(random.Random(self.seed), self.text, self.kind, self.longest, tensors=self.tensors)
        if implementation == "flex":
            score = replace(problem.score, sinks=False)
            problem = replace(problem, dropout=0.0, sinks=None, score=score)
        return problem

    def failure(self, implementation: str) -> str | None:
        """What is wrong with an implementation's results; None where nothing is."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            problem = self.problem(implementation)
            attend = build_attention(replace(CONFIGS[implementation], dropout=problem.dropout))
            with interpreting():
                assert_right(problem, attend, self.dtype, backward=implementation != "flex", device=device)
        except Exception as error:  # a refusal or a crash is a failure as well
            return f"{type(error).__name__}: {error}"
        return None

    def __str__(self) -> str:
        return f"{self.text!r}, {self.kind}, {str(self.dtype).removeprefix('torch.')}"


def random_case(seed: int, number: int, longest: int = 70) -> Case:
    """A case of at most `longest` queries."""
    rng = random.Random(f"{seed} {number}")
    kind = rng.choice(KINDS)
    entries: dict[str, str] = {}

    def filled(template: str) -> str:
        while "{a}" in template:
            known = list(entries)
            name = rng.choice(known) if len(known) == MOST_TENSORS else f"x{len(known)}"
            entries.setdefault(name, rng.choice(list(ENTRIES)))
            template = template.replace("{a}", name + entries[name], 1)
        return template

    score = filled(rng.choice(OF_SCORE)).replace("{s}", f"({filled(rng.choice(OF_SCORE)).replace('{s}', 's')})")
    terms = TERMS if kind == "full" else TERMS + CAUSAL_TERMS
    drawn = [filled(rng.choice(terms)) for _ in range(rng.choice([0, 1, 1, 2]))]
    # A term of the row alone cancels in the softmax: its gradient is 0, and an error relative to 0 has no bound.
    parts = (score, *(term if re.search(r"\bj\b", term) else f"{term} * tanh(s)" for term in drawn))
    return Case(parts, entries, kind, rng.choice(DTYPES), longest, rng.randrange(2**31))


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status, 1 where a case fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.attention.random_formulas", description=__doc__)
    parser.add_argument("--implementation", choices=CONFIGS, default="tiled")
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=int, default=70, help="the most queries of a case, at least 19")
    args = parser.parse_args(arguments)
    failed = 0
    for number in range(args.first, args.first + args.cases):
        case = random_case(args.seed, number, args.longest)
        if complaint := case.failure(args.implementation):
            failed += 1
            print(f"case {number} of seed {args.seed} fails: {case}\n  {complaint}", flush=True)
    print(f"{args.implementation}: {args.cases - failed} of {args.cases} cases are right")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
