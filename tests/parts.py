"""Models with many parts at once, for tests of code that has to support every part."""

from __future__ import annotations

from model.options import (
    Activation,
    AttentionBias,
    Gate,
    GPTConfig,
    Norm,
    NormOver,
    NormPlace,
    NormScale,
    Positions,
    RopeScaling,
    Scaling,
)

LLAMA = GPTConfig(
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    n_embd=32,
    norm=Norm.rms,
    mlp=Activation.swiglu,
    mlp_width=88,
    positions=Positions.rotary,
    rope_base=500_000.0,
    rope_scaling=RopeScaling(Scaling.llama3, 8.0, original=8),
    tied=False,
)
GEMMA = GPTConfig(
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    n_embd=24,
    head_dim=8,
    norm=Norm.rms,
    norm_place=NormPlace.both,
    norm_scale=NormScale.plus_one,
    mlp=Activation.geglu,
    positions=Positions.rotary,
    scale_dim=5,
    embed_scale=True,
    logit_cap=3.0,
)
# Every part that these two leave out.
EVERYTHING = GPTConfig(
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    n_embd=24,
    head_dim=8,
    attention_bias=AttentionBias.all,
    norm=Norm.rms,
    norm_place=NormPlace.after,
    norm_scale=NormScale.none,
    mlp=Activation.relu2,
    positions=Positions.rotary,
    rope_fraction=0.5,
    rope_layers=[True, False],
    rope_scaling=RopeScaling(Scaling.yarn, 4.0, original=16),
    qk_norm=True,
    qk_norm_over=NormOver.width,
    gate=Gate.element,
    value_residual=True,
    value_embeddings=1,
    embed_norm=True,
    tied=False,
    mtp=0.3,
)
PARTS = {"llama": LLAMA, "gemma": GEMMA, "everything": EVERYTHING}
