"""The RMS norm and the rotation of queries or keys in one pass, and their gradient in another, in Triton.

A program has some tokens. It reads their cosines and sines once, and then one head after the other. The gradient of the
norm's weights is added up in each program and then over the programs, always in the same order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PAIRS = tl.constexpr(1024)  # channel pairs of one head that a program has, eight for each of its threads
WARPS = 4


@triton.jit
def load_pairs(p_x, HALF: tl.constexpr):
    """The first and the second channels of pairs, in fp32."""
    return tl.load(p_x).to(tl.float32), tl.load(p_x + HALF).to(tl.float32)


@triton.jit
def load_weights(p_w, o_d, HALF: tl.constexpr):
    """The norm's weights of each pair's channels; 1 where there are none."""
    if p_w is None:
        b_w1 = tl.full(o_d.shape, 1.0, tl.float32)
        b_w2 = b_w1
    else:
        b_w1, b_w2 = load_pairs(p_w + o_d, HALF)
    return b_w1, b_w2


@triton.jit
def normalised(b_x1, b_x2, eps, HALF: tl.constexpr):
    """Pairs (tokens, HALF) over their root mean square, and its inverse (tokens, 1)."""
    b_r = tl.rsqrt(tl.sum(b_x1 * b_x1 + b_x2 * b_x2, axis=1) * (0.5 / HALF) + eps)[:, None]
    return b_x1 * b_r, b_x2 * b_r, b_r


@triton.jit
def rotate_kernel(p_x, p_w, p_cos, p_sin, p_y, stride, period, eps, H: tl.constexpr, HALF: tl.constexpr):
    """y of PAIRS / HALF tokens. Grid: tokens over that."""
    o_n = tl.program_id(0) * (PAIRS // HALF) + tl.arange(0, PAIRS // HALF)[:, None]
    o_d = tl.arange(0, HALF)[None, :]
    b_cos, b_sin = tl.load(p_cos + o_n % period * HALF + o_d), tl.load(p_sin + o_n % period * HALF + o_d)
    b_w1, b_w2 = load_weights(p_w, o_d, HALF)
    p_x += o_n.to(tl.int64) * stride + o_d
    p_y += o_n.to(tl.int64) * (H * 2 * HALF) + o_d
    for h in range(H):
        b_x1, b_x2 = load_pairs(p_x + h * 2 * HALF, HALF)
        b_x1, b_x2, _ = normalised(b_x1, b_x2, eps, HALF)
        b_x1, b_x2 = b_x1 * b_w1, b_x2 * b_w2
        tl.store(p_y + h * 2 * HALF, (b_x1 * b_cos - b_x2 * b_sin).to(p_y.dtype.element_ty))
        tl.store(p_y + h * 2 * HALF + HALF, (b_x2 * b_cos + b_x1 * b_sin).to(p_y.dtype.element_ty))


@triton.jit
def rotate_gradient_kernel(
    p_dy, p_x, p_w, p_cos, p_sin, p_dx, p_dw, stride, period, eps, H: tl.constexpr, HALF: tl.constexpr
):
    """dx of PAIRS / HALF tokens, and their part of dw, a row of p_dw. Grid: tokens over that."""
    o_n = tl.program_id(0) * (PAIRS // HALF) + tl.arange(0, PAIRS // HALF)[:, None]
    o_d = tl.arange(0, HALF)[None, :]
    b_cos, b_sin = tl.load(p_cos + o_n % period * HALF + o_d), tl.load(p_sin + o_n % period * HALF + o_d)
    b_w1, b_w2 = load_weights(p_w, o_d, HALF)
    p_x += o_n.to(tl.int64) * stride + o_d
    o_y = o_n.to(tl.int64) * (H * 2 * HALF) + o_d
    b_dw1, b_dw2 = tl.zeros_like(b_cos), tl.zeros_like(b_cos)
    for h in range(H):
        b_x1, b_x2 = load_pairs(p_x + h * 2 * HALF, HALF)
        b_dy1, b_dy2 = load_pairs(p_dy + o_y + h * 2 * HALF, HALF)
        b_x1, b_x2, b_r = normalised(b_x1, b_x2, eps, HALF)
        b_d1, b_d2 = b_dy1 * b_cos + b_dy2 * b_sin, b_dy2 * b_cos - b_dy1 * b_sin
        b_dw1 += b_d1 * b_x1
        b_dw2 += b_d2 * b_x2
        b_d1, b_d2 = b_d1 * b_w1, b_d2 * b_w2
        b_mean = tl.sum(b_d1 * b_x1 + b_d2 * b_x2, axis=1)[:, None] * (0.5 / HALF)
        p_dx1 = p_dx + o_y + h * 2 * HALF
        tl.store(p_dx1, ((b_d1 - b_x1 * b_mean) * b_r).to(p_dx.dtype.element_ty))
        tl.store(p_dx1 + HALF, ((b_d2 - b_x2 * b_mean) * b_r).to(p_dx.dtype.element_ty))
    if p_dw is not None:
        p_dw += tl.program_id(0) * 2 * HALF + tl.arange(0, HALF)
        tl.store(p_dw, tl.sum(b_dw1, axis=0))
        tl.store(p_dw + HALF, tl.sum(b_dw2, axis=0))


def launch_rotate(x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Queries or keys (B, T, H, D), contiguous, of x with heads of any stride between tokens.

    weight    (D,) of the norm in fp32; None: 1
    cos, sin  (T, D / 2) or (B, T, D / 2) in fp32
    """
    x = with_dense_heads(x)
    (B, T, H, D), y = x.shape, torch.empty(x.shape, dtype=x.dtype, device=x.device)
    cos, sin = cos.contiguous(), sin.contiguous()
    with torch.cuda.device_of(x):
        rotate_kernel[(B * T * D // (2 * PAIRS.value),)](
            x,
            weight,
            cos,
            sin,
            y,
            x.stride(1),
            cos.numel() // (D // 2),
            eps,
            H,
            D // 2,
            num_warps=WARPS,
            enable_fp_fusion=True,
        )
    return y


def launch_rotate_gradient(
    dy: Tensor, x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """dx (B, T, H, D), contiguous, and the weight's gradient (D,) in fp32, which is empty where there is no weight."""
    x, dy = with_dense_heads(x), dy.contiguous()
    (B, T, H, D), dx = x.shape, torch.empty_like(dy)
    cos, sin = cos.contiguous(), sin.contiguous()
    programs = B * T * D // (2 * PAIRS.value)
    parts = None if weight is None else torch.empty(programs, D, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        rotate_gradient_kernel[(programs,)](
            dy,
            x,
            weight,
            cos,
            sin,
            dx,
            parts,
            x.stride(1),
            cos.numel() // (D // 2),
            eps,
            H,
            D // 2,
            num_warps=WARPS,
            enable_fp_fusion=True,
        )
    return dx, torch.empty(0, device=x.device) if parts is None else parts.sum(0)


def with_dense_heads(x: Tensor) -> Tensor:
    """x (B, T, H, D) itself where a token's heads follow each other and all tokens have one stride, else a copy."""
    stride = x.stride(1)
    return x if x.stride() == (x.shape[1] * stride, stride, x.shape[-1], 1) else x.contiguous()
