"""Launches of the kernels of the cache, of the model and of the exchange between GPUs."""

from collections.abc import Iterator
from functools import partial

import torch

from attention import Cache, Score
from attention.decode import write_kernel
from attention.flash.decode import present, run_decode
from attention.spec import Spec
from bench.kernels.compiler import Launch
from bench.kernels.plain import EVERYTHING
from model.dropout_kernel import launch_draw_bits
from model.norm_kernel import launch_add_norm, launch_add_norm_gradient
from model.rotation_kernel import launch_rotate, launch_rotate_gradient
from model.softmax_kernel import launch_softmax_gradient
from recipe.distributed.pairwise_kernel import launch_add_pairwise

# architecture -> dtypes and page sizes of caches; None: contiguous
CACHES = {
    80: ((torch.bfloat16, 16), (torch.float32, 256)),
    90: ((torch.bfloat16, None), (torch.bfloat16, 16)),
}
B, H, H_KV, T, D, CAPACITY = 2, 8, 2, 3, 128, 4096


def launches(architecture: int) -> Iterator[Launch]:
    """Those of an architecture."""
    for dtype, page in CACHES[architecture]:
        kind = f"{str(dtype).removeprefix('torch.')}-{f'pages-of-{page}' if page else 'contiguous'}"
        yield Launch(f"cache/sm{architecture}/{kind}", partial(append_and_attend, dtype, page))
    key, logits = torch.zeros(7, dtype=torch.int64), torch.empty(16, 50304, dtype=torch.bfloat16)
    targets = torch.zeros(16, dtype=torch.int64)
    yield Launch(f"model/sm{architecture}/dropout", lambda: launch_draw_bits(key, 26, 4, 2, 1024, 768))
    yield Launch(f"model/sm{architecture}/loss", lambda: launch_softmax_gradient(logits, targets, 50257))
    yield Launch(
        f"model/sm{architecture}/loss-of-capped-logits",
        lambda: launch_softmax_gradient(logits, targets, 50257, cap=30.0),
    )
    q = torch.empty(2, 64, 24, 64, dtype=torch.bfloat16)[:, :, :16]
    dy = torch.empty(2, 64, 16, 64, dtype=torch.bfloat16)
    arguments = torch.empty(64), torch.empty(64, 32), torch.empty(64, 32), 1e-6
    yield Launch(f"model/sm{architecture}/rotation", lambda: launch_rotate(q, *arguments))
    yield Launch(f"model/sm{architecture}/rotation-gradient", lambda: launch_rotate_gradient(dy, q, *arguments))
    x, out, bits = torch.empty(2, 64, 768), q.new_empty(2, 64, 768), torch.empty(2, 64, 96, dtype=torch.uint8)
    weight, stats = torch.empty(768), torch.empty(128, 2)
    yield Launch(
        f"model/sm{architecture}/add-norm", lambda: launch_add_norm(x, out, bits, 1.1, weight, None, 1e-5, True)
    )
    yield Launch(
        f"model/sm{architecture}/add-norm-gradient",
        lambda: launch_add_norm_gradient(x, out, x, stats, bits, 1.1, weight, 1),
    )
    for dtype in (torch.bfloat16, torch.float32):
        yield Launch(
            f"exchange/sm{architecture}/sum-{str(dtype).split('.')[1]}",
            partial(launch_add_pairwise, torch.empty(4, 2**20, dtype=dtype), torch.empty(2**20)),
        )


def append_and_attend(dtype: torch.dtype, page: int | None) -> None:
    """Append three tokens to a cache and attend to it: paged with every score option, or contiguous with none."""
    pages = None if page is None else torch.zeros(B, CAPACITY // page, dtype=torch.int32)
    k = torch.empty(B if page is None else B * CAPACITY // page, H_KV, page or CAPACITY, D, dtype=dtype)
    cache = Cache(k, k.clone(), torch.zeros(B, dtype=torch.int32), pages)
    q, new = torch.empty(B, H, T, D, dtype=dtype), torch.empty(B, H_KV, T, D, dtype=dtype)
    write_kernel.write(*cache, new, new, None if page is None else torch.zeros(B + 1, dtype=torch.int64))
    per_head = [] if page is None else [torch.zeros(H)] * 2
    run_decode(q, present(cache), per_head, Spec(Score() if page is None else EVERYTHING, scale=0.125))
