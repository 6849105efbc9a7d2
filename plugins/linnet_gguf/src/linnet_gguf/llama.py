"""GGUF's ``llama`` architecture and its kin as a Transformers config and named tensors.

``llama`` covers Llama 1 to 3, Mistral, TinyLlama and SmolLM2: whatever llama.cpp converts from
``LlamaForCausalLM``. The others are in ``architectures``.
"""

import mmap
from collections.abc import Mapping
from typing import Any

from linnet.weights.checkpoint import Array, StoredTensor
from linnet_gguf import gemma3, names
from linnet_gguf.architectures import Architecture
from linnet_gguf.container import Container, TensorInfo
from linnet_gguf.metadata import Metadata
from linnet_gguf.rope import read_rope
from linnet_gguf.tensors import read_tensor

UNSUPPORTED_COUNTS = ("expert_count", "expert_used_count")
"""Counts that must be zero: what they turn on is not supported."""
HARMLESS = ("tensor_data_layout", "rope.scaling.original_context_length")
"""Keys that say nothing beyond what the tensors and other keys say."""


def read_config(
    meta: Metadata, container: Container, arch: Architecture
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """``config.json`` of the model, less token ids and dtype, and notes. Raises CheckpointError."""
    tensors = container.tensors
    for name in UNSUPPORTED_COUNTS:
        count = meta.optional(f"{arch.name}.{name}", int)
        if count:
            raise meta.error(
                f"{arch.name}.{name} is {count}: mixtures of experts are not supported"
            )
    hidden, layers = (
        meta.size(f"{arch.name}.embedding_length"),
        meta.size(f"{arch.name}.block_count"),
    )
    heads, kv_heads = _heads(meta, arch)
    head_dim, rotated = _head_dim(meta, arch, hidden, heads)
    context = meta.size(f"{arch.name}.context_length")
    eps = meta.required(f"{arch.name}.attention.layer_norm_rms_epsilon", float)
    feed_forward = meta.same_for_all(f"{arch.name}.feed_forward_length")
    if feed_forward is None or feed_forward < 1:
        raise meta.error(
            f"{arch.name}.feed_forward_length is {feed_forward}, not a positive number"
        )
    factors = None
    if names.ROPE_FACTORS in tensors:
        factors = read_tensor(container.data, tensors[names.ROPE_FACTORS])
    rope, notes = read_rope(meta, arch.name, head_dim, context, factors)
    if rotated != head_dim:
        rope["partial_rotary_factor"] = rotated / head_dim
    vocab, vocab_notes = read_vocab(meta, arch.name, tensors)
    config: dict[str, Any] = {
        "model_type": arch.model_type,
        "architectures": [arch.transformers_class],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": eps,
        "max_position_embeddings": context,
        **{flag: _all_or_none(meta, tensors, layers, parts) for flag, parts in arch.flags.items()},
        "tie_word_embeddings": "output.weight" not in tensors,
        "rope_parameters": rope,
        # The dialect before Transformers 5, which says the same.
        "rope_theta": rope["rope_theta"],
    }
    if rope["rope_type"] != "default":
        config["rope_scaling"] = {
            k: v for k, v in rope.items() if k not in ("rope_theta", "partial_rotary_factor")
        }
    window = meta.optional(f"{arch.name}.attention.sliding_window", int)
    if arch.windowed:
        config |= gemma3.settings(meta, config, window)
        del config["hidden_act"]  # it has a name of its own
    elif window:
        config["sliding_window"] = window
    refuse_unknown(meta, arch.name)
    return config, (*notes, *vocab_notes)


def refuse_unknown(meta: Metadata, arch: str) -> None:
    """Raise CheckpointError for keys of the architecture that nothing read."""
    meta.read.update(f"{arch}.{name}" for name in HARMLESS)
    unknown = meta.unread(f"{arch}.")
    if unknown:
        raise meta.error(
            f"sets {', '.join(unknown)}, which this reader does not know and so cannot honour"
        )


def read_tensors(
    meta: Metadata, container: Container, config: Mapping[str, Any], arch: Architecture
) -> dict[str, StoredTensor]:
    """The tensors under their Transformers names and in their row order, none of them read yet."""
    tensors: dict[str, StoredTensor] = {}
    for name, info in container.tensors.items():
        if name == names.ROPE_FACTORS:
            continue
        ours = names.to_transformers(name, arch.layer)
        if ours is None:
            raise meta.error(
                f"the tensor {name} is not one of the {arch.name} architecture; such a model is "
                "not supported"
            )
        heads = None
        if arch.interleaved and names.is_rotated(name):
            key = "num_key_value_heads" if ".attn_k." in name else "num_attention_heads"
            heads = int(config[key])
            if info.shape[0] != heads * config["head_dim"] or len(info.shape) > 2:
                raise meta.error(
                    f"the tensor {name} has the shape {info.shape}, but {heads} heads of "
                    f"{config['head_dim']} make {heads * config['head_dim']} rows"
                )
        stored = _stored(ours, container.data, info, heads, int(config["head_dim"]))
        if arch.norms_from_one and name.endswith("norm.weight"):
            stored = gemma3.norm_from_one(stored)
        tensors[ours] = stored
    return tensors


def _stored(
    name: str, data: mmap.mmap, info: TensorInfo, heads: int | None, head_dim: int
) -> StoredTensor:
    # Holds the file alone: the metadata, with its vocabulary, is let go once it was read.
    def read() -> Array:
        order = None if heads is None else names.halves(heads, head_dim)
        return read_tensor(data, info, order)

    encoding = None if info.encoding.is_plain else info.encoding.name
    return StoredTensor(name, info.shape, info.encoding.dtype, read, encoding)


def _heads(meta: Metadata, arch: Architecture) -> tuple[int, int]:
    key = f"{arch.name}.attention.head_count"
    heads = meta.same_for_all(key)
    if heads is None:
        raise meta.error(f"does not have the metadata key {key}: convert the model again")
    kv_heads = meta.same_for_all(f"{key}_kv")
    # The format says so: without the key, every head has a key head of its own.
    kv_heads = heads if kv_heads is None else kv_heads
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise meta.error(f"{key} is {heads} and {key}_kv is {kv_heads}, not a divisor of it")
    return heads, kv_heads


def _head_dim(meta: Metadata, arch: Architecture, hidden: int, heads: int) -> tuple[int, int]:
    """The dimensions of a head, and how many of them are rotated."""
    rotated = meta.optional(f"{arch.name}.rope.dimension_count", int)
    keys = ["attention.key_length", "attention.value_length"]
    stated = {key: meta.optional(f"{arch.name}.{key}", int) for key in keys}
    if not arch.partial:
        stated["rope.dimension_count"] = rotated
    given = {key: value for key, value in stated.items() if value is not None}
    if len(set(given.values())) > 1:
        listed = ", ".join(f"{arch.name}.{key} = {value}" for key, value in given.items())
        raise meta.error(f"{listed}: the {arch.name} architecture has one size for all of them")
    if not given and hidden % heads:
        raise meta.error(
            f"{arch.name}.embedding_length {hidden} is not a multiple of {heads} heads, and "
            f"{arch.name}.attention.key_length is missing"
        )
    head_dim = next(iter(given.values()), hidden // heads)
    if head_dim < 2 or head_dim % 2:
        raise meta.error(f"a head has {head_dim} dimensions, not a positive even number")
    rotated = head_dim if rotated is None else rotated
    if not 2 <= rotated <= head_dim or rotated % 2:
        raise meta.error(
            f"{arch.name}.rope.dimension_count is {rotated}, not an even number of the "
            f"{head_dim} dimensions of a head"
        )
    return head_dim, rotated


def read_vocab(
    meta: Metadata, arch: str, tensors: Mapping[str, TensorInfo]
) -> tuple[int, tuple[str, ...]]:
    """Rows of the embedding: what the logits have, whatever the other counts say."""
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise meta.error("does not have the tensor token_embd.weight")
    rows = embedding.shape[0]
    stated = meta.optional(f"{arch}.vocab_size", int)
    if stated is None or stated == rows:
        return rows, ()
    return rows, (
        f"{arch}.vocab_size is {stated}, but token_embd.weight has {rows} rows; going by the rows",
    )


def _all_or_none(
    meta: Metadata, tensors: Mapping[str, TensorInfo], layers: int, parts: tuple[str, ...]
) -> bool:
    """Whether the linears have biases; the config has one flag for them all."""
    found = sum(name.endswith(tuple(f".{part}.bias" for part in parts)) for name in tensors)
    if found not in (0, layers * len(parts)):
        raise meta.error(
            f"has {found} biases for {', '.join(parts)} in {layers} layers, where "
            f"{layers * len(parts)} are expected or none: Transformers' Llama has all or none"
        )
    return found > 0
