"""Random checkpoints: equal for equal seeds, read like any other, and finite."""

import json

import numpy as np
import pytest

import linnet
from linnet.errors import SourceError
from linnet.nest.card import cards
from linnet.nest.random import random_values, write_random
from linnet.runtime.load import bind
from linnet.spec.program import Parameter
from linnet.spec.types import DType
from linnet.testing.fixtures import f0_config

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def values(folder):
    return {
        name: np.array(tensor.read()).astype(np.float32)
        for name, tensor in bind(folder).checkpoint.tensors.items()
    }


def test_it_binds_and_runs(tmp_path):
    folder = tmp_path / "out"
    write_random(f0_config(), folder, seed=0)
    assert (folder / "config.json").exists() and not (folder / "tokenizer.json").exists()
    with linnet.load(folder, backend="reference", dtype="f32", max_seq=64) as model:
        logits = model.session.run("forward", {"tokens": np.arange(12, dtype=np.int32)[None]})
    assert np.isfinite(logits).all() and logits.std() > 0


@pytest.mark.parametrize("dtype", ["bf16", "f32", "f16"])
def test_values(tmp_path, dtype):
    write_random(f0_config(), tmp_path / "out", seed=0, dtype=dtype)
    tensors = bind(tmp_path / "out").checkpoint.tensors
    assert {tensor.dtype for tensor in tensors.values()} == {DType(dtype)}
    for name, array in values(tmp_path / "out").items():
        if "norm" in name:
            assert array.min() >= 0.949 and array.max() <= 1.051 and array.std() > 0.01
        else:
            assert abs(array.std() - 0.02) < 0.003 and abs(array.mean()) < 0.003


def test_order_shards_and_ties_do_not_matter(tmp_path):
    write_random(f0_config(), tmp_path / "one", seed=3)
    write_random(
        f0_config(num_hidden_layers=2, tie_word_embeddings=True),
        tmp_path / "two",
        seed=3,
        max_shard_bytes=20_000,
    )
    one, two = values(tmp_path / "one"), values(tmp_path / "two")
    assert len(list((tmp_path / "two").glob("*.safetensors"))) > 3
    assert HEAD in one and HEAD not in two
    assert set(two) < set(one)
    for name, array in two.items():
        np.testing.assert_array_equal(array, one[name], err_msg=name)


def test_equal_seeds_are_equal_and_others_are_not(tmp_path):
    for name, seed in [("a", 0), ("b", 0), ("c", 1)]:
        write_random(f0_config(), tmp_path / name, seed=seed)
    a, b, c = ((tmp_path / n / "model.safetensors").read_bytes() for n in "abc")
    assert a == b != c


def test_tensors_differ_from_one_another(tmp_path):
    write_random(f0_config(), tmp_path / "out", seed=0)
    tensors = values(tmp_path / "out")
    k, v = (tensors[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "kv")
    assert not np.array_equal(k, v)


def test_the_stream_is_the_one_that_results_were_published_with():
    parameter = Parameter(EMBEDDING, (2, 3), "embedding")
    expected = [
        [0.007414110936224461, 0.008611339144408703, 0.0037960803601890802],
        [-0.01431793998926878, -0.02381947450339794, -0.00832299329340458],
    ]
    np.testing.assert_array_equal(random_values(parameter, 0, DType.F32), np.float32(expected))


def test_chunks_leave_no_seam():
    """A long tensor starts as a short one does, and is drawn to its end."""
    rows = (1 << 20) // 100 + 200
    long = random_values(Parameter("w", (rows, 100), "linear"), 0, DType.F32)
    short = random_values(Parameter("w", (10, 100), "linear"), 0, DType.F32)
    np.testing.assert_array_equal(long[:10], short)
    assert abs(long[-100:].std() - 0.02) < 0.001
    assert len(np.unique(long[-100:])) > 9000


@pytest.mark.parametrize("name", cards())
def test_config_is_in_both_dialects(tmp_path, name):
    small = {"hidden_size": 48, "num_hidden_layers": 1, "vocab_size": 64, "intermediate_size": 8}
    write_random(cards()[name].config | small, tmp_path / "out", seed=0)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    gemma = name.startswith("gemma3")
    assert config["architectures"] == ["Gemma3ForCausalLM" if gemma else "LlamaForCausalLM"]
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    rope = config["rope_parameters"]
    if gemma:
        assert rope["sliding_attention"]["rope_theta"] == config["rope_local_base_freq"]
        rope = rope["full_attention"]
    assert rope["rope_theta"] == config["rope_theta"]
    assert rope["rope_type"] == ("llama3" if name.startswith("llama-3") else "default")
    assert bind(tmp_path / "out").program.parameters  # whose config reader refuses a contradiction


def test_a_folder_with_something_in_it_is_left_alone(tmp_path):
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(SourceError, match="exists and is not an empty folder"):
        write_random(f0_config(), tmp_path, seed=0)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    (tmp_path / "empty").mkdir()
    write_random(f0_config(), tmp_path / "empty", seed=0)
    assert (tmp_path / "empty" / "model.safetensors").exists()


def test_an_interrupted_one_leaves_nothing(tmp_path):
    def interrupt(done, total):
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_random(f0_config(), tmp_path / "out", seed=0, progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_progress_ends_at_the_total(tmp_path):
    told = []
    write_random(f0_config(), tmp_path / "out", seed=0, progress=lambda *pair: told.append(pair))
    assert told == sorted(told) and told[-1][0] == told[-1][1]


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(SourceError, match="dtype is 'int8'"):
        write_random(f0_config(), tmp_path / "out", seed=0, dtype="int8")
    with pytest.raises(SourceError, match="seed is -1"):
        write_random(f0_config(), tmp_path / "out", seed=-1)
    with pytest.raises(SourceError, match="bytes free"):
        huge = f0_config(vocab_size=(1 << 31) - 1, hidden_size=1 << 20)
        write_random(huge, tmp_path / "out", seed=0)
    assert list(tmp_path.iterdir()) == []
