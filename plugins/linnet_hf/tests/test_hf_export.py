"""Exported folders: Transformers loads them, with logits equal to the bit, in one file or many."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import linnet
from linnet.errors import CheckpointError, UnavailableError, VerificationError
from linnet.models.llama import Llama
from linnet.plugins.interfaces import LoadOptions
from linnet.runtime.load import bind
from linnet.runtime.tokenizer import Tokenizer
from linnet.spec.types import DType
from linnet.testing.fixtures import f0_config, random_checkpoint
from linnet.testing.text import f0_text
from linnet.weights.binding import BoundModel
from linnet.weights.checkpoint import Checkpoint, StoredTensor
from linnet.weights.dtypes import cast
from linnet_hf import export
from linnet_hf.backend import VERSION, TransformersBackend

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "f0": {},
    "head_dim 8": {"head_dim": 8},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "llama3": {"rope_theta": 10000.0, "rope_scaling": LLAMA3},
    "new dialect": {"rope_theta": None, "rope_parameters": {"rope_theta": 20000.0, **LLAMA3}},
    "yarn": {
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    },
}
DTYPE = "dtype" if VERSION >= (4, 56) else "torch_dtype"


def f0(dtype: DType = DType.F32, **overrides: Any) -> BoundModel:
    checkpoint = random_checkpoint(f0_config(**overrides), seed=3)
    tensors = {
        name: StoredTensor(name, t.shape, dtype, lambda t=t: cast(t.read(), dtype, t.name))
        for name, t in checkpoint.tensors.items()
    }
    return Llama().bind(replace(checkpoint, tensors=tensors, text=f0_text()))


def logits_of(folder: Path, tokens: np.ndarray) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", **{DTYPE: "auto"}
    )
    with torch.inference_mode():
        return model(torch.from_numpy(tokens).long()).logits.float().numpy()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_transformers_loads_it_with_identical_logits(
    variant: str, dtype: str, tmp_path: Path
) -> None:
    model = f0(DType(dtype), **VARIANTS[variant])
    linnet.hf.export(model, tmp_path / "out")
    tokens = np.random.default_rng(0).integers(0, 136, (2, 300)).astype(np.int32)
    session = TransformersBackend().load(model, LoadOptions(dtype=dtype, rows=2, max_seq=300))
    assert np.array_equal(
        logits_of(tmp_path / "out", tokens), session.run("forward", {"tokens": tokens})
    )


def test_twice_changes_no_byte(tmp_path: Path) -> None:
    first = linnet.hf.export(f0(DType.BF16, attention_bias=True), tmp_path / "one")
    second = linnet.hf.export(bind(first.folder), tmp_path / "two")
    assert [path.name for path in first.files] == [path.name for path in second.files]
    for one, two in zip(first.files, second.files, strict=True):
        assert one.read_bytes() == two.read_bytes(), one.name


def test_shards_and_one_file_hold_the_same(tmp_path: Path) -> None:
    model = f0()
    many = linnet.hf.export(model, tmp_path / "many", max_shard_bytes=40_000)
    shards = [path for path in many.files if path.suffix == ".safetensors"]
    assert len(shards) > 5 and all(path.stat().st_size < 44_000 for path in shards)
    tokens = np.arange(64, dtype=np.int32)[None]
    linnet.hf.export(model, tmp_path / "one")
    assert np.array_equal(logits_of(tmp_path / "many", tokens), logits_of(tmp_path / "one", tokens))


def test_both_dialects_are_written(tmp_path: Path) -> None:
    linnet.hf.export(f0(DType.BF16, **VARIANTS["new dialect"]), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 20000
    assert config["rope_scaling"]["rope_type"] == config["rope_parameters"]["rope_type"] == "llama3"
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    template = (tmp_path / "out" / "chat_template.jinja").read_text()
    assert settings["chat_template"] == template == f0_text().chat_template
    (weights,) = (tmp_path / "out").glob("*.safetensors")
    header = weights.read_bytes()[8 : 8 + int.from_bytes(weights.read_bytes()[:8], "little")]
    assert json.loads(header)["__metadata__"] == {"format": "pt"}


def test_names_that_only_new_readers_know_are_not_written(tmp_path: Path) -> None:
    model = f0()
    settings = {"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["<|im_start|>"]}
    model = replace(model, checkpoint=replace(model.checkpoint, text=f0_text(**settings)))
    linnet.hf.export(model, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert written["additional_special_tokens"] == ["<|im_start|>"]
    assert "extra_special_tokens" not in written


def test_every_end_is_written(tmp_path: Path) -> None:
    model = f0()
    text = replace(f0_text(), generation_config={"eos_token_id": [11, 13], "temperature": 0.6})
    model = replace(model, checkpoint=replace(model.checkpoint, text=text))
    linnet.hf.export(model, tmp_path / "out")
    generation = GenerationConfig.from_pretrained(tmp_path / "out")
    assert generation.eos_token_id == [2, 11, 13]
    assert generation.temperature == 0.6
    again = bind(tmp_path / "out").checkpoint
    assert set(Tokenizer(again.text, again.config).end_ids) == {2, 11, 13}


def test_transformers_reads_the_tokenizer_as_linnet_does(tmp_path: Path) -> None:
    model = f0()
    linnet.hf.export(model, tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    ours = Tokenizer(model.checkpoint.text, model.checkpoint.config)
    for text in ("Hello world 123's", "<|im_start|>user\nHello<think>  and\n\n<|im_end|>"):
        assert theirs(text)["input_ids"] == ours.encode(text)
    messages = [{"role": "user", "content": "Hello"}]
    assert theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        ours.render_chat(messages)
    )


def test_files_beside_the_tokenizer_are_copied(tmp_path: Path) -> None:
    linnet.hf.export(f0(), tmp_path / "one")
    (tmp_path / "one" / "tokenizer.model").write_bytes(b"\x00pieces")
    linnet.hf.export(bind(tmp_path / "one"), tmp_path / "two")
    assert (tmp_path / "two" / "tokenizer.model").read_bytes() == b"\x00pieces"


def test_a_vector_that_would_be_rounded_keeps_its_dtype_unless_asked(tmp_path: Path) -> None:
    """As in a GGUF file: matrices in bf16, norms in f32, one of them not bf16's."""
    model = f0(DType.BF16)
    name, other = "model.norm.weight", "model.layers.0.input_layernorm.weight"
    stored = dict(model.checkpoint.tensors)
    exact = np.full(48, 1 + 2**-20, np.float32)
    rounds = np.full(48, 1.25, np.float32)
    stored[name] = StoredTensor(name, (48,), DType.F32, lambda: exact)
    stored[other] = StoredTensor(other, (48,), DType.F32, lambda: rounds)
    model = Llama().bind(replace(model.checkpoint, tensors=stored))
    artifact = linnet.hf.export(model, tmp_path / "exact")
    assert artifact.notes == (
        "model.norm.weight is written as f32, as it is stored: bf16 would round it",
    )
    again = bind(artifact.folder)
    assert np.array_equal(again.parameters[name].read(), exact)
    assert again.parameters[other].read().dtype == ml_dtypes.bfloat16
    linnet.hf.export(model, tmp_path / "bf16", dtype="bf16")
    assert bind(tmp_path / "bf16").parameters[name].dtype is DType.BF16


