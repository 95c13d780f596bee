"""A toy Llama as transformers writes it, with a tokenizer that has a chat template, and conversations for it."""

from pathlib import Path

import tokenizers
import torch
import transformers

SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
# In the form of Llama 2's, Llama 3's and ChatML's. {% generation %} is for transformers' mark of the answers alone.
TEMPLATES = {
    "llama2": "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] | trim + "
    "' [/INST]' }}{% elif m['role'] == 'assistant' %}{% generation %}{{ ' ' + m['content'] + eos_token }}"
    "{% endgeneration %}{% else %}{{ raise_exception('no role ' + m['role']) }}{% endif %}{% endfor %}",
    "llama3": "{{- bos_token }}\n{%- for m in messages %}\n{{- '<|' + m['role'] + '|>\n\n' }}\n"
    "{%- if m['role'] == 'assistant' %}{% generation %}{{ m['content'] | trim + eos_token }}{% endgeneration %}\n"
    "{%- else %}{{ m['content'] | trim + eos_token }}{% endif %}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|assistant|>\n\n' }}\n{%- endif %}",
    "chatml": "{% for m in messages %}{{ '<|' + m['role'] + '|>' + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + eos_token + '\n' }}{% endgeneration %}{% else %}"
    "{{ m['content'] + eos_token + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
}


def conversation(*texts: str) -> dict[str, list[dict[str, str]]]:
    """A line: the user's text, the assistant's, and so on."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]}


def conversations(count: int) -> list[dict[str, list[dict[str, str]]]]:
    """Conversations about sums, of one or two turns and of different lengths."""
    lines = []
    for n in range(count):
        turns = [f"What is {n} + {n % 7}?", f"It is {n + n % 7}." + " Yes." * (n % 5)]
        lines.append(conversation(*turns, *(["Déjà vu 木?", "No."] if n % 3 == 0 else [])))
    return lines


def tokenizer(template: str | None = "llama3") -> transformers.PreTrainedTokenizerFast:
    """Bytes and some merges of English, with special tokens."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, show_progress=False, special_tokens=SPECIAL
    )
    model.train_from_iterator(["What is it? It is what it is. Yes. No."] * 4, trainer)
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=model, **names)
    made.chat_template = None if template is None else TEMPLATES[template]
    return made


def write_folder(folder: Path, template: str | None = "llama3") -> Path:
    """The folder of a model with two layers of 32 channels and 128 positions."""
    of = tokenizer(template)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        "llama",
        vocab_size=len(of),
        hidden_size=32,
        intermediate_size=88,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.1,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    of.save_pretrained(folder)
    return folder
