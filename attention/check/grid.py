"""All cases of a check, in groups. Each group varies one property."""

import random
from dataclasses import replace
from typing import Any

from .cases import MEMORY, PATTERNS, Case

# Around multiples of common tile sizes: 16, 32, 48, 64, 80, 96, 128, 192, 256.
EDGES = tuple(n + d for n in (48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256) for d in (-1, 0, 1))
LENGTHS: tuple[int, ...] = (*range(1, 47), *EDGES, 320, 383, 384, 448, 511, 512, 513, 769, 1025)
HEAD_SIZES = (
    *(n + d for n in (2, 5, 8, 16, 32, 48, 64, 96, 128, 192) for d in (-1, 0, 1)),
    *(12, 24, 40, 72, 80, 112, 160, 224, 255, 256),
)
HEADS = (
    (1, 1, 1),
    (2, 3, 3),
    (1, 4, 2),
    (2, 6, 3),
    (3, 8, 1),
    (1, 5, 1),
    (1, 16, 4),
    (5, 2, 2),
    (1, 17, 17),
    (1, 40, 8),
    (1, 48, 2),
    (7, 2, 1),
)
UNEQUAL: tuple[tuple[int, int], ...] = (
    (1, 2),
    (1, 33),
    (1, 64),
    (1, 65),
    (1, 257),
    (2, 130),
    (16, 17),
    (31, 64),
    (33, 129),
    (64, 65),
    (65, 192),
    (1, 1030),
)
UNEQUAL += ((2, 1), (65, 64), (130, 3), (97, 33), (129, 1))
WINDOWS = (1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 96, 100)
DOCUMENTS: tuple[tuple[int, ...], ...] = (
    (1, 1, 1),
    (16, 16, 32),
    (15, 1, 48),
    (17, 15, 33),
    (1, 63, 1),
    (64, 64),
    (63, 66),
    (100,),
    (5, 7, 3, 90),
)
DOCUMENTS += ((33, 1, 1, 1, 61), (128, 1), (40, 40, 40))

# T and S of calls whose scores are shifted, and what else is changed.
SHIFTED: tuple[tuple[int, int, dict[str, Any]], ...] = (
    *((T, T, {}) for T in (64, 65, 129)),
    *((T, S, {"mask": True}) for T, S in ((65, 65), (192, 192), (1, 128))),
    *((1, S, {}) for S in (128, 321)),
    (192, 192, {"causal": False}),
    (129, 129, {"window": 33}),
    (64, 64, {"rows": "tilted"}),
)


