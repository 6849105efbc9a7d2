"""Every family's exports: to GGUF and back to the bit, and computed alike by the targets."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import linnet
from linnet.distance import compare_logprobs
from linnet.errors import UnavailableError
from linnet.runtime.load import bind
from linnet.runtime.tokenizer import Tokenizer
from linnet.spec.serialize import fingerprint
from linnet.testing.text import f0_text
from linnet.verification.engine import ask
from linnet.weights.binding import BoundModel
from linnet.weights.safetensors import write_text
from linnet_gguf.export import LLAMACPP
from linnet_hf.testing import MODELS, random_model

NOT_SQUARE = "6 heads of 16 dimensions are not the hidden size 48"
REFUSED = {
    "mistral": "sliding window of 32 tokens",
    "qwen2": NOT_SQUARE,
    "qwen2, tied": NOT_SQUARE,
    "qwen2, window": "sliding window of 4 tokens",
    "qwen3, window": "sliding window of 4 tokens",
    "qwen3, biases": "attention_bias",
    "gemma3, biases": "attention_bias",
    "gemma3, another turn": "layer_types",
    "phi3": NOT_SQUARE,
    "phi3, tied": NOT_SQUARE,
    "phi3, window": "sliding window of 32 tokens",
    "phi3, partial": NOT_SQUARE,
    "gpt2, scales": "the layers scale scores by",
    "gpt2, exact gelu": "the exact GELU",
}
"""What llama.cpp would compute otherwise, and why."""
WRITTEN = [name for name in MODELS if name not in REFUSED]
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def saved(name: str, folder: Path, dtype: str = "f32") -> Any:
    """A random model in ``folder``, with F0's tokenizer of 131 tokens for its 136 rows."""
    model = random_model(name).to(DTYPES[dtype])
    model.save_pretrained(folder)
    text = f0_text()
    assert text.tokenizer is not None and text.chat_template is not None
    write_text(folder / "tokenizer.json", text.tokenizer)
    write_text(folder / "chat_template.jinja", text.chat_template)
    write_text(folder / "tokenizer_config.json", json.dumps(text.tokenizer_config))
    write_text(folder / "generation_config.json", json.dumps(text.generation_config))
    return model


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def assert_same(one: BoundModel, other: BoundModel) -> None:
    """The same program, values to the bit, and the same text side."""
    ours, theirs = (
        fingerprint(replace(model.program, family="any")) for model in (one, other)
    )  # a Mistral comes back as the Llama that it is
    assert ours == theirs
    assert one.parameters.keys() == other.parameters.keys()
    for path, parameter in one.parameters.items():
        mine, its = parameter.read(), other.parameters[path].read()
        assert mine.astype(np.float64).tobytes() == its.astype(np.float64).tobytes(), path
    mine_, its_ = (Tokenizer(m.checkpoint.text, m.checkpoint.config) for m in (one, other))
    text = "Hello world 123's<|im_end|>\n"
    assert mine_.encode(text) == its_.encode(text)
    assert set(mine_.end_ids) == set(its_.end_ids)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WRITTEN)
def test_from_hf_to_gguf_and_back(name: str, dtype: str, tmp_path: Path) -> None:
    saved(name, tmp_path / "source", dtype)
    source = bind(tmp_path / "source")
    linnet.gguf.export(source, tmp_path / "gguf", name="x")
    linnet.hf.export(bind(tmp_path / "gguf"), tmp_path / "back")
    assert_same(source, bind(tmp_path / "back"))
    # Once more around, from the other side, and no byte of either differs.
    linnet.gguf.export(bind(tmp_path / "back"), tmp_path / "gguf2", name="x")
    assert files(tmp_path / "gguf") == files(tmp_path / "gguf2")
    linnet.hf.export(bind(tmp_path / "gguf2"), tmp_path / "back2")
    assert files(tmp_path / "back") == files(tmp_path / "back2")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WRITTEN)
def test_from_gguf_to_hf_and_back(name: str, dtype: str, tmp_path: Path) -> None:
    """The file comes back to the byte, and so it does the second time."""
    saved(name, tmp_path / "source", dtype)
    first = linnet.gguf.export(bind(tmp_path / "source"), tmp_path / "gguf", name="x").folder
    wanted = files(first)
    for turn in ("one", "two"):
        linnet.hf.export(bind(first), tmp_path / f"hf {turn}")
        first = linnet.gguf.export(
            bind(tmp_path / f"hf {turn}"), tmp_path / f"gguf {turn}", name="x"
        ).folder
        assert files(first) == wanted
    assert files(tmp_path / "hf one") == files(tmp_path / "hf two")


@pytest.mark.parametrize("name", REFUSED)
def test_what_llamacpp_computes_otherwise_is_refused(name: str, tmp_path: Path) -> None:
    saved(name, tmp_path / "hf")
    with pytest.raises(UnavailableError, match=REFUSED[name]):
        linnet.gguf.export(bind(tmp_path / "hf"), tmp_path / "gguf")
    assert not (tmp_path / "gguf").exists()


@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_the_same_of_an_export(name: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path / "source")
    folders = [tmp_path / "hf"]
    linnet.hf.export(bind(tmp_path / "source"), folders[0])
    if name in WRITTEN:
        linnet.gguf.export(bind(tmp_path / "source"), tmp_path / "gguf")
        linnet.hf.export(bind(tmp_path / "gguf"), tmp_path / "from gguf")
        folders.append(tmp_path / "from gguf")
    tokens = torch.arange(400)[None] % 136
    for folder in folders:
        loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True
        )
        assert not any(report.values()), report
        with torch.inference_mode():
            assert torch.equal(loaded(tokens).logits, model(tokens).logits)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITTEN)
def test_llamacpp_computes_what_transformers_does(name: str, tmp_path: Path) -> None:
    try:
        LLAMACPP.python()
    except UnavailableError as error:
        pytest.skip(str(error))
    model = saved(name, tmp_path / "hf")
    (file, *_) = linnet.gguf.export(bind(tmp_path / "hf"), tmp_path / "gguf").files
    tokens = np.random.default_rng(0).integers(4, 131, 200)
    answer = ask(LLAMACPP, file, tokens.tolist(), [], threads=2)
    with torch.inference_mode():
        logits = model(torch.from_numpy(tokens)[None]).logits[0].numpy()
    assert answer.listed is not None
    distance = compare_logprobs(logits, *answer.listed)
    assert distance.kl < 1e-5 and distance.top1 >= 0.99
