"""A Llama or its kin as its GGUF architecture: the way back of ``llama`` and ``rope``.

What llama.cpp would compute otherwise is refused by name.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from linnet.errors import UnavailableError
from linnet.models.rope import Rope
from linnet.weights.binding import BoundModel, stored_tensors
from linnet.weights.checkpoint import Array
from linnet_gguf import gemma3, names
from linnet_gguf.architectures import Architecture
from linnet_gguf.container import Value
from linnet_gguf.rope import YARN_SETTINGS, llama3_factors

Source = tuple[str, tuple[int, ...], Callable[[], Array]]
"""A tensor in the file's names and row order: its name, its shape, and what reads it."""


def metadata(model: BoundModel, arch: Architecture) -> dict[str, Value]:
    """The architecture's keys. Raises UnavailableError for what llama.cpp does not have."""
    c = model.describe
    _refuse(model, arch)
    rope = rope_of(model)
    keys: dict[str, Value] = {
        "block_count": c["layers"],
        "context_length": c["max_positions"],
        "embedding_length": c["hidden"],
        "feed_forward_length": c["ffn"],
        "attention.head_count": c["heads"],
        "attention.head_count_kv": c["kv_heads"],
        "attention.key_length": c["head_dim"],
        "attention.value_length": c["head_dim"],
        "attention.layer_norm_rms_epsilon": float(c["rms_eps"]),
        "vocab_size": model.vocab,
        "rope.dimension_count": 2 * len(rope.frequencies),
        **rope_keys(rope),
        **(gemma3.keys(model) if arch.windowed else {}),
    }
    return {f"{arch.name}.{key}": value for key, value in keys.items()}


def rope_of(model: BoundModel) -> Rope:
    """The rotary table of the layers that see everything."""
    ropes = model.describe.get("ropes", {})
    return Rope(**(ropes.get("full_attention") or model.describe["rope"]))


def _refuse(model: BoundModel, arch: Architecture) -> None:
    """Raise UnavailableError for what llama.cpp would compute otherwise."""
    c = model.describe
    narrow = [w for w in c["windows"] if w is not None and w < c["max_positions"]]
    if narrow and not arch.windowed:
        raise UnavailableError(
            f"the model has a sliding window of {min(narrow)} tokens, which llama.cpp's "
            f"{arch.name} architecture does not have: it would see all of them"
        )
    for flag in arch.never:
        if c.get(flag):
            raise UnavailableError(
                f"the config has {flag}, which llama.cpp's {arch.name} architecture does not have"
            )
    if arch.square and c["heads"] * c["head_dim"] != c["hidden"]:
        raise UnavailableError(
            f"{c['heads']} heads of {c['head_dim']} dimensions are not the hidden size "
            f"{c['hidden']}, which llama.cpp's {arch.name} architecture takes them to be"
        )


def tensors(model: BoundModel, arch: Architecture, notes: list[str]) -> list[Source]:
    """Every tensor, no matrix of them read yet; ``notes`` grows."""
    c = model.describe
    found: list[Source] = []
    factors = rope_factors(rope_of(model), c["head_dim"])
    if factors is not None:
        found.append((names.ROPE_FACTORS, factors.shape, lambda: factors))
    for path, stored in stored_tensors(model).items():
        name = names.to_gguf(path, arch.layer)
        if name is None:
            raise UnavailableError(f"{path} has no name in GGUF's {arch.name} architecture")
        read = stored.read
        if arch.interleaved and names.is_rotated(name):
            heads = c["kv_heads"] if ".attn_k." in name else c["heads"]
            read = reordered(read, names.interleaved(heads, c["head_dim"]))
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