def groups(seed: int) -> dict[str, list[Case]]:
    """name -> cases. Inputs, and the cases of `combined`, differ from seed to seed."""
    draws = random.Random(seed)
    single = {
        "lengths": [Case(T=n, S=n, H=2, H_kv=1 + n % 2, causal=n % 3 > 0) for n in LENGTHS],
        "head sizes": [
            Case(T=37, S=37, D=n, B=1 + n // 256, H=2, H_kv=1 + n % 2, causal=n % 3 > 0) for n in HEAD_SIZES
        ],
        "batch and heads": [
            Case(T=33, S=33, B=B, H=H, H_kv=H_kv, causal=causal) for B, H, H_kv in HEADS for causal in (True, False)
        ],
        "queries other than keys": [
            Case(T=T, S=S, causal=causal, top_left=top_left)
            for T, S in UNEQUAL
            for causal, top_left in ((True, False), (True, True), (False, False))
        ],
        "scale": [Case(scale=scale, D=D) for scale in (0.03, 1.0) for D in (16, 40)],
        "negative scale": [Case(T=T, S=T, scale=-0.25, D=D) for T in (33, 64) for D in (16, 40)],
        "scores": [
            Case(T=T, S=T, D=D, spread=spread, trend=trend, causal=causal)
            for spread, trend in (
                *((spread, "none") for spread in (0.001, 0.1, 5.0, 30.0, 1000.0)),
                *((1.0, trend) for trend in ("rising", "jumping")),
                (10.0, "rising"),
            )
            for T, D, causal in ((70, 16, True), (200, 32, False))
        ]
        + [Case(T=T, S=T, D=32, rows="some zero", causal=causal) for T, causal in ((70, True), (130, False))],
        "shifts": [
            Case(T=T, S=S, D=64, H_kv=1, shift=shift, **options)
            for shift in (-600.0, -120.0, -30.0, 120.0, 600.0)
            for T, S, options in SHIFTED
        ],
        "large and tiny values": [
            Case(T=T, S=T, D=32, size=size) for size in (1e-5, 1e-3, 30.0, 100.0) for T in (50, 130)
        ],
        "memory": [
            Case(T=T, S=T, B=2, H=4, H_kv=2, D=D, memory=memory)
            for memory in MEMORY
            if memory != "contiguous"
            for T, D in ((33, 8), (65, 64))
        ],
        "masks": [
            Case(T=T, S=S, B=2, H=3, H_kv=1, causal=causal and pattern != "prefix", pattern=pattern)
            for pattern in PATTERNS
            if pattern != "all"
            for T, S, causal in ((65, 65, True), (64, 192, True), (200, 130, False), (1, 129, True))
        ],
        "window": [
            Case(T=T, S=S, window=w, H_kv=1 + w % 2)
            for w in WINDOWS
            for T, S in ((97, 97), (1, 97), (30, 97) if w % 2 else (130, 130))
        ]
        + [Case(T=T, S=T, window=w) for T in (64, 192) for w in (9, 64, 100, T)],
        "documents": [
            Case(T=sum(lengths), S=sum(lengths), documents=lengths, causal=causal, B=B)
            for lengths in DOCUMENTS
            for causal in (True, False)
            for B in (1, 3)
        ]
        + [
            Case(T=sum(lengths), S=sum(lengths), documents=lengths, window=w, B=2)
            for lengths in ((40, 40, 40), (64, 128), (5, 7, 90))
            for w in (1, 17, 48)
        ],
        "soft cap": [
            Case(T=T, S=T, soft_cap=cap, spread=spread)
            for cap, spread in ((0.5, 1.0), (5.0, 1.0), (5.0, 10.0), (30.0, 30.0), (50.0, 1.0))
            for T in (33, 129)
        ],
        "ALiBi": [
            Case(T=T, S=S, H=H, H_kv=1, alibi=True)
            for H in (1, 3, 8, 12)
            for T, S in ((65, 65), (1, 130), (20, 130), (260, 260))
        ],
        "sinks": [
            Case(T=T, S=S, H=H, H_kv=1, sinks=True, spread=spread)
            for H, spread in ((1, 1.0), (4, 1.0), (4, 10.0))
            for T, S in ((1, 1), (65, 65), (20, 130), (130, 130), (70, 33))
        ]
        + [Case(T=T, S=T, D=64, H=4, H_kv=1, sinks=True, shift=-120.0) for T in (33, 64)],
        "bias": [
            Case(T=T, S=S, H=H, H_kv=H, bias=True, causal=causal)
            for T, S, H in ((33, 33, 2), (65, 130, 2), (129, 129, 1))
            for causal in (True, False)
        ],
        "combined": [random_case(draws) for _ in range(150)],
    }
    return {name: [replace(case, seed=1000 * seed + n) for n, case in enumerate(its)] for name, its in single.items()}


def random_case(draws: random.Random) -> Case:
    """A case with random sizes and features, some of which an implementation may lack."""
    H_kv = draws.choice((1, 1, 2, 3))
    T = draws.choice((draws.randint(1, 40), draws.randint(1, 300)))
    case = Case(
        T=T,
        S=T,
        D=draws.choice((8, 16, 32, 64, draws.randint(1, 80))),
        B=draws.choice((1, 1, 2)),
        H=H_kv * draws.choice((1, 1, 2, 4)),
        H_kv=H_kv,
        causal=draws.random() < 0.8,
        soft_cap=draws.choice((None, None, 5.0, 20.0)),
        sinks=draws.random() < 0.25,
        spread=draws.choice((1.0, 1.0, 4.0)),
        memory=draws.choice((*["contiguous"] * 4, *MEMORY)),
    )
    if draws.random() < 0.2:
        first = draws.randint(0, T)
        lengths = tuple(n for n in (first, (T - first) // 3, T - first - (T - first) // 3) if n)
        window = draws.choice((None, None, draws.randint(1, 100))) if case.causal else None
        return replace(case, documents=lengths, window=window)
    if draws.random() < 0.3:
        case = replace(case, S=draws.randint(1, 300))
    if case.causal:
        case = replace(case, window=draws.choice((None, None, draws.randint(1, 100))), alibi=draws.random() < 0.25)
    return case
