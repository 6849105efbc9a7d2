"""GGUF's ``gpt2`` architecture, both ways.

Its linears are stored as outputs by inputs, where Transformers' GPT-2 has inputs by outputs. What
llama.cpp has in its code (the tanh approximation, one scale for all layers) is not in the file.
"""

from typing import Any

from linnet.errors import UnavailableError
from linnet.weights import encodings
from linnet.weights.binding import BoundModel, stored_tensors
from linnet.weights.checkpoint import StoredTensor, class_name
from linnet_gguf import names
from linnet_gguf.container import Container, Value
from linnet_gguf.llama import read_vocab, refuse_unknown
from linnet_gguf.llama_writer import Source
from linnet_gguf.metadata import Metadata
from linnet_gguf.tensors import read_tensor

ARCHITECTURE = "gpt2"
TOP = {
    "token_embd.weight": "transformer.wte.weight",
    "position_embd.weight": "transformer.wpe.weight",
    "output_norm.weight": "transformer.ln_f.weight",
    "output_norm.bias": "transformer.ln_f.bias",
    "output.weight": "lm_head.weight",
}
LAYER = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
LAYERS = "transformer.h"
TRANSPOSED = ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight")


def read_config(meta: Metadata, container: Container) -> tuple[dict[str, Any], tuple[str, ...]]:
    """``config.json`` of the model, less token ids and dtype, and notes. Raises CheckpointError."""
    hidden, heads = meta.size("gpt2.embedding_length"), meta.size("gpt2.attention.head_count")
    if meta.optional("gpt2.attention.head_count_kv", int) not in (None, heads):
        raise meta.error("has key heads of another number than heads, which GPT-2 does not have")
    vocab, notes = read_vocab(meta, ARCHITECTURE, container.tensors)
    config = {
        "model_type": "gpt2",
        "architectures": [class_name("gpt2")],
        "vocab_size": vocab,
        "n_embd": hidden,
        "n_layer": meta.size("gpt2.block_count"),
        "n_head": heads,
        "n_inner": meta.size("gpt2.feed_forward_length"),
        "n_positions": meta.size("gpt2.context_length"),
        "activation_function": "gelu_new",
        "layer_norm_epsilon": meta.required("gpt2.attention.layer_norm_epsilon", float),
        "tie_word_embeddings": "output.weight" not in container.tensors,
    }
    refuse_unknown(meta, ARCHITECTURE)
    return config, notes


def read_tensors(meta: Metadata, container: Container) -> dict[str, StoredTensor]:
    """The tensors under their Transformers names and in its layout, none of them read yet."""
    tensors: dict[str, StoredTensor] = {}
    data = container.data
    for name, info in container.tensors.items():
        ours = names.to_transformers(name, LAYER, TOP, LAYERS)
        if ours is None:
            raise meta.error(f"the tensor {name} is not one of the gpt2 architecture")
        encoding = None if info.encoding.is_plain else info.encoding.name
        stored = StoredTensor(
            ours,
            info.shape,
            info.encoding.dtype,
            lambda info=info: read_tensor(data, info),  # type: ignore[misc]
            encoding,
        )
        tensors[ours] = encodings.TRANSPOSED.decode(stored) if name.endswith(TRANSPOSED) else stored
    return tensors


def metadata(model: BoundModel) -> dict[str, Value]:
    """The architecture's keys. Raises UnavailableError for what llama.cpp computes otherwise."""
    c = model.describe
    if not c["tanh"]:
        raise UnavailableError(
            "the config has the exact GELU, where llama.cpp's gpt2 has its tanh approximation"
        )
    usual = (c["hidden"] // c["heads"]) ** -0.5
    if any(scale != usual for scale in c["scales"]):
        raise UnavailableError(
            f"the layers scale scores by {', '.join(f'{s:g}' for s in sorted(set(c['scales'])))}, "
            f"where llama.cpp's gpt2 has {usual:g} in its code"
        )
    return {
        "gpt2.block_count": c["layers"],
        "gpt2.context_length": c["max_positions"],
        "gpt2.embedding_length": c["hidden"],
        "gpt2.feed_forward_length": c["ffn"],
        "gpt2.attention.head_count": c["heads"],
        "gpt2.attention.layer_norm_epsilon": float(c["norm_eps"]),
        "gpt2.vocab_size": model.vocab,
    }


def tensors(model: BoundModel) -> list[Source]:
    """Every tensor, none of them read yet."""
    found: list[Source] = []
    for path, stored in stored_tensors(model).items():
        name = names.to_gguf(path, LAYER, TOP, LAYERS)
        if name is None:
            raise UnavailableError(f"{path} has no name in GGUF's gpt2 architecture")
        source = encodings.TRANSPOSED.decode(stored) if name.endswith(TRANSPOSED) else stored
        found.append((name, source.shape, source.read))
    return found