def test_what_is_asked_wrongly_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    for options, message in (
        ({"dtype": "q8_0"}, "f32, bf16, f16, not 'q8_0'"),
        ({"max_shard_bytes": "0"}, "max_shard_bytes is '0'"),
        ({"shards": 3}, "no option shards"),
    ):
        with pytest.raises(UnavailableError, match=message):
            linnet.hf.export(f0(), tmp_path / "out", **options)
    with pytest.raises(UnavailableError, match="sliding window of 32 tokens"):
        linnet.hf.export(f0(sliding_window=32), tmp_path / "out")
    with pytest.raises(
        UnavailableError, match="can run transformers, vllm, sglang on what it writes"
    ):
        linnet.hf.export(f0(), tmp_path / "out", verify="tgi")
    broken = f0()
    name = "model.norm.weight"
    values = np.full(48, 1e30, np.float32)
    tensors = {
        **broken.checkpoint.tensors,
        name: StoredTensor(name, (48,), DType.F32, lambda: values),
    }
    broken = Llama().bind(Checkpoint(Path("f0"), "memory", broken.checkpoint.config, tensors))
    with pytest.raises(CheckpointError, match="48 of 48 values do not fit f16"):
        linnet.hf.export(broken, tmp_path / "out", dtype="f16")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_verified_by_transformers(dtype: str, tmp_path: Path) -> None:
    """In a process that loads the folder as anyone would: the very logits, and every text's ids."""
    artifact = linnet.hf.export(f0(), tmp_path / "out", dtype=dtype, verify=True)
    written = json.loads((tmp_path / "out" / "linnet-export.json").read_text())
    assert tmp_path / "out" / "linnet-export.json" in artifact.files
    assert written["distance"]["max_abs"] == 0 and written["distance"]["positions"] == 511
    assert written["texts"] == {"compared": 60, "differing": []}
    assert written["engine"] == "transformers" and "transformers" in written["versions"]


def test_an_export_that_differs_is_not_kept(tmp_path: Path, monkeypatch: Any) -> None:
    """As if the writer had a fault: one norm is written scaled."""
    model = f0()
    name = "model.layers.1.input_layernorm.weight"
    honest = export._entry

    def faulty(tensor: Any, *rest: Any) -> Any:
        entry = honest(tensor, *rest)
        scaled = tensor.name == name
        return entry._replace(read=lambda: entry.read() * np.float32(1.01)) if scaled else entry

    monkeypatch.setattr(export, "_entry", faulty)
    with pytest.raises(VerificationError, match=r"max_abs is .*, above 0; nothing was written"):
        linnet.hf.export(model, tmp_path / "out", verify="transformers")
    assert not list(tmp_path.iterdir())


def test_names_are_whole_and_a_tied_head_is_written_once(tmp_path: Path) -> None:
    """From a checkpoint whose names lack the prefix and that stores its tied head as well."""
    model = f0(tie_word_embeddings=True)
    stored = {
        name.removeprefix("model."): replace(tensor, name=name.removeprefix("model."))
        for name, tensor in model.checkpoint.tensors.items()
    }
    stored["lm_head.weight"] = replace(stored["embed_tokens.weight"], name="lm_head.weight")
    odd = Llama().bind(replace(model.checkpoint, tensors=stored))
    linnet.hf.export(odd, tmp_path / "odd")
    linnet.hf.export(model, tmp_path / "plain")
    written = (tmp_path / "odd" / "model.safetensors").read_bytes()
    assert written == (tmp_path / "plain" / "model.safetensors").read_bytes()
