"""Every family's exports: to GGUF and back to the bit, and computed alike by the targets."""

from dataclasses import replace
from pathlib import Path

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
from linnet.verification.engine import Engine, ask
from linnet.weights.binding import BoundModel
from linnet_hf.testing import DTYPES, MODELS, model_with_text

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
NOT_APPLIED = {
    "mistral": "sliding window of 32 tokens",
    "qwen2, window": "sliding window of 4 tokens",
    "qwen3, window": "sliding window of 4 tokens",
    "phi3, window": "sliding window of 32 tokens",
    "gemma3, untied": "takes the embedding for the head",
    "gpt2, untied": "takes the embedding for the head",
}
"""What SGLang computes otherwise without a word, and the note of an export says."""
NOT_LOADED = ("qwen2", "qwen2, tied", "qwen2, window", "gpt2, scales")
"""What SGLang refuses by itself: Qwen 2 heads that do not add up, and a scale for each layer."""
WRITTEN = [name for name in MODELS if name not in REFUSED]


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
    model_with_text(name, tmp_path / "source", dtype)
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
    model_with_text(name, tmp_path / "source", dtype)
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
    model_with_text(name, tmp_path / "hf")
    with pytest.raises(UnavailableError, match=REFUSED[name]):
        linnet.gguf.export(bind(tmp_path / "hf"), tmp_path / "gguf")
    assert not (tmp_path / "gguf").exists()


@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_the_same_of_an_export(name: str, tmp_path: Path) -> None:
    model = model_with_text(name, tmp_path / "source")
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
def test_llamacpp_computes_what_transformers_does(
    name: str, llamacpp: Engine, tmp_path: Path
) -> None:
    model = model_with_text(name, tmp_path / "hf")
    (file, *_) = linnet.gguf.export(bind(tmp_path / "hf"), tmp_path / "gguf").files
    tokens = np.random.default_rng(0).integers(4, 131, 200)
    answer = ask(llamacpp, file, tokens.tolist(), [], threads=2)
    with torch.inference_mode():
        logits = model(torch.from_numpy(tokens)[None]).logits[0].numpy()
    assert answer.listed is not None
    distance = compare_logprobs(logits, *answer.listed)
    assert distance.kl < 1e-5 and distance.top1 >= 0.99


@pytest.mark.parametrize("name", MODELS)
def test_what_sglang_computes_otherwise_is_noted(name: str, tmp_path: Path) -> None:
    model_with_text(name, tmp_path / "source")
    notes = linnet.hf.export(bind(tmp_path / "source"), tmp_path / "out").notes
    said = [note for note in notes if "SGLang" in note]
    assert len(said) == (name in NOT_APPLIED)
    assert not said or NOT_APPLIED[name] in said[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_sglang_computes_what_transformers_does(name: str, sglang: Engine, tmp_path: Path) -> None:
    # On a processor SGLang pads the MLP to a multiple of 32, and cannot with Phi-3's joined one.
    settings = {"intermediate_size": 96} if name.startswith("phi3") else {}
    model = model_with_text(name, tmp_path / "source", **settings)
    folder = linnet.hf.export(bind(tmp_path / "source"), tmp_path / "hf").folder
    tokens = np.random.default_rng(0).integers(4, 131, 200)
    if name in NOT_LOADED:
        with pytest.raises(UnavailableError, match=r"sglang ended with status"):
            ask(sglang, folder, tokens.tolist(), [], threads=2)
        return
    answer = ask(sglang, folder, tokens.tolist(), [], threads=2)
    assert answer.listed is not None
    with torch.inference_mode():
        logits = model(torch.from_numpy(tokens)[None]).logits[0].numpy()
    distance = compare_logprobs(logits[: len(answer.listed[0])], *answer.listed)
    if name in NOT_APPLIED:  # otherwise the note is no longer true
        assert distance.kl > 0.01
        return
    assert distance.kl < 1e-5
    assert distance.top1 >= 0.99
