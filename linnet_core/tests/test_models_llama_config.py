"""What a Llama config means: dialects of rope, windows, absent keys, and keys that mean nothing."""

import itertools
import json
import math
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linnet.errors import ConfigError
from linnet.models.config import CHANGING, HARMLESS, Reader
from linnet.models.llama import Llama, LlamaConfig, read_config
from linnet.models.rope import read_rope
from linnet.spec import fingerprint
from linnet.testing.fixtures import f0_config

THETA = 500000.0


def without(*names: str, **more: Any) -> dict[str, Any]:
    """The F0 config without some keys, and with others."""
    return {name: value for name, value in f0_config().items() if name not in names} | more


def read(**changes: Any) -> LlamaConfig:
    return read_config(f0_config(**changes), tied=False)[0]


def notes(config: dict[str, Any]) -> tuple[str, ...]:
    return read_config(config, tied=False)[1]


# --- C01: rope in both dialects ---------------------------------------------------------------

NESTED = {"rope_type": "default", "rope_theta": THETA}
DIALECTS = {
    "old": f0_config(),
    "new": without("rope_theta", rope_parameters=NESTED),
    "both": f0_config(rope_parameters=NESTED),
    "null scaling": f0_config(rope_scaling=None, rope_parameters=None),
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_dialects_of_rope_say_the_same(dialect: str) -> None:
    config = DIALECTS[dialect]
    assert notes(config) == ()
    rope = read_config(config, tied=False)[0].rope
    assert rope.theta == THETA
    assert rope.frequencies[1] == pytest.approx(0.19392, abs=5e-6)
    assert fingerprint(Llama().program(config)) == fingerprint(Llama().program(f0_config()))


SCALED = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED |= {"original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "config",
    [
        without("rope_theta", rope_parameters={"rope_type": "llama3", "rope_theta": 1e4, **SCALED}),
        f0_config(rope_theta=1e4, rope_scaling={"rope_type": "llama3", **SCALED}),
        f0_config(rope_theta=1e4, rope_scaling={"type": "llama3", **SCALED}),
        f0_config(
            rope_theta=10000, rope_scaling={"type": "llama3", "rope_type": "llama3", **SCALED}
        ),
        f0_config(
            rope_theta=1e4,
            rope_scaling={"type": "llama3", **SCALED},
            rope_parameters={"rope_type": "llama3", "rope_theta": 10000, **SCALED},
        ),
    ],
)
def test_llama3_scaling_in_every_spelling(config: dict[str, Any]) -> None:
    """C03: the factors that a GGUF file would hold."""
    rope = read_config(config, tied=False)[0].rope
    plain = read(rope_theta=1e4).rope
    factors = np.array(plain.frequencies) / np.array(rope.frequencies)
    np.testing.assert_allclose(factors, [1, 1.293976, 7.667385, 8, 8, 8, 8, 8], rtol=1e-6)
    assert dict(rope.settings) == SCALED
    assert rope.kind == "llama3"


@pytest.mark.parametrize(
    ("changes", "first", "second"),
    [
        (
            {"rope_parameters": {**NESTED, "rope_theta": 1e4}},
            r"rope_parameters\.rope_theta is 10000\.0",
            r"rope_theta is 500000\.0",
        ),
        (
            {"rope_parameters": NESTED, "rope_scaling": {"type": "linear", "factor": 2.0}},
            r"rope_parameters\.rope_type is 'default'",
            r"rope_scaling\.type is 'linear'",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "type": "linear", "factor": 2.0}},
            r"rope_scaling\.rope_type is 'yarn'",
            r"rope_scaling\.type is 'linear'",
        ),
        (
            {
                "rope_scaling": {"type": "llama3", **SCALED},
                "original_max_position_embeddings": 128,
            },
            r"rope_scaling\.original_max_position_embeddings is 64",
            r"original_max_position_embeddings is 128\.0",
        ),
    ],
)
def test_a_contradiction_names_both_keys(changes: dict[str, Any], first: str, second: str) -> None:
    with pytest.raises(ConfigError, match=f"{first} but {second}: the config contradicts itself"):
        read(**changes)


