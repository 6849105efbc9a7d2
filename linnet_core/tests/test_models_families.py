"""What the configs of the families beside Llama mean, and how their files are read."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from linnet.errors import BindingError, ConfigError
from linnet.models import gemma3_text, gpt2, mistral, phi3, qwen2, qwen3
from linnet.spec import fingerprint
from linnet.spec.types import DType
from linnet.testing.fixtures import f0_config, random_checkpoint
from linnet.weights.checkpoint import Checkpoint, StoredTensor

GEMMA = {
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 24,
    "sliding_window": 32,
    "sliding_window_pattern": 3,
    "rope_local_base_freq": 1e4,
    "tie_word_embeddings": True,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 136,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 6,
    "n_positions": 64,
    "layer_norm_epsilon": 1e-5,
}


def kin(model_type: str, **changes: Any) -> dict[str, Any]:
    return f0_config(model_type=model_type, **changes)


def gemma(*without: str, **changes: Any) -> dict[str, Any]:
    config = {k: v for k, v in f0_config(**GEMMA | changes).items() if k != "hidden_act"}
    return {k: v for k, v in config.items() if k not in without}


# --- C14: windows ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 8}, (8, 8, 8)),
        ({"sliding_window": None}, (None, None, None)),
        ({}, (4096, 4096, 4096)),  # what an absent key means to Transformers
    ],
)
def test_windows_of_mistral(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    typed, notes = mistral.read_config(kin("mistral", **changes), tied=False)
    assert typed.windows == windows
    assert any("sliding_window" in note for note in notes) == (not changes)


@pytest.mark.parametrize("family", [mistral, phi3])
def test_layer_types_that_transformers_does_not_look_at_are_refused(family: Any) -> None:
    config = kin(family.__name__.rpartition(".")[2], sliding_window=8)
    same = ["sliding_attention"] * 3
    assert family.read_config(config | {"layer_types": same}, tied=False)[0].windows == (8, 8, 8)
    other = ["full_attention", *same[1:]]
    with pytest.raises(ConfigError, match="one kind for all 3 layers"):
        family.read_config(config | {"layer_types": other}, tied=False)


@pytest.mark.parametrize("family", [qwen2, qwen3])
@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, (None, None, None)),
        ({"use_sliding_window": False}, (None, None, None)),
        ({"use_sliding_window": True, "max_window_layers": 1}, (None, 4, 4)),
        ({"use_sliding_window": True, "max_window_layers": 5}, (None, None, None)),
        (
            {
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            },
            (4, None, None),
        ),
    ],
)
def test_windows_of_qwen(
    family: Any, changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    config = kin(family.__name__.rpartition(".")[2], sliding_window=4, **changes)
    assert family.read_config(config, tied=False)[0].windows == windows


def test_windows_of_gemma() -> None:
    typed, _ = gemma3_text.read_config(gemma(num_hidden_layers=4), tied=True)
    assert typed.windows == (32, 32, None, 32)
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    typed, _ = gemma3_text.read_config(gemma(layer_types=kinds), tied=True)
    assert typed.windows == (None, 32, 32)


# --- C01: rope by layer type -------------------------------------------------------------------

NESTED = {
    "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def test_dialects_of_gemmas_rope_say_the_same() -> None:
    old = gemma()
    new = gemma("rope_theta", "rope_local_base_freq", rope_parameters=NESTED)
    programs = [
        gemma3_text.Gemma3().program(config)
        for config in (old, new, old | {"rope_parameters": NESTED})
    ]
    assert len({fingerprint(program) for program in programs}) == 1
    ropes = gemma3_text.read_config(new, tied=True)[0].ropes
    assert ropes["full_attention"].theta == 500000 and ropes["sliding_attention"].theta == 1e4


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (gemma(rope_theta=1e6, rope_parameters=NESTED), "rope_theta is 1000000.0"),
        (gemma(rope_local_base_freq=2e4, rope_parameters=NESTED), "rope_local_base_freq is 20000"),
        (gemma(rope_parameters={"rope_theta": 5e5}), "has them by layer type"),
        (gemma(final_logit_softcapping=30.0), "final_logit_softcapping"),
        (gemma(attn_logit_softcapping=50.0), "attn_logit_softcapping"),
        (gemma(use_bidirectional_attention=True), "use_bidirectional_attention"),
        (gemma(hidden_activation="silu"), "hidden_activation is 'silu'"),
    ],
)
def test_what_gemma_does_not_have_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gemma3_text.read_config(config, tied=True)


def test_gemmas_absent_keys_are_noted() -> None:
    config = gemma("query_pre_attn_scalar", "rope_theta", "sliding_window_pattern")
    typed, notes = gemma3_text.read_config(config, tied=True)
    assert typed.query_scalar == 256 and typed.ropes["full_attention"].theta == 1e6
    for key in ("query_pre_attn_scalar", "rope_theta", "sliding_window_pattern"):
        assert any(f"does not state {key}" in note for note in notes)


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
def test_phi3_refuses_tables_that_change_with_the_length(kind: str) -> None:
    factors = {"type": kind, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    with pytest.raises(ConfigError, match=rf"{kind}.*longrope"):
        phi3.read_config(kin("phi3", rope_scaling=factors), tied=False)


def test_phi3_rotates_a_part_of_each_head() -> None:
    typed, _ = phi3.read_config(kin("phi3", partial_rotary_factor=0.75), tied=False)
    assert len(typed.rope.frequencies) == 6 and typed.rope.partial == 0.75
    with pytest.raises(ConfigError, match="of 16 dimensions, not an even number"):
        phi3.read_config(kin("phi3", partial_rotary_factor=0.2), tied=False)


# --- C11, C12, C30: what files hold -----------------------------------------------------------


def renamed(checkpoint: Checkpoint, tensors: Mapping[str, StoredTensor]) -> Checkpoint:
    return replace(checkpoint, tensors={n: replace(t, name=n) for n, t in tensors.items()})


def test_gemmas_norms_are_stored_from_one() -> None:
    checkpoint = random_checkpoint(gemma(), seed=1)
    bound = gemma3_text.Gemma3().bind(checkpoint)
    norm = bound.parameters["model.norm.weight"]
    stored = checkpoint.tensors["model.norm.weight"].read()
    assert norm.dtype is DType.F32 and abs(stored).max() <= 0.31
    np.testing.assert_array_equal(norm.read(), stored + np.float32(1))


def test_gpt2_is_read_with_and_without_its_prefix_and_masks() -> None:
    checkpoint = random_checkpoint(GPT2, seed=1)
    qkv = checkpoint.tensors["transformer.h.0.attn.c_attn.weight"]
    assert qkv.shape == (48, 144)
    bare = {n.removeprefix("transformer."): t for n, t in checkpoint.tensors.items()}
    mask = np.tril(np.ones((1, 1, 64, 64), np.float32))
    masks = {
        f"h.{i}.attn.{name}": StoredTensor("", mask.shape, DType.F32, lambda: mask)
        for i in range(2)
        for name in ("bias", "masked_bias")
    }
    whole = gpt2.GPT2().bind(checkpoint)
    stripped = gpt2.GPT2().bind(renamed(checkpoint, bare | masks))
    assert whole.parameters.keys() == stripped.parameters.keys()
    for path, parameter in whole.parameters.items():
        np.testing.assert_array_equal(parameter.read(), stripped.parameters[path].read())
    read = whole.parameters["transformer.h.0.attn.c_attn.weight"]
    assert read.shape == (144, 48)
    np.testing.assert_array_equal(read.read(), qkv.read().T)


def test_gpt2_names_what_it_does_not_know() -> None:
    checkpoint = random_checkpoint(GPT2, seed=1)
    strange = {f"decoder.{name}": t for name, t in checkpoint.tensors.items()}
    with pytest.raises(BindingError, match=r"decoder\.transformer"):
        gpt2.GPT2().bind(renamed(checkpoint, strange))


def test_gpt2s_scales() -> None:
    config = GPT2 | {"scale_attn_by_inverse_layer_idx": True}
    assert gpt2.read_config(config, tied=True)[0].scales == (8**-0.5, 8**-0.5 / 2)
    config = GPT2 | {"scale_attn_weights": False}
    assert gpt2.read_config(config, tied=True)[0].scales == (1.0, 1.0)


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj"])
def test_a_missing_bias_of_qwen2_is_an_error(name: str) -> None:
    checkpoint = random_checkpoint(kin("qwen2"), seed=1)
    path = f"model.layers.1.self_attn.{name}.bias"
    tensors = {n: t for n, t in checkpoint.tensors.items() if n != path}
    with pytest.raises(BindingError, match=f"1 missing: {path}"):
        qwen2.Qwen2().bind(replace(checkpoint, tensors=tensors))
