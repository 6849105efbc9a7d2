"""Exports held against the rules of Text Generation Inference's loader, which cannot run here.

The rules are those of its sources (release 3.3; huggingface/text-generation-inference):
``launcher/src/main.rs`` and ``router/src/lib.rs`` read the JSON into typed structures,
``server/text_generation_server/utils/weights.py`` the tensors, ``layers/rotary.py`` the rotary
settings. Transformers, vLLM and SGLang themselves load the same folders in other tests.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from safetensors import safe_open

import linnet
from linnet.nest.random import write_random
from linnet.runtime.load import bind
from linnet.testing.fixtures import f0_config
from linnet_hf.testing import MODELS, model_with_text

UNSIGNED = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "n_embd"),
    *("hidden_size", "num_attention_heads", "head_dim"),
)
"""Config keys that its launcher reads as whole numbers, or not at all."""
ROPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": (),
    "dynamic": ("factor",),
    "llama3": (
        *("factor", "low_freq_factor", "high_freq_factor"),
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor"),
}
"""Rotary types that it knows, and what it takes out of their settings unasked."""


@pytest.fixture(scope="module", params=MODELS)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export in several files of every family and variant."""
    folder = tmp_path_factory.mktemp("loaders")
    model_with_text(request.param, folder / "source")
    model = bind(folder / "source")
    linnet.hf.export(model, folder / "out", max_shard_bytes=20_000)
    return folder / "out"


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_its_launcher_and_router_read_the_json(exported: Path) -> None:
    config = read(exported / "config.json")
    assert isinstance(config["model_type"], str)
    assert config["torch_dtype"] in ("float32", "float16", "bfloat16")
    for key in UNSIGNED:
        value = config.get(key)
        assert value is None or (type(value) is int and value >= 0), key
    text = read(exported / "tokenizer_config.json")
    assert isinstance(text["chat_template"], str)
    for key in ("bos_token", "eos_token"):
        token = text.get(key)
        assert token is None or isinstance(
            token.get("content") if type(token) is dict else token, str
        )
    for key in ("add_bos_token", "add_eos_token"):
        assert text.get(key) in (None, True, False)
    assert isinstance(text.get("tokenizer_class", ""), str)
    tokenizers.Tokenizer.from_file(str(exported / "tokenizer.json"))


def test_its_weights_have_one_place_each(exported: Path) -> None:
    """It takes every safetensors file of the folder, and refuses a name that is in two."""
    files = sorted(exported.glob("*.safetensors"))
    assert len(files) > 1
    names: list[str] = []
    for file in files:
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            names += opened.keys()
    assert len(names) == len(set(names))
    config = read(exported / "config.json")
    # It looks for a head exactly where the config does not tie it.
    assert config["tie_word_embeddings"] == ("lm_head.weight" not in names)
    assert not [path for path in exported.iterdir() if path.suffix in (".bin", ".pt", ".py")]


def test_its_rotary_embedding_finds_its_settings(exported: Path) -> None:
    config = read(exported / "config.json")
    if config["model_type"] == "gpt2":
        return  # its positions are learned
    assert config["rope_theta"] > 0
    scaling = config.get("rope_scaling")
    if scaling is not None:
        kind = scaling["rope_type"]
        for key in ROPES[kind]:
            assert key in scaling
        if kind == "longrope":
            assert config["original_max_position_embeddings"] > 0


@pytest.mark.parametrize(
    ("scaling", "noted"),
    [
        ({"rope_type": "linear", "factor": 2.5}, "linear rotary scaling"),
        (
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "beta_fast": 16.0,
            },
            "beta_fast 16.0",
        ),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, None),
    ],
)
def test_what_it_computes_otherwise_is_noted(
    scaling: dict[str, Any], noted: str | None, tmp_path: Path
) -> None:
    write_random(f0_config(rope_scaling=scaling), tmp_path / "source", seed=1, dtype="f32")
    notes = linnet.hf.export(bind(tmp_path / "source"), tmp_path / "out").notes
    said = [note for note in notes if "Text Generation Inference" in note]
    assert bool(said) == (noted is not None)
    assert noted is None or noted in said[0]
