"""The architectures of transformers that can express a model of this recipe, as tables: options, parts and names.

settings.py reads and writes config.json by them, loading.py and weights.py the tensors.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from model.options import Activation, AttentionBias, Norm, NormOver, NormPlace, NormScale, Positions

Names = dict[str, str | tuple[str, ...]]

# Options of model.* and their keys in config.json
KEYS = {
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "n_embd": "hidden_size",
    "head_dim": "head_dim",
    "mlp_width": "intermediate_size",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
}
PARTS: dict[str, Any] = {"positions": Positions.rotary, "norm": Norm.rms, "mlp": Activation.swiglu}
SILU: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu",)}

# Modules and theirs; a tuple: several matrices that are one here
NAMES: Names = {
    "wte": "model.embed_tokens",
    "h": "model.layers",
    "ln_f": "model.norm",
    "lm_head": "lm_head",
    "attn.c_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.c_proj": "self_attn.o_proj",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "mlp.c_gate": "mlp.gate_proj",
    "mlp.c_fc": "mlp.up_proj",
    "mlp.c_proj": "mlp.down_proj",
}
BEFORE: Names = NAMES | {"ln_1": "input_layernorm", "ln_2": "post_attention_layernorm"}
AFTER: Names = NAMES | {"ln_1_out": "post_attention_layernorm", "ln_2_out": "post_feedforward_layernorm"}
BOTH: Names = AFTER | {"ln_1": "input_layernorm", "ln_2": "pre_feedforward_layernorm"}
PLAIN_MLP: Names = {"mlp.c_fc": "mlp.c_fc", "mlp.c_proj": "mlp.c_proj"}
GPT2_NAMES: Names = {
    **{name: f"transformer.{name}" for name in ("wte", "wpe", "h", "ln_f")},
    **{name: name for name in ("lm_head", "ln_1", "ln_2", "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")},
}


@dataclass(frozen=True)
class Family:
    """An architecture.

    kind          its model_type in config.json
    architecture  its class in transformers
    names         modules of the model and theirs
    keys          options of model.* and their keys in config.json
    parts         options that all of its models share
    fixed         keys that change the computation, and the values that a model here supports, the files' default first
    defaults      of keys that files may leave out, as transformers' class has them
    biases        the keys for biases of all linear layers, or of attention's
    windows       whether sliding_window applies to all layers, or to the layers that layer_types names
    zeros         modules that always have a bias there: a model without writes zeros
    transposed    whether it stores the matrices of linear layers transposed
    """

    kind: str
    architecture: str
    names: Names = field(default_factory=lambda: BEFORE)
    keys: dict[str, str] = field(default_factory=lambda: KEYS)
    parts: dict[str, Any] = field(default_factory=lambda: PARTS)
    fixed: dict[str, tuple[Any, ...]] = field(default_factory=lambda: SILU)
    defaults: dict[str, Any] = field(default_factory=dict)
    biases: tuple[str, ...] = ()
    windows: str | None = None
    zeros: re.Pattern[str] | None = None
    transposed: bool = False

    def full_name(self, name: str) -> str:
        """The name that the architecture's class has for a tensor of a file: files of a base model leave out the first
        part, and torch.compile inserts one."""
        name, first = name.replace("_orig_mod.", ""), f"{self.names['h']}".split(".")[0] + "."
        return name if name.startswith((first, "lm_head.")) else first + name

    def stored(self, parameter: str) -> list[str]:
        """Their names of a parameter's parts, such as h.0.attn.c_attn.weight's. Raises KeyError for an unknown one."""
        layer, module, leaf = re.fullmatch(r"(?:h\.(\d+)\.)?(.+)\.(\w+)", parameter).groups()  # type: ignore[union-attr]
        names = self.names[module]
        before = "" if layer is None else f"{self.names['h']}.{layer}."
        return [f"{before}{name}.{leaf}" for name in ([names] if isinstance(names, str) else names)]


# Values that transformers' classes take for keys that files leave out
EPS, WINDOW = {"rms_norm_eps": 1e-6}, {"sliding_window": 4096}
LLAMA = Family("llama", "LlamaForCausalLM", biases=("attention_bias", "mlp_bias"), defaults=EPS)
FAMILIES = {
    family.kind: family
    for family in (
        Family(
            "gpt2",
            "GPT2LMHeadModel",
            GPT2_NAMES,
            {
                "n_layers": "n_layer",
                "n_heads": "n_head",
                "n_embd": "n_embd",
                "mlp_width": "n_inner",
                "vocab_size": "vocab_size",
                "norm_eps": "layer_norm_epsilon",
                "tied": "tie_word_embeddings",
            },
            {"bias": True},
            {
                "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
                "scale_attn_weights": (True,),
                "scale_attn_by_inverse_layer_idx": (False,),
                "add_cross_attention": (False,),
            },
            {"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50257, "layer_norm_epsilon": 1e-5}
            | {"n_positions": 1024, "tie_word_embeddings": True},
            zeros=re.compile(r"^(?!lm_head)"),
            transposed=True,
        ),
        LLAMA,
        Family("mistral", "MistralForCausalLM", windows="all", defaults=EPS | WINDOW | {"num_key_value_heads": 8}),
        Family(
            "qwen2",
            "Qwen2ForCausalLM",
            parts=PARTS | {"attention_bias": AttentionBias.inputs},
            windows="types",
            defaults=EPS | WINDOW | {"num_key_value_heads": 32},
        ),
        Family(
            "qwen3",
            "Qwen3ForCausalLM",
            parts=PARTS | {"qk_norm": True},
            biases=("attention_bias",),
            windows="types",
            defaults=EPS | WINDOW | {"num_key_value_heads": 32, "head_dim": 128},
        ),
        Family(
            "gemma2",
            "Gemma2ForCausalLM",
            BOTH,
            KEYS | {"scale_dim": "query_pre_attn_scalar", "logit_cap": "final_logit_softcapping"},
            PARTS
            | {
                "mlp": Activation.geglu,
                "norm_place": NormPlace.both,
                "norm_scale": NormScale.plus_one,
                "embed_scale": True,
            },
            {"hidden_activation": ("gelu_pytorch_tanh",), "use_bidirectional_attention": (None, False)},
            EPS
            | WINDOW
            | {"num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True, "query_pre_attn_scalar": 256}
            | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
            biases=("attention_bias",),
            windows="types",
        ),
        Family(
            "olmo2",
            "Olmo2ForCausalLM",
            AFTER,
            parts=PARTS | {"norm_place": NormPlace.after, "qk_norm": True, "qk_norm_over": NormOver.width},
            biases=("attention_bias",),
            defaults={"rms_norm_eps": 1e-5},
        ),
        Family(
            "starcoder2",
            "Starcoder2ForCausalLM",
            BEFORE | PLAIN_MLP,
            KEYS | {"norm_eps": "norm_epsilon"},
            {"positions": Positions.rotary},
            {"hidden_act": ("gelu_pytorch_tanh",)},
            {"tie_word_embeddings": True, "norm_epsilon": 1e-5, "use_bias": True, "num_key_value_heads": 2},
            biases=("use_bias",),
            windows="all",
            zeros=re.compile(r"norm"),
        ),
    )
}
