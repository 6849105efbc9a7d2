"""Small random models whose shapes show the faults that rounder ones hide.

F0 has 6 heads over 2 key heads, a ``head_dim`` that is not ``hidden / heads``, norms away from
one and biases away from zero. Every tensor is drawn from its own seed, so that leaving one out or
adding one changes no other.
"""

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from linnet.plugins.manager import plugin_manager
from linnet.spec.program import Parameter
from linnet.spec.types import DType
from linnet.weights.checkpoint import Array, Checkpoint, StoredTensor
from linnet.weights.encodings import encoded


def f0_config(**overrides: Any) -> dict[str, Any]:
    """The F0 config in the Transformers dialect, with some of its values replaced or added."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 136,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 80,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "rope_theta": 500000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    } | overrides


def random_checkpoint(config: Mapping[str, Any], seed: int) -> Checkpoint:
    """A checkpoint in memory, f32, that binds to the program of ``config``."""
    manager = plugin_manager()
    family = next(f for f in manager.families.values() if config["model_type"] in f.model_types)
    implementation = manager.implementation(family)
    program = implementation.program(config)
    encodings = getattr(implementation, "encodings", {})
    tensors = {
        parameter.path: _stored(
            parameter.path, encoded(parameter.path, random_values(parameter, seed), encodings)
        )
        for parameter in program.parameters
        if parameter.tied_to is None
    }
    return Checkpoint(Path(f"random-{seed}"), "memory", dict(config), tensors)


def random_values(parameter: Parameter, seed: int) -> Array:
    """f32 values of one parameter, from a seed of its own.

    Scales are 1 ± 0.3 and biases up to 0.5; a linear weight keeps the variance of its input, and
    embeddings have unit variance.
    """
    draw = np.random.default_rng([seed, zlib.crc32(parameter.path.encode())])
    shape = parameter.shape
    if parameter.role == "scale":
        values = draw.uniform(0.7, 1.3, shape)
    elif parameter.role == "bias":
        values = draw.uniform(-0.5, 0.5, shape)
    elif parameter.role == "embedding":
        values = draw.standard_normal(shape)
    else:
        values = draw.standard_normal(shape) / np.sqrt(shape[-1])
    return values.astype(np.float32)


def _stored(name: str, values: Array) -> StoredTensor:
    values.setflags(write=False)
    return StoredTensor(name, values.shape, DType.F32, lambda: values)
