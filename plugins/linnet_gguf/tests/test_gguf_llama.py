"""The ``llama`` architecture: config, names, row orders and rope, and what is refused."""

import re
from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import pytest

from linnet.errors import CheckpointError
from linnet_gguf import names
from linnet_gguf.rope import llama3_factors, llama3_settings

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 16


def rotated(gguf_rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo the interleaving the long way: pair (2i, 2i + 1) of a head goes to i and i + half."""
    result = np.empty_like(gguf_rows)
    half = HEAD_DIM // 2
    for head in range(heads):
        for i in range(half):
            for part in (0, 1):
                result[head * HEAD_DIM + part * half + i] = gguf_rows[
                    head * HEAD_DIM + 2 * i + part
                ]
    return result


def test_interleaved_rows_of_two_key_heads() -> None:
    expected = [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]
    assert names.interleaved(heads=2, head_dim=8).tolist() == expected


@pytest.mark.parametrize(("heads", "head_dim"), [(6, 16), (2, 8), (1, 2), (9, 64)])
def test_row_orders_undo_each_other(heads: int, head_dim: int) -> None:
    there, back = names.interleaved(heads, head_dim), names.halves(heads, head_dim)
    np.testing.assert_array_equal(there[back], np.arange(heads * head_dim))
    np.testing.assert_array_equal(back[there], np.arange(heads * head_dim))


def test_names_go_both_ways(make_llama: Callable[..., Any]) -> None:
    for name in make_llama(biases=True).tensors:
        ours = names.to_transformers(name)
        assert ours is not None
        assert names.to_gguf(ours) == name
    assert names.to_transformers("blk.0.attn_q.weight") == "model.layers.0.self_attn.q_proj.weight"
    for unknown in ("blk.0.ffn_gate_exps.weight", "blk.00.attn_q.weight", "blk.0.attn_q.scale"):
        assert names.to_transformers(unknown) is None
    assert names.to_gguf("model.layers.0.self_attn.rotary_emb.inv_freq") is None


def test_every_tensor_under_its_name_and_in_its_row_order(
    make_llama: Callable[..., Any], open_model: Callable[..., Any]
) -> None:
    model = make_llama(biases=True)
    checkpoint = open_model(model)
    assert len(checkpoint.tensors) == len(model.tensors)
    for name, values in model.tensors.items():
        heads = HEADS if "attn_q" in name else KV_HEADS if "attn_k" in name else None
        expected = values if heads is None else rotated(values, heads)
        stored = checkpoint.tensors[names.to_transformers(name)]
        assert stored.shape == expected.shape
        assert (stored.dtype, stored.encoding) == ("f32", None)
        np.testing.assert_array_equal(stored.read(), expected)


def test_config_of_the_fixture(open_with: Callable[..., Any]) -> None:
    config = open_with({}).config
    assert config == {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 136,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 1,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "rope_theta": 500000.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
        "dtype": "float32",
        "torch_dtype": "float32",
    }


def test_head_dim_is_read_not_derived(open_with: Callable[..., Any]) -> None:
    checkpoint = open_with({})
    tensors = checkpoint.tensors
    assert tensors["model.layers.0.self_attn.q_proj.weight"].shape == (96, 48)
    assert tensors["model.layers.0.self_attn.o_proj.weight"].shape == (48, 96)
    keys = ("attention.key_length", "attention.value_length", "rope.dimension_count")
    only_rope = {f"llama.{key}": None for key in keys[:2]}
    assert open_with(only_rope).config["head_dim"] == 16
    with pytest.raises(CheckpointError, match="6 heads of 8 make 48 rows"):
        open_with({f"llama.{key}": None for key in keys})
    with pytest.raises(CheckpointError, match=r"key_length = 16, .*dimension_count = 8"):
        open_with({"llama.rope.dimension_count": 8})


def test_ties_and_biases_come_from_the_tensors(
    make_llama: Callable[..., Any], open_model: Callable[..., Any]
) -> None:
    tied = open_model(make_llama(tied=True))
    assert tied.config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in tied.tensors
    model = make_llama(biases=True)
    config = open_model(model).config
    assert (config["attention_bias"], config["mlp_bias"]) == (True, True)
    del model.tensors["blk.1.attn_output.bias"]
    with pytest.raises(CheckpointError, match=r"has 11 biases .* 12 are expected or none"):
        open_model(model)


@pytest.mark.parametrize(
    ("dtype", "name"), [(np.float16, "float16"), (np.float32, "float32"), ("bf16", "bfloat16")]
)
def test_dtype_is_that_of_the_matrices(
    dtype: Any, name: str, make_llama: Callable[..., Any], open_model: Callable[..., Any]
) -> None:
    model = make_llama(layers=1)
    for key, values in model.tensors.items():
        if values.ndim == 2 and dtype == "bf16":
            kind = model.types[key] = gguf.GGMLQuantizationType.BF16
            model.tensors[key] = gguf.quants.quantize(values, kind)
        elif values.ndim == 2:
            model.tensors[key] = values.astype(dtype)
    checkpoint = open_model(model)
    assert checkpoint.config["dtype"] == checkpoint.config["torch_dtype"] == name
    assert checkpoint.tensors["model.norm.weight"].dtype == "f32"
    assert checkpoint.notes == ()


def test_quantized_tensors_are_f32_and_said_so(
    make_llama: Callable[..., Any], open_model: Callable[..., Any]
) -> None:
    model = make_llama(layers=1)
    name, kind = "blk.0.attn_output.weight", gguf.GGMLQuantizationType.Q4_1  # Rows of 96.
    packed = gguf.quants.quantize(model.tensors[name], kind)
    model.tensors[name], model.types[name] = packed, kind
    checkpoint = open_model(model)
    stored = checkpoint.tensors["model.layers.0.self_attn.o_proj.weight"]
    assert (stored.dtype, stored.encoding, stored.shape) == ("f32", "q4_1", (48, 96))
    np.testing.assert_array_equal(stored.read(), gguf.quants.dequantize(packed, kind))
    assert "1 as q4_1" in checkpoint.notes[0]
    assert checkpoint.config["dtype"] == "float32"


def test_factors_of_llama_3(make_llama: Callable[..., Any], open_model: Callable[..., Any]) -> None:
    table = llama3_factors(10000.0, 16, factor=8, low=1, high=4, original=64)
    expected = [1, 1.293976, 7.667385, 8, 8, 8, 8, 8]
    np.testing.assert_allclose(table, expected, rtol=1e-6)
    model = make_llama(layers=1)
    model.metadata["llama.rope.freq_base"] = 10000.0
    model.tensors["rope_freqs.weight"] = np.array(expected, np.float32)
    checkpoint = open_model(model)
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    assert checkpoint.config["rope_parameters"] == {"rope_theta": 10000.0, **scaling}
    assert checkpoint.config["rope_scaling"] == scaling
    assert not any("rope" in name for name in checkpoint.tensors)


@pytest.mark.parametrize("original", [64, 100, 4096, 8192, 16384])
@pytest.mark.parametrize(
    ("theta", "head_dim", "factor"), [(5e5, 64, 32.0), (5e5, 128, 8.0), (1e4, 16, 8.0)]
)
def test_settings_are_found_again(
    original: int, theta: float, head_dim: int, factor: float
) -> None:
    table = llama3_factors(theta, head_dim, factor=factor, low=1, high=4, original=original)
    for stated in (None, original):
        found = llama3_settings(table, theta, head_dim, stated)
        assert found is not None
        again = llama3_factors(
            theta,
            head_dim,
            factor=found["factor"],
            low=found["low_freq_factor"],
            high=found["high_freq_factor"],
            original=found["original_max_position_embeddings"],
        )
        np.testing.assert_allclose(again, table, rtol=1e-5)
    assert llama3_settings(table, theta, head_dim)["factor"] == factor  # type: ignore[index]


def test_the_table_of_llama_3_2_names_its_settings() -> None:
    table = llama3_factors(500000.0, 64, factor=32, low=1, high=4, original=8192)
    found = llama3_settings(table, 500000.0, 64)
    assert found is not None
    assert (found["factor"], found["original_max_position_embeddings"]) == (32.0, 8192)


@pytest.mark.parametrize(
    "table",
    [
        [1, 2, 3, 4, 5, 6, 7, 8],
        [1, 1, 1, 1, 8, 8, 8, 1],
        [1, 2, 3],
        [0, 1, 1, 1, 1, 1, 1, 8],
        [1, 1.2, 7.667385, 8, 8, 8, 8, 8],
        [1, np.nan, 8, 8, 8, 8, 8, 8],
    ],
)
def test_other_tables_are_refused(
    table: list[float], make_llama: Callable[..., Any], open_model: Callable[..., Any]
) -> None:
    model = make_llama(layers=1)
    model.metadata["llama.rope.freq_base"] = 10000.0
    model.tensors["rope_freqs.weight"] = np.array(table, np.float32)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight is not a Llama 3 table"):
        open_model(model)


def test_a_table_of_ones_is_no_scaling(
    make_llama: Callable[..., Any], open_model: Callable[..., Any]
) -> None:
    model = make_llama(layers=1)
    model.tensors["rope_freqs.weight"] = np.ones(8, np.float32)
    assert open_model(model).config["rope_parameters"]["rope_type"] == "default"


def test_linear_and_yarn_scaling(open_with: Callable[..., Any]) -> None:
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    expected = {"rope_type": "linear", "factor": 4.0}
    assert open_with(linear).config["rope_scaling"] == expected
    # llama.cpp's older key, and its rule for a factor without a type.
    assert open_with({"llama.rope.scale_linear": 4.0}).config["rope_scaling"] == expected
    assert "rope_scaling" not in open_with({**linear, "llama.rope.scaling.type": "none"}).config
    yarn = open_with(
        {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.original_context_length": 128,
            "llama.rope.scaling.yarn_beta_fast": 16.0,
            "llama.rope.scaling.finetuned": True,
        }
    )
    assert yarn.config["rope_parameters"] == {
        "rope_theta": 500000.0,
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16.0,
    }


REFUSED = {
    "llama.block_count": (None, "does not have the metadata key llama.block_count"),
    "llama.embedding_length": (None, "does not have the metadata key llama.embedding_length"),
    "llama.context_length": (None, "does not have the metadata key llama.context_length"),
    "llama.feed_forward_length": (None, "llama.feed_forward_length is None"),
    "llama.attention.head_count": (None, "llama.attention.head_count"),
    "llama.attention.layer_norm_rms_epsilon": (None, "layer_norm_rms_epsilon"),
    "general.architecture": (
        "mamba",
        "architecture 'mamba'; known here: gemma3, gpt2, llama, phi3, qwen2",
    ),
    "llama.expert_count": (8, "expert_count is 8: mixtures of experts"),
    "llama.attention.head_count_kv": (4, "head_count is 6 and .*_kv is 4"),
    "llama.attention.scale": (0.5, "sets llama.attention.scale, which this reader does not know"),
    "llama.rope.scaling.type": ("longrope", "is 'longrope'; supported are none, linear, yarn"),
    "llama.rope.scaling.attn_factor": (1.5, "attn_factor is 1.5, which is not supported"),
    "llama.rope.freq_base": (0.0, "freq_base is 0.0, not positive"),
    "split.count": (3, "is one of 3 parts .*llama-gguf-split --merge"),
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_cannot_be_honoured_is_refused(key: str, open_with: Callable[..., Any]) -> None:
    value, message = REFUSED[key]
    with pytest.raises(CheckpointError, match=message):
        open_with({key: value})


def test_counts_by_layer(make_llama: Callable[..., Any], open_model: Callable[..., Any]) -> None:
    model = make_llama(layers=3)
    model.metadata["llama.attention.head_count_kv"] = [2, 2, 2]
    assert open_model(model).config["num_key_value_heads"] == 2
    model.metadata["llama.attention.head_count_kv"] = [2, 1, 2]
    with pytest.raises(CheckpointError, match=re.escape("differs by layer ([1, 2])")):
        open_model(model)


def test_unknown_tensors_are_refused(
    make_llama: Callable[..., Any], open_model: Callable[..., Any]
) -> None:
    model = make_llama(layers=1)
    model.tensors["blk.0.attn_q_norm.weight"] = np.ones(16, np.float32)
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_q_norm\.weight is not one of"):
        open_model(model)
    model = make_llama(layers=1)
    del model.tensors["token_embd.weight"]
    with pytest.raises(CheckpointError, match=r"does not have the tensor token_embd\.weight"):
        open_model(model)


def test_unstated_things_are_noted(open_with: Callable[..., Any]) -> None:
    checkpoint = open_with({"llama.rope.freq_base": None, "llama.vocab_size": 131})
    assert checkpoint.config["rope_theta"] == 10000.0
    assert checkpoint.config["vocab_size"] == 136
    assert any("rope.freq_base; assuming 10000" in note for note in checkpoint.notes)
    assert any("vocab_size is 131, but" in note for note in checkpoint.notes)
