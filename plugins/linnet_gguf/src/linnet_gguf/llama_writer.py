"""A Llama or its kin as its GGUF architecture: the way back of ``llama`` and ``rope``.

What llama.cpp would compute otherwise is refused by name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from linnet.errors import UnavailableError
from linnet.models.config import Reader
from linnet.models.llama import read_windows
from linnet.models.rope import Rope, read_rope
from linnet.weights.binding import BoundModel, stored_tensors
from linnet.weights.checkpoint import Array
from linnet_gguf import gemma3, names
from linnet_gguf.architectures import Architecture
from linnet_gguf.container import Value
from linnet_gguf.rope import YARN_SETTINGS, llama3_factors

Source = tuple[str, tuple[int, ...], Callable[[], Array]]
"""A tensor in the file's names and row order: its name, its shape, and what reads it."""


@dataclass(frozen=True)
class Sizes:
    """What the config says that GGUF's keys say, too."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_eps: float
    context: int
    rope: Rope


def read_sizes(model: BoundModel, arch: Architecture) -> Sizes:
    """Raises UnavailableError for what llama.cpp does not have."""
    config = model.checkpoint.config
    read = Reader(gemma3.full_rope(config) if arch.windowed else config)
    layers, hidden = read.size("num_hidden_layers"), read.size("hidden_size")
    heads = read.size("num_attention_heads")
    head_dim = read.size("head_dim", hidden // heads)
    context = read.default("max_position_embeddings", 2048)
    narrow = [w for w in read_windows(read, layers) if w is not None and w < context]
    if narrow and not arch.windowed:
        raise UnavailableError(
            f"the model has a sliding window of {min(narrow)} tokens, which llama.cpp's "
            f"{arch.name} architecture does not have: it would see all of them"
        )
    for flag in arch.never:
        if read.optional(flag, bool):
            raise UnavailableError(
                f"the config has {flag}, which llama.cpp's {arch.name} architecture does not have"
            )
    return Sizes(
        layers=layers,
        hidden=hidden,
        ffn=read.size("intermediate_size"),
        heads=heads,
        kv_heads=read.size("num_key_value_heads", heads),
        head_dim=head_dim,
        rms_eps=read.default("rms_norm_eps", 1e-6),
        context=context,
        rope=read_rope(read, head_dim, context),
    )


def metadata(model: BoundModel, arch: Architecture) -> dict[str, Value]:
    """The architecture's keys. Raises UnavailableError for what llama.cpp does not have."""
    c = read_sizes(model, arch)
    keys: dict[str, Value] = {
        "block_count": c.layers,
        "context_length": c.context,
        "embedding_length": c.hidden,
        "feed_forward_length": c.ffn,
        "attention.head_count": c.heads,
        "attention.head_count_kv": c.kv_heads,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
        "attention.layer_norm_rms_epsilon": float(c.rms_eps),
        "vocab_size": model.vocab,
        "rope.dimension_count": c.head_dim,
        **rope_keys(c.rope),
        **(gemma3.keys(model.checkpoint.config) if arch.windowed else {}),
    }
    return {f"{arch.name}.{key}": value for key, value in keys.items()}


def tensors(model: BoundModel, arch: Architecture, notes: list[str]) -> list[Source]:
    """Every tensor, no matrix of them read yet; ``notes`` grows."""
    c = read_sizes(model, arch)
    found: list[Source] = []
    factors = rope_factors(c.rope, c.head_dim)
    if factors is not None:
        found.append((names.ROPE_FACTORS, factors.shape, lambda: factors))
    for path, stored in stored_tensors(model).items():
        name = names.to_gguf(path, arch.layer)
        if name is None:
            raise UnavailableError(f"{path} has no name in GGUF's {arch.name} architecture")
        read = stored.read
        if arch.interleaved and names.is_rotated(name):
            heads = c.kv_heads if ".attn_k." in name else c.heads
            read = reordered(read, names.interleaved(heads, c.head_dim))
        if arch.norms_from_one and name.endswith("norm.weight"):
            read = gemma3.norm_itself(name, read, notes)
        found.append((name, stored.shape, read))
    return found


def reordered(read: Callable[[], Array], order: Array) -> Callable[[], Array]:
    """A reader that gives the rows in another order."""
    return lambda: read()[order]


def rope_keys(rope: Rope) -> dict[str, Value]:
    """Rotary settings of a typed config as GGUF keys; a Llama 3 table is a tensor beside them."""
    settings = dict(rope.settings)
    keys: dict[str, Value] = {"rope.freq_base": float(rope.theta)}
    if rope.kind == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(settings["factor"])}
    elif rope.kind == "llama3":
        keys["rope.scaling.original_context_length"] = _whole(
            settings["original_max_position_embeddings"]
        )
    elif rope.kind == "yarn":
        keys |= _yarn(rope, settings)
    elif rope.kind != "default":
        raise UnavailableError(f"rope scaling {rope.kind!r} cannot be written as GGUF")
    return keys


def _yarn(rope: Rope, settings: Mapping[str, Any]) -> dict[str, Value]:
    factor = float(settings["factor"])
    usual = 1.0 if factor <= 1 else 0.1 * float(np.log(factor)) + 1.0
    if abs(rope.scale - usual) > 1e-6 * usual:
        raise UnavailableError(
            f"YaRN scales cosine and sine by {rope.scale:g} here, where llama.cpp takes "
            f"{usual:g} for the factor {factor:g}"
        )
    if settings.get("truncate", True) is not True:
        raise UnavailableError("YaRN without truncate is not what llama.cpp computes")
    keys: dict[str, Value] = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": _whole(
            settings["original_max_position_embeddings"]
        ),
    }
    for theirs, ours in YARN_SETTINGS.items():
        if ours in settings:
            keys[f"rope.scaling.{theirs}"] = float(settings[ours])
    return keys


def _whole(value: float) -> int:
    if int(value) != value:
        raise UnavailableError(f"original_max_position_embeddings is {value}, not a whole number")
    return int(value)


def rope_factors(rope: Rope, head_dim: int) -> Array | None:
    """Llama 3's table, f32 ``[head_dim / 2]``; None for models without one."""
    if rope.kind != "llama3":
        return None
    settings = dict(rope.settings)
    return llama3_factors(
        rope.theta,
        head_dim,
        factor=settings["factor"],
        low=settings["low_freq_factor"],
        high=settings["high_freq_factor"],
        original=settings["original_max_position_embeddings"],
    )
