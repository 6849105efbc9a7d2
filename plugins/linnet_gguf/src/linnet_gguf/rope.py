"""Rotary settings: GGUF keys and the table of factors, to ``rope_parameters`` of Transformers.

GGUF states linear and YaRN scaling by keys. Llama 3's it states as a table, ``rope_freqs.weight``:
how many times slower each pair of dimensions turns. Turning that back into settings means finding
those that give the table, and checking that they do.
"""

import math
from typing import Any

import numpy as np

from linnet.weights.checkpoint import Array
from linnet_gguf.metadata import Metadata

LOW, HIGH = 1.0, 4.0
"""``low_freq_factor`` and ``high_freq_factor`` of every Llama 3 model there is."""
TOLERANCE = 1e-5
"""Relative; converters compute the table in f32."""
DEFAULT_THETA = 10000.0
"""What llama.cpp takes ``rope.freq_base`` to be where a file does not state it."""


def read_rope(
    meta: Metadata, arch: str, head_dim: int, context: int, factors: Array | None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """``rope_parameters`` of the config, and notes. Raises CheckpointError."""
    notes = []
    theta = meta.optional(f"{arch}.rope.freq_base", float)
    if theta is None:
        theta = DEFAULT_THETA
        notes.append(f"the file does not state {arch}.rope.freq_base; assuming {theta:g}")
    if not theta > 0:
        raise meta.error(f"{arch}.rope.freq_base is {theta}, not positive")
    settings = _scaling(meta, f"{arch}.rope.", context)
    if factors is not None and not np.allclose(factors, 1, rtol=1e-6, atol=0):
        if settings["rope_type"] != "default":
            raise meta.error(
                f"has both {arch}.rope.scaling.type {settings['rope_type']!r} and a table of "
                "factors (rope_freqs.weight), which Transformers cannot say in one config"
            )
        original = meta.optional(f"{arch}.rope.scaling.original_context_length", int)
        found = llama3_settings(factors, theta, head_dim, original)
        if found is None:
            raise meta.error(
                f"rope_freqs.weight is not a Llama 3 table (low {LOW:g}, high {HIGH:g}, rope base "
                f"{theta:g}): {np.array2string(factors, precision=4, threshold=12)}; such scaling "
                "is not supported"
            )
        settings = found
    return {"rope_theta": theta, **settings}, tuple(notes)


NEUTRAL = {
    "attn_factor": 1.0,
    "yarn_ext_factor": 1.0,
    "yarn_attn_factor": 1.0,
    "yarn_log_multiplier": 0.0,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
}
"""Finer settings, each with the value at which it changes nothing."""
YARN_SETTINGS = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
"""Those of them that Transformers has, for YaRN, and its names for them."""


def _scaling(meta: Metadata, prefix: str, context: int) -> dict[str, Any]:
    factor = meta.optional(f"{prefix}scaling.factor", float)
    if factor is None:
        factor = meta.optional(f"{prefix}scale_linear", float)
    # As in llama.cpp, 0 is no factor, and a factor without a type is a linear one.
    kind = meta.optional(f"{prefix}scaling.type", str) or ("linear" if factor else "none")
    original = meta.optional(f"{prefix}scaling.original_context_length", int)
    meta.optional(f"{prefix}scaling.finetuned", bool)
    if kind not in ("none", "linear", "yarn"):
        raise meta.error(
            f"{prefix}scaling.type is {kind!r}; supported are none, linear, yarn, and Llama 3's "
            "table of factors"
        )
    finer = {}
    for name, neutral in NEUTRAL.items():
        value = meta.optional(f"{prefix}scaling.{name}", float)
        if value is not None and kind == "yarn" and name in YARN_SETTINGS:
            finer[YARN_SETTINGS[name]] = value
        elif value not in (None, neutral):
            raise meta.error(f"{prefix}scaling.{name} is {value}, which is not supported")
    if kind == "none" or not factor or factor == 1:
        return {"rope_type": "default"}
    if factor < 0:
        raise meta.error(f"{prefix}scaling.factor is {factor}, not positive")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original or context,
        **finer,
    }


def llama3_factors(
    theta: float, head_dim: int, *, factor: float, low: float, high: float, original: float
) -> Array:
    """The f32 table ``[head_dim / 2]`` that GGUF stores for these settings."""
    frequencies = np.float64(theta) ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    turns = original * frequencies / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / (kept + (1 - kept) / factor)).astype(np.float32)


def llama3_settings(
    factors: Array, theta: float, head_dim: int, original: int | None = None
) -> dict[str, Any] | None:
    """The settings whose table this is, or None.

    The slowest pairs show the factor itself; each pair in between gives the original context.
    ``original`` is taken as given where the file states it.
    """
    table = factors.astype(np.float64)
    if (
        table.shape != (head_dim // 2,)
        or not np.all(np.isfinite(table))
        or table.min() < 1 - TOLERANCE
    ):
        return None
    factor = float(str(np.float32(table.max())))
    for candidate in [original] if original else _originals(table, theta, head_dim, factor):
        made = llama3_factors(
            theta, head_dim, factor=factor, low=LOW, high=HIGH, original=candidate
        )
        if np.allclose(made, table, rtol=TOLERANCE, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": LOW,
                "high_freq_factor": HIGH,
                "original_max_position_embeddings": candidate,
            }
    return None


def _originals(table: Array, theta: float, head_dim: int, factor: float) -> list[int]:
    """Original contexts that may have given the table, the likeliest first."""
    wavelengths = 2 * math.pi * np.float64(theta) ** (np.arange(0, head_dim, 2) / head_dim)
    between = (table > 1 + TOLERANCE) & (table < factor * (1 - TOLERANCE))
    if between.any():
        kept = (1 / table[between] - 1 / factor) / (1 - 1 / factor)
        estimates = (LOW + kept * (HIGH - LOW)) * wavelengths[between]
        estimate = float(np.median(estimates))
    else:
        # No pair is in between: any context that turns the last kept pair often enough will do.
        kept_pairs = wavelengths[table <= 1 + TOLERANCE]
        estimate = max(1.0, HIGH * float(kept_pairs.max())) if kept_pairs.size else 1.0
    if not 1 <= estimate <= 1 << 40:
        return []
    power = 2 ** math.ceil(math.log2(estimate) - 1e-6)
    nearest = 2 ** round(math.log2(estimate))
    return list(dict.fromkeys((nearest, power, round(estimate))))
