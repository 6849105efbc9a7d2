"""Random models of Transformers for tests: one or more of every family, in shapes that show faults.

6 heads, 2 key heads, 16 dimensions a head beside a hidden size of 48, norms away from one and
biases away from zero, windows far shorter than 400 positions. Needs Transformers and PyTorch.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from linnet.testing.text import f0_text
from linnet.weights.safetensors import write_text

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
POSITIONS = 512
KIN: dict[str, Any] = {
    "vocab_size": 136,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 80,
    "max_position_embeddings": POSITIONS,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
QWEN: dict[str, Any] = {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 1}
GEMMA: dict[str, Any] = {
    "num_hidden_layers": 7,
    "sliding_window": 32,
    "query_pre_attn_scalar": 16,
    "tie_word_embeddings": True,
}
GEMMA_ROPES: dict[str, Any] = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
GPT2: dict[str, Any] = {
    "vocab_size": 136,
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 6,
    "n_inner": 80,
    "n_positions": POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "mistral": ("Mistral", KIN | {"sliding_window": 32}),
    "mistral, no window": ("Mistral", KIN | {"sliding_window": None}),
    "mistral, tied": ("Mistral", KIN | {"sliding_window": None, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", KIN | QWEN),
    "qwen2, tied": ("Qwen2", KIN | QWEN | {"tie_word_embeddings": True}),
    "qwen2, window": ("Qwen2", KIN | QWEN | {"use_sliding_window": True}),
    "qwen2, square": ("Qwen2", KIN | QWEN | {"head_dim": 8}),
    "qwen2, square, tied": ("Qwen2", KIN | QWEN | {"head_dim": 8, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", KIN | QWEN),
    "qwen3, tied": ("Qwen3", KIN | QWEN | {"tie_word_embeddings": True}),
    "qwen3, biases": ("Qwen3", KIN | QWEN | {"attention_bias": True}),
    "qwen3, window": ("Qwen3", KIN | QWEN | {"use_sliding_window": True}),
    "gemma3": ("Gemma3Text", KIN | GEMMA),
    "gemma3, untied": ("Gemma3Text", KIN | GEMMA | {"tie_word_embeddings": False}),
    "gemma3, biases": ("Gemma3Text", KIN | GEMMA | {"attention_bias": True}),
    "gemma3, long": ("Gemma3Text", KIN | GEMMA | {"rope_parameters": GEMMA_ROPES}),
    "gemma3, another turn": (
        "Gemma3Text",
        KIN | GEMMA | {"sliding_window_pattern": 3, "query_pre_attn_scalar": 24},
    ),
    "phi3": ("Phi3", KIN),
    "phi3, tied": ("Phi3", KIN | {"tie_word_embeddings": True}),
    "phi3, window": ("Phi3", KIN | {"sliding_window": 32}),
    "phi3, partial": ("Phi3", KIN | {"partial_rotary_factor": 0.75}),
    "phi3, square": ("Phi3", KIN | {"head_dim": 8}),
    "phi3, square, partial, tied": (
        "Phi3",
        KIN | {"head_dim": 8, "partial_rotary_factor": 0.75, "tie_word_embeddings": True},
    ),
    "gpt2": ("GPT2", GPT2),
    "gpt2, untied": ("GPT2", GPT2 | {"tie_word_embeddings": False}),
    "gpt2, scales": ("GPT2", GPT2 | {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2, exact gelu": ("GPT2", GPT2 | {"activation_function": "gelu"}),
}
"""The class of its config and what that is given; what stands before a comma is the family."""
FAMILIES = tuple(name for name in MODELS if "," not in name)


def random_model(name: str, folder: Path | None = None, *, seed: int = 0, **settings: Any) -> Any:
    """A model of ``MODELS`` in f32, saved to ``folder`` as Transformers saves it.

    ``settings`` are its config's own before those of ``MODELS``.

    Scales are within 0.3 of one and biases up to 0.5; weights keep the variance of their input.
    Gemma's norms are bf16 numbers, as in the files there are: their sums with one are exact.
    """
    kind, stated = MODELS[name]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**{**stated, **settings})
    classes: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    made = classes[type(config)](config).eval()
    with torch.no_grad():
        for path, parameter in made.named_parameters():
            if path.endswith("bias"):
                parameter.uniform_(-0.5, 0.5)
            elif parameter.ndim == 1 and kind == "Gemma3Text":
                parameter.copy_((0.6 * (torch.rand_like(parameter) - 0.5)).bfloat16())
            elif parameter.ndim == 1:
                parameter.uniform_(0.7, 1.3)
            else:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    if folder is not None:
        made.save_pretrained(folder)
    return made


def model_with_text(name: str, folder: Path, dtype: str = "f32", **settings: Any) -> Any:
    """The same in a dtype, with F0's tokenizer of 131 tokens for its 136 rows beside it."""
    model = random_model(name, **settings).to(DTYPES[dtype])
    model.save_pretrained(folder)
    text = f0_text()
    assert text.tokenizer is not None and text.chat_template is not None
    write_text(folder / "tokenizer.json", text.tokenizer)
    write_text(folder / "chat_template.jinja", text.chat_template)
    write_text(folder / "tokenizer_config.json", json.dumps(text.tokenizer_config))
    write_text(folder / "generation_config.json", json.dumps(text.generation_config))
    return model