def test_an_unstated_theta_is_assumed_with_a_note() -> None:
    config = without("rope_theta")
    (note,) = notes(config)
    assert note == "config.json does not state rope_theta; assuming 10000.0, as Transformers does"
    assert read_config(config, tied=False)[0].rope.theta == 10000.0


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_an_unstated_original_length_is_assumed_with_a_note(kind: str) -> None:
    stated = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling = {"rope_type": kind, **(stated if kind == "llama3" else {"factor": 8.0})}
    config = f0_config(rope_scaling=scaling)
    (note,) = notes(config)
    assert f"{kind!r} does not state original_max_position_embeddings; assuming" in note
    scaling["original_max_position_embeddings"] = 512
    stated_rope = read(rope_scaling=scaling).rope
    assert read_config(config, tied=False)[0].rope == stated_rope


def test_an_original_length_at_the_top_counts() -> None:
    within = read(rope_scaling={"type": "llama3", **SCALED}).rope
    less = {name: value for name, value in SCALED.items() if "original" not in name}
    beside = read(rope_scaling={"type": "llama3", **less}, original_max_position_embeddings=64)
    assert within.frequencies == beside.rope.frequencies
    assert read(original_max_position_embeddings=64).rope.kind == "default"


@pytest.mark.parametrize(
    ("rope", "complaint"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "'dynamic' is not supported; supported are"),
        ({"rope_type": "longrope", "long_factor": [1.0] * 8}, "'longrope' is not supported"),
        ({"rope_type": "su"}, "'su' is not supported"),
        ({"rope_type": 3}, "3 is not supported"),
        ({"rope_type": ["linear"]}, "is not supported"),
        ({"rope_type": "linear"}, "'linear' needs a number factor"),
        ({"rope_type": "linear", "factor": "2"}, "factor is '2', not a positive number"),
        ({"rope_type": "linear", "factor": True}, "factor is True, not a positive number"),
        ({"rope_type": "linear", "factor": 0}, "factor is 0, not a positive number"),
        ({"rope_type": "linear", "factor": math.nan}, "factor is nan, not a positive number"),
        ({"rope_type": "linear", "factor": 10**400}, "factor is 1.*, not a positive number"),
        ({"rope_type": "linear", "factor": 2.0, "alpha": 3}, "'linear' does not know alpha=3"),
        ({"rope_type": "default", "factor": 2.0}, "'default' does not know factor=2.0"),
        ({"rope_type": "llama3", **SCALED, "high_freq_factor": 1.0}, "must be above"),
        (
            {"rope_type": "yarn", "factor": 2.0, "truncate": "false"},
            "truncate is 'false', not true",
        ),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": -1}, "beta_fast is -1, not a positive"),
        ({"rope_theta": 0.5}, "rope_theta is 0.5, not a number above 1"),
        ({"rope_theta": "10000"}, "rope_theta is '10000', not a number above 1"),
        ({"rope_theta": 1e300}, "rope_theta is 1e[+]300, not a number above 1"),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        (
            {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e6}},
            r"rope_parameters\.full_attention is for one layer type",
        ),
    ],
)
def test_rope_that_cannot_be_honoured_is_refused(rope: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read_config(without("rope_theta", rope_parameters=rope), tied=False)


def _yarns() -> list[dict[str, Any]]:
    extras: list[dict[str, Any]] = [
        {},
        {"attention_factor": 0.7},
        {"mscale": 0.707, "mscale_all_dim": 1.0},
        {"mscale": 0.707},
        {"mscale": 1.0, "mscale_all_dim": 0.5, "attention_factor": 1.5},
        {"truncate": False},
        {"truncate": True, "beta_fast": 16.0, "beta_slow": 2},
        {"beta_fast": 4.0, "truncate": False},
    ]
    return [
        {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length} | extra
        for factor, length, extra in itertools.product((1.0, 4.0, 40.0), (128, 4096), extras)
    ]


def _scalings() -> list[dict[str, Any]]:
    linear = [{"rope_type": "linear", "factor": factor} for factor in (1.0, 2, 3.3)]
    llama3 = [
        {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": length,
        }
        for factor, low, high, length in itertools.product(
            (8.0, 3.3), (1.0, 2.0), (4.0, 7.5), (64, 512, 8192)
        )
    ]
    return [{"rope_type": "default"}, *linear, *llama3, *_yarns()]


@pytest.mark.parametrize("head_dim", [16, 64, 96])
def test_tables_are_those_of_transformers(head_dim: int) -> None:
    """Bit for bit but where two f32 powers round differently."""
    pytest.importorskip("torch")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    configuration = pytest.importorskip("transformers").LlamaConfig
    for scaling, theta in itertools.product(_scalings(), (1e4, THETA, 12345.678)):
        stated = {**scaling, "rope_theta": theta}
        peer = llama.LlamaRotaryEmbedding(
            configuration(head_dim=head_dim, max_position_embeddings=512, rope_parameters=stated)
        )
        ours = read_rope(Reader({"rope_parameters": stated}), head_dim, 512)
        np.testing.assert_allclose(
            ours.frequencies, peer.inv_freq.numpy(), rtol=5e-7, err_msg=f"{stated}"
        )
        assert ours.scale == pytest.approx(peer.attention_scaling, rel=1e-12), stated


# --- heads, windows, flags --------------------------------------------------------------------


def test_head_dim_need_not_be_hidden_over_heads() -> None:
    """C13."""
    parameters = {p.path: p.shape for p in Llama().program(f0_config()).parameters}
    attention = "model.layers.0.self_attn"
    assert parameters[f"{attention}.q_proj.weight"] == (96, 48)
    assert parameters[f"{attention}.k_proj.weight"] == (32, 48)
    assert parameters[f"{attention}.o_proj.weight"] == (48, 96)
    derived = read_config(without("head_dim"), tied=False)[0]
    assert derived.head_dim == 8
    body = Llama().program(f0_config()).functions["attention"].body
    (node,) = [node for node in body if node.op == "attention"]
    assert node.attrs["scale"] == 16**-0.5


def test_absence_means_what_it_means_to_transformers() -> None:
    absent = ("num_key_value_heads", "hidden_act", "attention_bias", "mlp_bias", "head_dim")
    config = without(*absent)
    typed, told = read_config(config, tied=False)
    assert told == ()
    assert (typed.kv_heads, typed.attention_bias, typed.mlp_bias) == (6, False, False)
    transformers = pytest.importorskip("transformers")
    peer = transformers.LlamaConfig(**config)
    assert (peer.num_key_value_heads, peer.attention_bias, peer.mlp_bias) == (6, False, False)
    assert (peer.hidden_act, peer.head_dim) == ("silu", typed.head_dim)


@pytest.mark.parametrize(
    ("name", "value"), [("rms_norm_eps", 1e-6), ("max_position_embeddings", 2048)]
)
def test_an_assumed_number_is_noted(name: str, value: float) -> None:
    (note,) = notes(without(name))
    assert note == f"config.json does not state {name}; assuming {value!r}, as Transformers does"
    transformers = pytest.importorskip("transformers")
    assert getattr(transformers.LlamaConfig(), name) == value


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, (None, None, None)),
        ({"sliding_window": None, "max_window_layers": 2}, (None, None, None)),
        ({"sliding_window": 4}, (4, 4, 4)),
        ({"sliding_window": 4, "use_sliding_window": True}, (4, 4, 4)),
        ({"sliding_window": 4, "use_sliding_window": False}, (None, None, None)),
        ({"sliding_window": 4, "layer_types": ["full_attention"] * 3}, (None, None, None)),
        (
            {
                "sliding_window": 4,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (4, None, 4),
        ),
    ],
)
def test_windows_by_layer(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    """C14."""
    assert read(**changes).windows == windows
    told = notes(f0_config(**changes))
    assert len(told) == (1 if any(windows) else 0)
    assert all("sliding_window 4 holds for every token" in note for note in told)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries, but there are 3 layers"),
        ({"layer_types": ["chunked_attention"] * 3}, "layer_types has 'chunked_attention'"),
        ({"layer_types": [None] * 3}, "layer_types has None"),
        ({"layer_types": ["sliding_attention"] * 3}, "no sliding_window is in use"),
        ({"sliding_window": 4, "max_window_layers": 1}, "sets max_window_layers to 1, which"),
        ({"sliding_window": 0}, "sliding_window is 0, not between 1"),
    ],
)
def test_windows_that_cannot_be_honoured(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read(**changes)


# --- keys that nothing reads ------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(set(CHANGING) - {"layer_types", "sliding_window"}))
def test_what_changes_the_arithmetic_is_refused_by_name(name: str) -> None:
    strange: Any = {"use_sliding_window": "yes", "partial_rotary_factor": 0.5}.get(name, 7)
    window = {"sliding_window": 4} if name == "max_window_layers" else {}
    with pytest.raises(ConfigError, match=name):
        read(**{name: strange}, **window)
    assert notes(f0_config(**{name: None})) == ()
    for neutral in CHANGING[name]:
        assert notes(f0_config(**{name: neutral})) == ()


def test_tables_of_keys_are_disjoint() -> None:
    assert not HARMLESS & set(CHANGING)


def test_a_config_of_the_hub_says_nothing_unknown() -> None:
    """The keys of SmolLM2's and of Llama 3.2's config.json."""
    told = notes(
        f0_config(
            _name_or_path="somebody/something",
            attention_dropout=0.0,
            initializer_range=0.041666666666666664,
            is_llama_config=True,
            pretraining_tp=1,
            rope_interleaved=False,
            rope_scaling=None,
            torch_dtype="bfloat16",
            transformers_version="4.42.3",
            use_cache=True,
            eos_token_id=[128001, 128008, 128009],
            **{"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}},
        )
    )
    assert told == ()


def test_what_is_not_known_is_noted() -> None:
    assert notes(f0_config(unsloth_version="2024.9", flavour=None, colour=3)) == (
        "config.json sets unsloth_version, colour, which nothing here reads",
    )


# --- wrong types and absurd sizes -------------------------------------------------------------

SIZES = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"]
SIZES += ["num_key_value_heads", "head_dim", "intermediate_size", "max_position_embeddings"]


@pytest.mark.parametrize("value", [0, -1, 10**12, 10**400, 2.0, "48", True, [48], {}, math.nan])
@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_reasonable_integers(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        read(**{name: value})


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "intermediate_size"])
def test_what_has_no_default_must_be_stated(name: str) -> None:
    with pytest.raises(ConfigError, match=f"does not state {name}, which this family needs"):
        read_config(without(name), tied=False)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan, not a finite number"),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps is inf, not a finite number"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05, not positive"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5', not a finite number"),
        ({"attention_bias": "false"}, "attention_bias is 'false', not true or false"),
        ({"mlp_bias": 0}, "mlp_bias is 0, not true or false"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', not true or false"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; the Llama family has 'silu'"),
        ({"hidden_act": ["silu"]}, r"hidden_act is \['silu'\], not a string"),
        ({"rope_theta": True}, "rope_theta is True, not a finite number"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', not an object"),
        ({"rope_parameters": [1]}, r"rope_parameters is \[1\], not an object"),
        ({"num_key_value_heads": 4}, "num_attention_heads 6 is not a multiple of .* 4"),
        ({"head_dim": 15}, "head_dim is 15, which rotary positions cannot halve"),
        ({"num_hidden_layers": 1001}, "num_hidden_layers is 1001, not between 1 and 1,000"),
        ({"head_dim": None, "hidden_size": 50}, "hidden_size 50 is not a multiple of 6 heads"),
    ],
)
def test_wrong_values_are_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Llama().program(f0_config(**changes))


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=10**9, max_value=10**30),
    st.floats(),
    st.sampled_from(["", "linear", "llama3", "yarn", "full_attention", "silu"]),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.sampled_from(["rope_type", "factor", "rope_theta", "mscale"]), st.floats()),
)
keys = st.sampled_from(
    [*f0_config(), *CHANGING, "rope_parameters", "rope_scaling", "tie_word_embeddings", "other"]
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(keys, values, min_size=1, max_size=3))
def test_any_config_is_read_or_refused(changes: dict[str, Any]) -> None:
    start = time.process_time()
    try:
        typed, _ = read_config(f0_config(**changes), tied=False)
    except ConfigError as error:
        assert len(str(error)) < 400
    else:
        assert all(map(math.isfinite, typed.rope.frequencies))
        json.dumps(typed.rope.settings)
    assert time.process_time() - start < 2
